"""The peer awscrt's S3 client: one meta request per object, which the library splits into ranges.

The library passes a body in order to a callback, in its own thread. With `objects` = 1 the callback writes to
the FIFO, so a slow reader slows the download, and the next object is requested after the last has ended. With
more objects in flight, which small objects need, bodies wait in queues and a thread per stream writes them.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from awscrt.auth import AwsCredentialsProvider
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import ClientTlsContext, TlsContextOptions
from awscrt.s3 import (
    S3Client,
    S3RequestTlsMode,
    S3RequestType,
    create_default_s3_signing_config,
)

from benchmarks.peers.agent import MIB, wait_for_end, wait_for_go
from benchmarks.task import Stream, Task, read_task


def make_client(task: Task) -> S3Client:
    credentials = AwsCredentialsProvider.new_static(
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    )
    options: dict[str, Any] = {"tls_mode": S3RequestTlsMode.DISABLED}
    if task.ca_bundle:
        tls = TlsContextOptions()
        tls.override_default_trust_store_from_path(None, task.ca_bundle)
        options = {
            "tls_mode": S3RequestTlsMode.ENABLED,
            "tls_connection_options": ClientTlsContext(tls).new_connection_options(),
        }
    return S3Client(
        region="us-east-1",
        signing_config=create_default_s3_signing_config(region="us-east-1", credential_provider=credentials),
        part_size=8 * MIB,
        throughput_target_gbps=task.setting["gbps"],
        **options,
    )


def get(client: S3Client, host: str, stream: Stream, key: str, feed: Callable[[bytes], None]) -> Future[None]:
    request = HttpRequest("GET", f"/{stream.bucket}/{key}", HttpHeaders([("Host", host)]))
    made = client.make_request(
        type=S3RequestType.GET_OBJECT, request=request, on_body=lambda chunk, **_: feed(chunk)
    )
    finished: Future[None] = made.finished_future
    return finished


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        # The reader has reached its time limit and left; an orderly end would download the rest.
        wait_for_end()
        os._exit(0)


def one_by_one(client: S3Client, host: str, stream: Stream, fd: int) -> None:
    for key in stream.keys:
        get(client, host, stream, key, lambda chunk: write_all(fd, chunk)).result()


def several(client: S3Client, host: str, stream: Stream, fd: int, *, ahead: int) -> None:
    flying: deque[SimpleQueue[bytes | Future[None]]] = deque()
    keys = iter(stream.keys)

    def launch() -> None:
        if (key := next(keys, None)) is not None:
            body: SimpleQueue[bytes | Future[None]] = SimpleQueue()
            flying.append(body)
            get(client, host, stream, key, body.put).add_done_callback(body.put)

    for _ in range(ahead):
        launch()
    while flying:
        body = flying.popleft()
        while isinstance(item := body.get(), bytes):
            write_all(fd, item)
        item.result()
        launch()


def feed(client: S3Client, host: str, stream: Stream, *, ahead: int) -> None:
    fd = os.open(stream.fifo, os.O_WRONLY)
    try:
        if ahead == 1:
            one_by_one(client, host, stream, fd)
        else:
            several(client, host, stream, fd, ahead=ahead)
    except Exception:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        os._exit(1)  # a failed thread must not look like the end of its stream
    os.close(fd)


def main() -> None:
    task = read_task(sys.argv[1])
    client, host = make_client(task), urlsplit(task.url).netloc
    wait_for_go()
    ahead = max(1, task.setting["objects"] // len(task.streams))
    threads = [
        threading.Thread(target=feed, args=(client, host, stream), kwargs={"ahead": ahead})
        for stream in task.streams
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for_end()


if __name__ == "__main__":
    main()
