"""Checks the bytes of one 4 GB stream over every transport, event loop, network and privilege.

Measures nothing. Each combination runs `penstock cat`'s engine in a new process into a pipe. The stream's
SHA-256 must be that of the objects, computed from the files as written, not as served.

    python -m benchmarks.proof [--scale 0.1]

Root also checks: as uid 65534, whose pipes may have 64 MiB in all; as uid 65534 with these 64 MiB used up, so
that every F_SETPIPE_SZ fails; and over veth with MTU 1500 and 9000.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.dataset import MIB, DataSet, Shape
from benchmarks.jobs import environment
from benchmarks.netns import own_network
from benchmarks.origin import Origin, missing, running_origin

SHAPE = Shape("proof", 1, 16, 256 * MIB)
NOBODY = 65534
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}


@dataclass(frozen=True, slots=True)
class Case:
    server: str
    transport: str
    loop: str
    user: str = "as we are"


def cases() -> Iterator[Case]:
    """Yield all cases; those of other users only if this process may become another user."""
    for loop in ("asyncio", "uvloop"):
        for server in ("fast", "paced"):
            for transport in ("splice", "buffered", "aiobotocore"):
                yield Case(server, transport, loop)
        for transport in ("buffered", "aiobotocore"):
            yield Case("tls", transport, loop)
        for user in ("nobody", "nobody, no pipes") if anybody_can_run() else ():
            yield Case("fast", "splice", loop, user)
            yield Case("paced", "splice", loop, user)


def anybody_can_run() -> bool:
    """Return whether this process may become another user who can execute this Python."""
    if os.geteuid() != 0:
        return False
    try:
        return subprocess.run([sys.executable, "-c", ""], check=False, **AS_NOBODY).returncode == 0
    except PermissionError:
        print("left out: another user cannot run this Python", flush=True)
        return False


def run(case: Case, origin: Origin) -> str:
    """Run one case; return the stream's SHA-256 in hex. Raises CalledProcessError."""
    url = origin.urls[case.server]
    command = [sys.executable, "-m", "benchmarks.proof", "--child", case.transport, case.loop]
    command += [url, SHAPE.bucket(0)]
    if case.user.endswith("no pipes"):
        command.append("--no-pipes")
    variables = environment(url, "/nonexistent") | {"AWS_CA_BUNDLE": origin.ca_bundle, "HOME": "/nonexistent"}
    user = AS_NOBODY if case.user.startswith("nobody") else {}
    digest = hashlib.sha256()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables, **user) as child:
        if child.stdout is None:
            raise RuntimeError("no pipe")
        while data := os.read(child.stdout.fileno(), MIB):
            digest.update(data)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return digest.hexdigest()


def use_up_pipes() -> list[int]:
    """Make pipes of 1 MiB until this user may have no more; return their descriptors, which stay open."""
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while len(taken) < 1000:
            taken += os.pipe()
            fcntl.fcntl(taken[-1], fcntl.F_SETPIPE_SZ, MIB)
    return taken


def stream(transport: str, loop: str, url: str, bucket: str) -> None:
    """Stream all objects of the bucket to standard output; called in a new process."""
    from sidecar.commands import cat as command
    from streamer.plan import S3Uri
    from streamer.relay.transport import TransportSpec
    from streamer.retry import RetryPolicy
    from streamer.s3.client.endpoint import Endpoint

    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        figures = runner.run(
            command.cat(
                [S3Uri(bucket, "")],
                endpoint=Endpoint(url=url, path_style=True),
                spec=TransportSpec(
                    buckets={bucket},
                    channels=[],
                    budget=256 * MIB,
                    wish=transport,  # type: ignore[arg-type]
                    retry=RetryPolicy(give_up_after=60),
                ),
            )
        )
    print("   ", figures, file=sys.stderr)
    raise SystemExit(figures is None)


def prove(data: DataSet, origin: Origin, found: Iterator[Case], *, network_name: str) -> int:
    """Run all cases; return the number of wrong streams."""
    wrong = 0
    for case in found:
        right = run(case, origin) == data.expected_sha256(0, data.shape.stream_bytes)
        wrong += not right
        reported = f"{network_name}, {case.server}, {case.transport}, {case.loop}, {case.user}"
        print("right" if right else "WRONG", reported, flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--no-pipes", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        kept = use_up_pipes() if chosen.no_pipes else []
        print(f"    {len(kept) // 2} pipes used up" if kept else "", end="", file=sys.stderr)
        stream(*chosen.child)
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        os.chmod(directory, 0o755)  # noqa: S103 - the CA's certificate is read by other users
        data = DataSet(SHAPE.scaled(chosen.scale), os.path.join(directory, "data"))
        data.create()
        with running_origin(data, os.path.join(directory, "nginx")) as origin:
            wrong = prove(data, origin, cases(), network_name="loopback")
        if os.geteuid() == 0:
            for mtu in (1500, 9000):
                with (
                    own_network(mtu) as net,
                    running_origin(
                        data, os.path.join(directory, f"nginx{mtu}"), address=net.address, prefix=net.prefix
                    ) as origin,
                ):
                    kernel = (Case("paced", "splice", loop) for loop in ("asyncio", "uvloop"))
                    wrong += prove(data, origin, kernel, network_name=f"MTU {mtu}")
    raise SystemExit(f"{wrong} streams were wrong" if wrong else 0)


if __name__ == "__main__":
    main()
