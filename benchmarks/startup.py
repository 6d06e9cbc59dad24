"""Measures starts: `python -m benchmarks.startup`, from exec to the first byte, and CPU seconds, by command.

Every program is a new process and gets one object from a server in memory on this machine. Credentials are
environment variables, and no AWS file exists. All programs take turns, so a busy machine slows all of them;
the printed figures are medians. `--beside DIR` measures another checkout of Penstock too.

`run` is measured until its log event `ready`. Peers are measured if they are on the PATH (`rclone`, `s5cmd`,
`aws`), or installed for this interpreter (`obstore`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from benchmarks.jobs import environment, write_job
from benchmarks.process import cpu_seconds
from benchmarks.stats import in_turns, spread
from streamer.units import KIB
from tests.kit.stub import StubThread

SIZE = 100 * KIB
BUCKET, KEY = "bucket", "data/object"
OBSTORE = """
import os, sys, obstore.store as s
url, (bucket, key) = os.environ["AWS_ENDPOINT_URL"], sys.argv[1:]
store = s.S3Store(bucket, endpoint=url, client_options={"allow_http": True}, region="us-east-1")
for piece in store.get(key).stream(min_chunk_size=1 << 20):
    sys.stdout.buffer.write(piece)
"""
"""A program that writes the object BUCKET KEY to its standard output."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to start."""

    name: str
    command: Sequence[str]
    cwd: str
    until: bytes = b""
    """Bytes in a line of standard error at which the start ends; empty: the first byte of standard output."""
    code: int = 0
    """The exit code of success."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides those of `environment`."""


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start."""

    first: float
    """From exec to the first byte, or to the line."""
    cpu: float
    """User and system time: of the whole process, or up to the line."""


def penstock(name: str, checkout: str, directory: str) -> Iterator[Program]:
    """Yield the commands of one checkout; `directory` has the job files."""
    python, uri = [sys.executable, "-m", "sidecar"], f"s3://{BUCKET}/{KEY}"
    cat = [*python, "cat", "--quiet", "--path-style", uri]
    job = ["-c", os.path.join(directory, f"{name}.json")]
    profile = {"AWS_CONFIG_FILE": os.path.join(directory, "profile")}
    yield Program(f"{name} cat --profile", [*cat, "--profile", "some"], checkout, variables=profile)
    for title, command in (
        ("cat", cat),
        ("--help", [*python, "--help"]),
        ("plan", [*python, "plan", *job]),
    ):
        yield Program(f"{name} {title}", command, checkout)
    yield Program(f"{name} probe", [*python, "probe", "--url", "http://127.0.0.1:9"], checkout, b"not", 1)
    yield Program(f"{name} run", [*python, "run", *job], checkout, b'"ready"')


def peers(url: str, directory: str) -> Iterator[Program]:
    """Yield the other programs that this machine has; each writes the object to its standard output."""
    uri = f"s3://{BUCKET}/{KEY}"
    remote = f":s3,env_auth,provider=Other,endpoint='{url}',force_path_style:{BUCKET}/{KEY}"
    for name, arguments in (
        ("rclone", ["cat", remote]),
        ("s5cmd", ["cat", uri]),
        ("aws", ["s3", "cp", uri, "-"]),
    ):
        if (path := shutil.which(name)) is not None:
            yield Program(name, [path, *arguments], directory)
    if find_spec("obstore") is not None:
        yield Program("obstore", [sys.executable, "-c", OBSTORE, BUCKET, KEY], directory)


def start(program: Program, variables: Mapping[str, str]) -> Start:
    """Start a program and wait for its end. Raises CalledProcessError if it fails."""
    pipe = subprocess.PIPE if program.until else subprocess.DEVNULL
    began = time.monotonic()
    process = subprocess.Popen(
        program.command,
        cwd=program.cwd,
        env={**variables, **program.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if program.until else subprocess.PIPE,
        stderr=pipe,
    )
    with process:
        cpu = 0.0
        if program.until and process.stderr is not None:
            for line in process.stderr:
                if program.until in line:
                    break
            first = time.monotonic() - began
            if program.code == 0:
                cpu = cpu_seconds(process.pid)
                process.send_signal(signal.SIGTERM)
            process.stderr.read()
        elif process.stdout is not None:
            found = process.stdout.read(1)
            first = time.monotonic() - began
            while found:
                found = process.stdout.read(1 << 16)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != program.code:
        raise subprocess.CalledProcessError(process.returncode, program.command)
    return Start(first, cpu or used.ru_utime + used.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="starts of each program, in turns (11)")
    parser.add_argument("--beside", metavar="DIR", help="another checkout of Penstock")
    options = parser.parse_args()
    thread = StubThread()
    stub = thread.start()
    stub.objects[f"{BUCKET}/{KEY}"] = bytes(SIZE)
    starts: dict[str, list[Start]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
            checkouts = {"penstock": os.getcwd()}
            if options.beside:
                checkouts["other"] = options.beside
            variables = environment(stub.url, directory)
            with open(os.path.join(directory, "profile"), "w", encoding="utf-8") as file:
                file.write("[profile some]\naws_access_key_id = AKID\naws_secret_access_key = not-a-secret\n")
            programs = list(peers(stub.url, directory))
            for name, checkout in checkouts.items():
                write_job(os.path.join(directory, name))
                programs += penstock(name, checkout, directory)
            for _, program in in_turns(options.rounds, programs):
                starts.setdefault(program.name, []).append(start(program, variables))
    finally:
        thread.stop()
    for name, measured in starts.items():
        first, cpu = spread([each.first for each in measured]), spread([each.cpu for each in measured])
        print(f"{name:22} {first.text():18} s to the first byte {cpu.text():18} CPU-s")


if __name__ == "__main__":
    main()
