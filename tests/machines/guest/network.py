"""Inside the guest: storage in a network namespace of its own, reached over a link that can be spoilt."""

from __future__ import annotations

import subprocess

STORAGE, TRAINER = "10.77.0.2", "10.77.0.1"
NAMESPACE = "storage"
_LINK, _PEER = "to-storage", "to-trainer"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def make_link() -> None:
    """The namespace and the link to it; storage has the address STORAGE there."""
    ip("netns", "add", NAMESPACE)
    ip("link", "add", _LINK, "type", "veth", "peer", "name", _PEER)
    ip("link", "set", _PEER, "netns", NAMESPACE)
    ip("addr", "add", f"{TRAINER}/24", "dev", _LINK)
    ip("link", "set", _LINK, "up")
    inside("ip", "addr", "add", f"{STORAGE}/24", "dev", _PEER)
    inside("ip", "link", "set", _PEER, "up")
    inside("ip", "link", "set", "lo", "up")


def inside(*command: str) -> None:
    """Run a command in storage's namespace."""
    ip("netns", "exec", NAMESPACE, *command)


def spoil(*netem: str) -> None:
    """Send packets both ways through netem(8) with these arguments; without any, as they come."""
    for prefix, device in (([], _LINK), (["ip", "netns", "exec", NAMESPACE], _PEER)):
        qdisc = [*prefix, "tc", "qdisc", "replace", "dev", device, "root"]
        subprocess.run([*qdisc, *(("netem", *netem) if netem else ("pfifo",))], check=True)


def set_link(*, up: bool) -> None:
    """Take the trainer's end of the link down, as a cable that is pulled, or up again."""
    ip("link", "set", _LINK, "up" if up else "down")
