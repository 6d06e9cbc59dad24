"""The keeper's socket and messages, for both of its ends.

Messages are JSON, one a packet (SOCK_SEQPACKET), descriptors beside them (SCM_RIGHTS):

    hello                           -> hello: version, pid, number of channels; then of each channel
                                       held: epoch, state, accepted, digest, skipped, mark
    open channel epoch digest skipped, with an O_PATH descriptor of the FIFO
                                    -> opened, once a reader has come, with the pipe's write end; or gone
    expect, as open                 -> expected, at once: the next sidecar needs the FIFO
    adopt channel epoch digest skipped moved mark, with the FIFO's write end
                                    -> adopted; a sidecar that ends hands over, after `moved` accepted bytes
    mark channel mark               stored for the next sidecar
    settle channel                  -> settled, once the FIFO has accepted everything; or gone
    close channel                   the epoch has ended; go to the next
    forget channel                  the channel has ended

`failed` channel do errno is the reply to an open, expect or adopt that lacked resources, or whose FIFO cannot
be opened. States: `idle` no reader has opened the FIFO, `open` a reader reads, `gone` it left before the end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from streamer.linux import descriptor_path

VERSION = 2
LONGEST_MESSAGE = 64 * 1024
LONGEST_MARK = 16
BACKLOG = 128
"""Connections that may wait; each start of a sidecar while the keeper is stopped leaves one."""
STATE_FIELDS = ("epoch", "state", "accepted", "digest", "skipped", "mark")
"""The fields of a channel's state, in every reply about a channel."""


def parse_position(message: dict[str, Any]) -> tuple[int, str, int]:
    """Return epoch, digest and skipped bytes of an open, expect or adopt. Raises KeyError, ValueError."""
    return int(message["epoch"]), str(message["digest"]), int(message["skipped"])


def parse_mark(mark: Iterable[Any]) -> list[int]:
    """Return a mark as numbers. Raises ValueError, TypeError, OverflowError."""
    return [int(number) for number in mark]


def peer(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """Return a path to a socket that is shorter than the limit of 108 bytes (unix(7)). Raises OSError."""
    directory, name = os.path.split(os.path.abspath(path))
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield os.path.join(descriptor_path(fd), name)
    finally:
        os.close(fd)


def listen(path: str) -> socket.socket:
    """Listen on a socket of mode 0600 at `path`; replace one that a dead keeper has left. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with address(path) as short_path:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                other.connect(short_path)
            raise FileExistsError("another keeper listens there")
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        mask = os.umask(0o177)
        try:
            listener.bind(short_path)
        finally:
            os.umask(mask)
    listener.listen(BACKLOG)
    return listener
