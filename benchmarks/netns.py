"""Makes a network that delivers frames as a network card does: a network namespace with a veth pair.

On loopback a segment is up to 64 KiB of whole pages. A card without segmentation offloads delivers one frame
at a time to the kernel, and every frame becomes a separate fragment in a pipe. A veth pair without those
offloads does the same, at any MTU. The addresses are from 198.18.0.0/15, which RFC 2544 reserves for
benchmarks. Needs root; everything is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
OFFLOADS = ("tso", "gso", "gro")
"""Offloads that join frames. Checksums and scatter-gather stay on, because every card has them."""


class NetworkUnavailable(Exception):
    """No network namespace can be made on this machine; the text names the reason."""


@dataclass(frozen=True, slots=True)
class Network:
    """Address of the namespace, and the prefix of a command that runs in it."""

    address: str
    prefix: tuple[str, ...]


@contextlib.contextmanager
def own_network(mtu: int) -> Iterator[Network]:
    """Make a namespace that this process reaches at `mtu`, for the block. Raises NetworkUnavailable."""
    if os.geteuid() != 0:
        raise NetworkUnavailable("network namespaces need root")
    ip, ethtool = shutil.which("ip", path=_PATH), shutil.which("ethtool", path=_PATH)
    if not ip or not ethtool:
        raise NetworkUnavailable("ip or ethtool is missing (scripts/install-system-tools brings them)")
    name = f"penstock-{os.getpid()}"
    near, far = f"pn{os.getpid()}a", f"pn{os.getpid()}b"
    there = (ip, "netns", "exec", name)
    with contextlib.ExitStack() as stack:
        _run(ip, "netns", "add", name)
        stack.callback(_run, ip, "netns", "delete", name)
        _run(ip, "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        # The kernel removes the pair with its namespace, but later, and the next network needs its names.
        stack.callback(_run, ip, "link", "delete", near)
        off = [word for offload in OFFLOADS for word in (offload, "off")]
        for prefix, device, address in (((), near, "198.18.255.1/30"), (there, far, "198.18.255.2/30")):
            _run(*prefix, ip, "link", "set", device, "mtu", str(mtu))
            _run(*prefix, ip, "address", "add", address, "dev", device)
            _run(*prefix, ip, "link", "set", device, "up")
            _run(*prefix, ethtool, "-K", device, *off)
        _run(*there, ip, "link", "set", "lo", "up")
        yield Network("198.18.255.2", there)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words: Sequence[str] = [os.path.basename(command[0]), *command[1:]]
        raise NetworkUnavailable(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
