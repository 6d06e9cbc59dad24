"""The peer aiobotocore on uvloop: concurrent ranged GETs, bodies by `readany()`, written in order."""

from __future__ import annotations

import sys
from typing import Any

import uvloop
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from benchmarks.peers.agent import stream_all
from benchmarks.task import read_task


async def main() -> None:
    task = read_task(sys.argv[1])
    config = AioConfig(
        s3={"addressing_style": "path"},
        max_pool_connections=task.setting["requests"] + len(task.streams) * 2,
        response_checksum_validation="when_required",
    )
    client = get_session().create_client(
        "s3", region_name="us-east-1", endpoint_url=task.url, verify=task.ca_bundle, config=config
    )
    async with client as s3:

        async def get(bucket: str, key: str, start: int, end: int) -> list[bytes]:
            answer: Any = await s3.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
            body, left = [], end - start
            async with answer["Body"] as stream:
                content = stream.raw_stream.content
                while data := await content.readany():
                    body.append(data)
                    left -= len(data)
            if left:
                raise EOFError(f"{key}: {left} bytes are missing")
            return body

        await stream_all(task, get)


if __name__ == "__main__":
    uvloop.run(main())
