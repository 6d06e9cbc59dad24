"""A network of our own with a network card's fragments: a namespace behind a veth pair.

On loopback a segment is up to 64 KiB of whole pages. A card without segmentation offloads hands the
kernel one frame at a time, and every frame becomes a fragment of its own in a pipe. A veth pair with
those offloads off behaves so, at any MTU. The addresses are from 198.18.0.0/15, which RFC 2544 sets
aside for benchmarks. Needs root; everything is gone at the end.
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
"""What joins frames; checksums and scatter-gather are left on, as every card has them."""


class NetworkUnavailable(Exception):
    """We cannot have a network namespace here; the text says why."""


@dataclass(frozen=True, slots=True)
class Network:
    """The far end's address, and what to put before a command so that it runs there."""

    address: str
    prefix: tuple[str, ...]


@contextlib.contextmanager
def own_network(mtu: int) -> Iterator[Network]:
    """A namespace reachable from here at `mtu`. Raises NetworkUnavailable."""
    if os.geteuid() != 0:
        raise NetworkUnavailable("network namespaces need root")
    ip, ethtool = shutil.which("ip", path=_PATH), shutil.which("ethtool", path=_PATH)
    if not ip or not ethtool:
        raise NetworkUnavailable("ip or ethtool is missing (benchmarks/install brings them)")
    name = f"penstock-{os.getpid()}"
    near, far = f"pn{os.getpid()}a", f"pn{os.getpid()}b"
    there = (ip, "netns", "exec", name)
    with contextlib.ExitStack() as stack:
        _run(ip, "netns", "add", name)
        stack.callback(_run, ip, "netns", "delete", name)
        _run(ip, "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        # The pair would go with its namespace, but later; the next network may want the names at once.
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
