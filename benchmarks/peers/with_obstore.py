"""The peer obstore (Rust's object_store): concurrent `get_range_async`, written in order without a copy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import uvloop
from obstore.store import S3Store

from benchmarks.peers.agent import stream_all
from benchmarks.task import read_task

if TYPE_CHECKING:
    from obstore.store import ClientConfig


def certificate(path: str) -> bytes:
    return Path(path).read_bytes()


async def main() -> None:
    task = read_task(sys.argv[1])
    options: ClientConfig = {"allow_http": True}
    if task.ca_bundle:
        options["root_certificate"] = certificate(task.ca_bundle)
    stores = {
        stream.bucket: S3Store(
            stream.bucket,
            endpoint=task.url,
            region="us-east-1",
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            virtual_hosted_style_request=False,
            client_options=options,
        )
        for stream in task.streams
    }

    async def get(bucket: str, key: str, start: int, end: int) -> Iterable[Any]:
        return (await obstore.get_range_async(stores[bucket], key, start=start, end=end),)

    await stream_all(task, get)


if __name__ == "__main__":
    uvloop.run(main())
