"""Clients that hold connections of an admin port and make nothing of them, each in one of four ways.

    silent   sends nothing                       idle     sends one request, and keeps the connection
    slow     sends a request byte by byte        unread   sends requests, and reads no response

Whoever is closed comes again at once. `python -m tests.kit.dawdlers HOST:PORT --clients 1000` runs until its
standard input ends. It prints a line when all clients have connected, and one with counts at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KINDS = ("silent", "idle", "slow", "unread")
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 4096 + b"\r\n\r\n"
LARGE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20
STEP = 0.2
"""Seconds between two bytes of a slow client."""


@dataclass(eq=False)
class Client:
    """One connection."""

    sock: socket.socket
    kind: str
    sent: int = 0


class Dawdlers:
    """The connections of one attack."""

    def __init__(self, address: tuple[str, int], clients: int) -> None:
        self._address = address
        self._selector = selectors.DefaultSelector()
        self._clients: set[Client] = set()
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._end)
        self._ended = False
        self.connected = self.closed = 0
        for index in range(clients):
            self._connect(KINDS[index % len(KINDS)])

    def run(self) -> None:
        """Hold the connections until standard input ends."""
        reported, step = False, time.monotonic()
        while not self._ended:
            for key, _ in self._selector.select(STEP):
                key.data()
            if not reported and self.connected >= len(self._clients):
                reported = True
                print("connected", flush=True)
            if time.monotonic() > step:
                step = time.monotonic() + STEP
                for each in [each for each in self._clients if each.kind == "slow"]:
                    self._send(each, REQUEST[each.sent : each.sent + 1])
        print(f"{self.connected} connections, {self.closed} closed by the server", flush=True)

    def _end(self) -> None:
        self._ended = not os.read(0, 1)

    def _connect(self, kind: str) -> None:
        client = Client(socket.socket(), kind)
        client.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.sock.connect(self._address)
        self._clients.add(client)
        self._selector.register(client.sock, selectors.EVENT_WRITE, self._calls(self._opened, client))

    @staticmethod
    def _calls(method: Callable[[Client], None], client: Client) -> Callable[[], None]:
        return lambda: method(client)

    def _opened(self, client: Client) -> None:
        self.connected += 1
        # A client that does not read is told of its end by an error of its next request alone.
        events = selectors.EVENT_WRITE if client.kind == "unread" else selectors.EVENT_READ
        self._selector.modify(client.sock, events, self._calls(self._look, client))
        if client.kind == "idle":
            self._send(client, REQUEST)

    def _look(self, client: Client) -> None:
        if client.kind == "unread":
            self._send(client, LARGE)
            return
        with self._closing(client):
            if not client.sock.recv(65536):
                raise ConnectionResetError

    def _send(self, client: Client, data: bytes) -> None:
        with self._closing(client):
            client.sent += client.sock.send(data)

    @contextlib.contextmanager
    def _closing(self, client: Client) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            pass
        except OSError:
            if client not in self._clients:
                return
            self._selector.unregister(client.sock)
            client.sock.close()
            self._clients.remove(client)
            self.closed += 1
            self._connect(client.kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--clients", type=int, default=1000)
    arguments = parser.parse_args()
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(hard, arguments.clients + 100)), hard))
    host, _, port = arguments.address.rpartition(":")
    Dawdlers((host, int(port)), arguments.clients).run()


if __name__ == "__main__":
    main()
