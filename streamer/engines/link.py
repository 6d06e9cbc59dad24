"""A stream socket between parent and engine, which carries messages and descriptors in order.

    length (4 bytes) · number of descriptors (1 byte) · the message by `marshal`

Sending never blocks: what the socket does not take waits in a queue, in order. The queue is bounded by the
spans in flight, since each message is about one of them.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import marshal
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

Message = tuple[Any, ...]
_HEADER = struct.Struct("!IB")
_READ_SIZE = 256 * 1024
_MOST_DESCRIPTORS = 64
"""Descriptors received at a time; the kernel allows 253 in one message (unix(7))."""


def frame(message: Message, descriptors: int = 0) -> bytes:
    """Return the bytes of a message, with which so many descriptors are sent."""
    body = marshal.dumps(message)
    return _HEADER.pack(len(body), descriptors) + body


class Link:
    """One end of the socket. `on_end` is called once, when the other process has ended or closed its end."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message, list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_message` gets a message and the descriptors sent with it, which it then owns."""
        sock.settimeout(0)
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        """Rests of messages, and duplicates of the descriptors to send with them."""
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._reset = False
        """Whether the system has said that the other end is gone, which it says once."""
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._receive)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message with duplicates of `descriptors`. Does nothing after the end.

        Raises OSError if no descriptor is left to keep them until they are sent.
        """
        if self._closed:
            return
        data = memoryview(frame(message, len(descriptors)))
        if not self._unsent:
            rest = self._write(data, descriptors)
            if not rest:
                return
            if len(rest) < len(data):
                descriptors = ()  # sent with the first byte
            data = rest
            self._loop.add_writer(self._sock.fileno(), self._send_rest)
        self._unsent.append((data, [os.dup(fd) for fd in descriptors]))

    def _write(self, data: memoryview, descriptors: tuple[int, ...] | list[int]) -> memoryview:
        """Return what the socket did not take."""
        ancillary = []
        if descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            return data[self._sock.sendmsg([data], ancillary) :]
        except BlockingIOError:
            return data
        except (BrokenPipeError, ConnectionResetError):
            return data[len(data) :]  # the other end is gone, which `_receive` reports
        except OSError:
            self._loop.call_soon(self._end)  # a message that is lost would be waited for
            return data[len(data) :]

    def _send_rest(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            rest = self._write(data, descriptors)
            if len(rest) == len(data):
                return
            while descriptors:
                os.close(descriptors.pop())
            if rest:
                self._unsent[0] = rest, []
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _receive(self) -> None:
        """Take everything that has come.

        If the other process is killed with messages unread, libuv reports that once, and never the end.
        """
        while not self._closed and self._receive_once():
            pass

    def _receive_once(self) -> bool:
        """Return whether there may be more."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                _READ_SIZE, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:
            if not self._reset:  # the other end left messages unread; its own come next, then the end
                self._reset = True
                return True
            data, ancillary = b"", []
        except OSError:
            data, ancillary = b"", []
        for level, kind, packed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(packed[: len(packed) - len(packed) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if not data:
            self._end()
            return False
        self._received += data
        self._deliver()
        return True

    def _end(self) -> None:
        if not self._closed:
            self.close()
            self._on_end()

    def _deliver(self) -> None:
        received, at = self._received, 0
        while not self._closed and len(received) - at >= _HEADER.size:
            size, count = _HEADER.unpack_from(received, at)
            end = at + _HEADER.size + size
            if len(received) < end:
                break
            with memoryview(received) as view:
                message = marshal.loads(view[at + _HEADER.size : end])  # noqa: S302 - our own process
            at = end
            descriptors = [self._descriptors.popleft() for _ in range(min(count, len(self._descriptors)))]
            self._on_message(message, descriptors)
        del received[:at]

    def close(self) -> None:
        """Close the socket and the descriptors not yet sent or taken; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        fd = self._sock.fileno()
        self._loop.remove_reader(fd)
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_writer(fd)
        for _, descriptors in self._unsent:
            for each in descriptors:
                os.close(each)
        self._unsent.clear()
        for each in self._descriptors:
            os.close(each)
        self._descriptors.clear()
        self._sock.close()
