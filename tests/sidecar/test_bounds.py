"""No wait is longer than the limits that a user states, whatever the server does meanwhile; as processes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.errors import Expired
from streamer.s3.client.credentials import RenewableCredentials
from tests.kit.harness import fill
from tests.kit.processes import job, penstock, write_job
from tests.kit.raw import Request, answer, listing, raw_server
from tests.kit.stub import S3Stub, stalls

pytestmark = pytest.mark.usefixtures("credentials")
GAVE_UP = re.compile(r"gave up after (\d+) s without")
LESS_THAN = 30
"""Seconds of the stall timeout: what ends after `GiveUpAfter` of 2 has not waited for that."""


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts every connection and never answers."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(listening.accept()[0])

        thread = threading.Thread(target=accept, name="silent server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in held:
                sock.close()


def seconds_said(text: str) -> int:
    found = GAVE_UP.search(text)
    assert found, text
    return int(found[1])


def test_cat_gives_up_while_it_lists() -> None:
    with silent_server() as url:
        done = penstock("cat", "s3://b/data/", "--endpoint-url", url, "--path-style", "--give-up-after", "2")
    assert done.returncode == 5
    assert 2 <= seconds_said(done.stderr) < LESS_THAN
    assert "s3://b/data/" in done.stderr


@pytest.mark.parametrize("transport", ["splice", "buffered", "aiobotocore"])
def test_cat_gives_up_in_a_body(stub: S3Stub, transport: str) -> None:
    """After 2 s, though a request alone may be silent for 30."""
    fill(stub, [3_000_000], prefix="b/data/")
    stub.script(*[stalls(stub)] * 200)
    options = ("--endpoint-url", stub.url, "--path-style", "--transport", transport)
    done = penstock("cat", "s3://b/data/", *options, "--give-up-after", "2", text=False)
    stub.release()
    assert done.returncode == 5
    assert 2 <= seconds_said(done.stderr.decode()) < LESS_THAN


def test_a_job_gives_up_while_it_lists(tmp_path: Path) -> None:
    with silent_server() as url:
        path = write_job(tmp_path / "job.yaml", job(url, tmp_path, "b/train/", GiveUpAfter=2))
        done = penstock("run", "-c", path)
    assert done.returncode == 5
    assert 2 <= seconds_said(done.stderr) < LESS_THAN


def test_doctor_names_a_listing_that_no_plan_can_have(tmp_path: Path) -> None:
    """An entry without ETag, and an object whose byte never comes."""
    bare = "<Contents><Key>train/0</Key><Size>1</Size></Contents>"
    with raw_server(lambda _: listing(inside=bare)) as bad:
        path = write_job(tmp_path / "job.yaml", job(bad.url, tmp_path, "b/train/"))
        done = penstock("doctor", "-c", path)
    assert done.returncode == 5
    assert "an entry without" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr

    def reply(request: Request) -> bytes:
        if not request.key:
            return listing(("train/0", 10, "e"))
        return answer(206, Content_Length="1", Content_Range="bytes 0-0/10", ETag='"e"')

    with raw_server(reply) as silent:
        document = job(silent.url, tmp_path, "b/train/", StallTimeout=1)
        done = penstock("doctor", "-c", write_job(tmp_path / "job.yaml", document))
    assert done.returncode == 5
    assert "Traceback" not in done.stdout + done.stderr


async def test_credentials_that_never_come_are_waited_for_as_long_as_a_request() -> None:
    class Silent:
        method = "custom-process"

        def refresh_needed(self) -> bool:
            return True

        async def get_frozen_credentials(self) -> None:
            await never.wait()

    never = asyncio.Event()
    lasting = RenewableCredentials(Silent(), never.wait, limit=0.05)
    with pytest.raises(Expired, match=r"did not respond in 0\.05 s"):
        await lasting.get_frozen_credentials()
