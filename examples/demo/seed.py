"""Makes the sample data and uploads it: `python -m examples.demo.seed --endpoint-url URL --bucket demo`.

Credentials come from the environment, as with every AWS client. Two threads make and upload shards, because
NumPy and sockets release the interpreter's lock. So at most two shards are in memory.
"""

from __future__ import annotations

import argparse
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from examples.demo.dataset import CLASSES, Channel, channels
from examples.demo.progress import progress

WORKERS = 2


def upload(client: Any, bucket: str, channel: Channel) -> None:
    """Make every shard of `channel` and put it into `bucket`. Raises botocore's errors."""
    lock = threading.Lock()
    with (
        progress(f"upload {channel.name}", channel.total_bytes) as advance,
        ThreadPoolExecutor(WORKERS) as workers,
    ):

        def put(index: int) -> None:
            shard = channel.shard(index)
            client.put_object(Bucket=bucket, Key=channel.key(index), Body=shard)
            with lock:
                advance(len(shard))

        uploads = [workers.submit(put, index) for index in range(channel.objects)]
        wait(uploads, return_when=FIRST_EXCEPTION)
        workers.shutdown(wait=False, cancel_futures=True)
        for each in uploads:
            if each.done() and not each.cancelled():
                each.result()


def ensure_bucket(client: Any, bucket: str) -> None:
    """Create `bucket` unless it is there. Raises botocore's errors."""
    try:
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        client.create_bucket(Bucket=bucket)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the amount of data and its seed."""
    parser.add_argument("--megabytes", type=float, default=500, help="size of the train channel (500)")
    parser.add_argument("--objects", type=int, default=16, help="objects in the train channel (16)")
    parser.add_argument("--seed", type=int, default=7, help="the same seed makes the same bytes (7)")
    parser.add_argument("--classes", type=int, default=CLASSES, help=f"number of labels ({CLASSES})")


def sized_channels(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[Channel, Channel]:
    """Return the two channels that the options describe; end the program if an option is invalid."""
    try:
        return channels(
            megabytes=arguments.megabytes,
            objects=arguments.objects,
            seed=arguments.seed,
            classes=arguments.classes,
        )
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.seed", description=__doc__)
    parser.add_argument("--endpoint-url", required=True)
    parser.add_argument("--bucket", required=True)
    add_size_options(parser)
    arguments = parser.parse_args()
    wanted = sized_channels(parser, arguments)
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=arguments.endpoint_url,
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=WORKERS),
    )
    try:
        ensure_bucket(client, arguments.bucket)
        for channel in wanted:
            upload(client, arguments.bucket, channel)
    except (BotoCoreError, ClientError) as error:
        print(f"seed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
