"""Bodies in memory, for what takes from a body: of bytes that arrive when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from streamer.s3.client.doubt import NothingArrived


class Arriving:
    """A `Body` of which nothing has arrived at first."""

    spliceable = False

    def __init__(self, data: bytes) -> None:
        self.left = len(data)
        self.arrived = 0
        self._data = data
        self._call: Callable[[], None] | None = None
        self._parked = False

    def arrive(self, count: int) -> None:
        """`count` more bytes are here, and the socket is not full."""
        self.arrived += count
        if not self._parked:
            self.fill()

    def fill(self) -> None:
        """The socket can hold no more."""
        if self._call is not None:
            call, self._call = self._call, None
            call()

    def probe(self) -> None:
        if len(self._data) - self.left == self.arrived:
            raise NothingArrived

    def doubted(self) -> tuple[int, bytes]:
        return len(self._data) - self.left, b""

    def read_into(self, memory: memoryview) -> int:
        self.probe()
        at = len(self._data) - self.left
        data = self._data[at : min(self.arrived, at + len(memory))]
        memory[: len(data)] = data
        self.left -= len(data)
        return len(data)

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        raise NotImplementedError

    def notify(self, call: Callable[[], None]) -> None:
        self._call, self._parked = call, False

    def park(self, call: Callable[[], None]) -> None:
        self._call, self._parked = call, True

    def hush(self) -> None:
        self._call = None

    async def taken(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.hush()


class Arrived(Arriving):
    """A `Body` of which every byte is here."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.arrive(len(data))
