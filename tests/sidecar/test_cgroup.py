"""The sidecar under a memory limit that the kernel holds: never killed, and no reader waits long."""

from __future__ import annotations

import gzip
import hashlib
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from benchmarks import cgroup
from benchmarks.memory import CHANNELS, HEADINGS, REQUESTS, Outcome, Source, cells, job, run
from benchmarks.process import ProcessFailed
from sidecar.process.footprint import Footprint
from streamer.units import MIB
from tests.kit.harness import fill
from tests.kit.stub import S3Stub, StubThread

LIMIT = 256 * MIB


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure(authority: trustme.CA, credentials: None) -> Iterator[S3Stub]:
    """A stub over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    thread = StubThread(context)
    yield thread.start()
    thread.stop()


def sources(stub: S3Stub, *, zipped: bool) -> list[Source]:
    """Twenty channels of one data set, the first of compressed objects."""
    plain = fill(stub, [1_500_000] * 4, prefix="plain/")
    stub.objects |= {f"zipped/{n}.gz": gzip.compress(bytes([n]) * 8_000_000, 1) for n in range(4)}
    text = b"".join(bytes([n]) * 8_000_000 for n in range(4))
    found = [Source("plain", hashlib.sha256(plain).hexdigest(), len(plain))] * CHANNELS
    if zipped:
        found[0] = Source("zipped", hashlib.sha256(text).hexdigest(), len(text), compressed=True)
    return found


def outcome(
    stub: S3Stub, tmp_path: Path, *, wish: str, zipped: bool, limit: int = LIMIT, **endpoint: str
) -> Outcome:
    found = sources(stub, zipped=zipped)
    document = job(found, {"Url": stub.url} | endpoint, str(tmp_path / "ml"), Transport=wish)
    try:
        return run(document, found, limit, str(tmp_path), rate=10e6)
    except cgroup.NoCgroup as error:
        pytest.skip(f"no cgroup with a limit of memory: {error}")


def test_a_row_says_what_was_charged() -> None:
    found = Outcome(100 * MIB, None, 90 * MIB, 0.25)
    assert cells("tls", 256, found) == ("tls", "256", "100", "in the sum", "90", "0.2", "all right")
    killed = Outcome(128 * MIB, 30 * MIB, 0, 1.2, "killed by the kernel")
    assert cells("tls", 128, killed) == ("tls", "128", "128", "30", "0", "1.2", "killed by the kernel")
    assert len(cells("tls", 256, found)) == len(HEADINGS)


def check(found: Outcome) -> None:
    assert not found.problem
    assert found.charged + (found.sockets or 0) < LIMIT
    assert found.longest_wait < 20


def test_splice_transport(stub: S3Stub, tmp_path: Path) -> None:
    check(outcome(stub, tmp_path, wish="splice", zipped=False))


def test_over_tls_with_a_compressed_channel(secure: S3Stub, authority: trustme.CA, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    check(outcome(secure, tmp_path, wish="buffered", zipped=True, CaBundle=str(tmp_path / "ca.pem")))


def test_twenty_channels_over_tls_run_in_the_least_that_is_accepted(
    secure: S3Stub, authority: trustme.CA, tmp_path: Path
) -> None:
    """160 MiB hold too; 1 MiB less than the least is refused before any FIFO exists."""
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    bundle = str(tmp_path / "ca.pem")
    least = Footprint(transport="buffered", fifos=CHANNELS, requests=REQUESTS).needed(2 * CHANNELS * MIB)
    assert least <= 160 * MIB
    with pytest.raises(ProcessFailed, match=f"memory limit of {least // MIB - 1} MiB is too low") as refused:
        outcome(secure, tmp_path, wish="buffered", zipped=True, limit=least - MIB, CaBundle=bundle)
    assert f"raise the memory limit of the container to {least // MIB} MiB" in str(refused.value)
    assert not list(tmp_path.glob("ml/input/data/*"))
    found = outcome(secure, tmp_path, wish="buffered", zipped=True, limit=least, CaBundle=bundle)
    assert not found.problem


def test_a_process_that_takes_more_is_killed_and_seen_to_be() -> None:
    """So that the others mean something."""
    greedy = "import os, sys; os.write(1, b'.'); keep = bytearray(b'1') * (64 << 20)"
    try:
        with cgroup.limited(32 * MIB) as limited:
            inside = ["sh", "-c", f'echo $$ > {limited.path}/cgroup.procs && exec "$0" "$@"']
            done = subprocess.run([*inside, sys.executable, "-c", greedy], capture_output=True, check=False)
            assert done.returncode == -signal.SIGKILL, done.stderr
            assert limited.killed == 1
            assert limited.peak <= 32 * MIB
    except cgroup.NoCgroup as error:
        pytest.skip(f"no cgroup with a limit of memory: {error}")
