"""What the runs of one worker share: the S3 stub, with and without TLS, and the warmed process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import trustme

from tests.kit.processes import write_job
from tests.kit.stub import StubThread
from tests.kit.tls import serving
from tests.machines.crash.shapes import SHAPES, Servers, fill
from tests.machines.crash.trial import Lab
from tests.machines.crash.zygote import Zygote, scratch, warm_up

_WARMING = ("splice", "kept-tls", "kept-tls-aiobotocore", "kept-gzip-wrapped")
"""Shapes that together import everything."""


@contextlib.contextmanager
def serve() -> Iterator[Servers]:
    """The stub in a process of its own."""
    directory = tempfile.mkdtemp(prefix="penstock-crash-", dir=scratch())
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_run_stub, args=(theirs, directory, ours))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()
        shutil.rmtree(directory, ignore_errors=True)


def _run_stub(reported: Connection, directory: str, other: Connection) -> None:
    other.close()
    authority = trustme.CA()
    ca = os.path.join(directory, "ca.pem")
    authority.cert_pem.write_to_path(ca)
    plain = StubThread()
    try:
        fill(plain.start())
        with serving(authority) as secure:
            fill(secure)
            reported.send(Servers(plain.stub.url, secure.url, ca))
            with contextlib.suppress(EOFError):
                reported.recv()
    finally:
        plain.stop()


def warm(servers: Servers) -> None:
    """Make this process one that labs can be forked from."""
    with tempfile.TemporaryDirectory(prefix="penstock-crash-", dir=scratch()) as directory:
        commands = []
        for name in _WARMING:
            document = SHAPES[name].document(servers, Path(directory) / "ml")
            commands.append(["plan", "-c", write_job(Path(directory) / f"{name}.json", document)])
        warm_up(commands)


@contextlib.contextmanager
def laboratory(servers: Servers) -> Iterator[Lab]:
    """A worker's own. Its process must be warm, and have no thread yet."""
    zygote = Zygote()
    try:
        yield Lab(zygote, servers)
    finally:
        zygote.close()
