"""The writer's side of a channel, for reader tests: real FIFOs, fed by threads as a sidecar feeds them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamer.key_list import KeyListLine, encoded, first_line, key_list_path
from streamer.trailer import Trailer, TrailerState, fifo_path, trailer_path, write_trailer


@dataclass
class Feed:
    """One epoch that a thread is writing."""

    thread: threading.Thread | None = None
    opened: threading.Event = field(default_factory=threading.Event)
    """Set when a reader and the writer have met."""
    written: threading.Event = field(default_factory=threading.Event)
    """Set when the last byte is written and the state published."""
    release: threading.Event = field(default_factory=threading.Event)
    """Set it to let the writer close, if it was told to hold the FIFO open."""
    reader_gone: bool = False
    error: BaseException | None = None

    def join(self) -> None:
        assert self.thread is not None
        self.thread.join()
        assert not self.thread.is_alive(), "the writer is still at it"


class Feeder:
    """A base directory with config files and FIFOs, as a sidecar lays them out."""

    def __init__(self, base: Path, channels: Sequence[str] = ("train",), **modes: str) -> None:
        self.base = str(base)
        self.pipe_dir = os.path.join(self.base, "input", "data")
        self.config_dir = os.path.join(self.base, "input", "config")
        self.state_dir = os.path.join(self.base, "pipe_state")
        os.makedirs(self.pipe_dir)
        os.makedirs(self.config_dir)
        self.configure(dict.fromkeys(channels, "Pipe") | modes)
        self.feeds: list[Any] = []

    def configure(self, modes: dict[Any, str] | dict[str, str], **more: str) -> None:
        """`more`: further keys of every channel, and other values of these."""
        document = {
            name: {"TrainingInputMode": mode, "RecordWrapperType": "None"} | more
            for name, mode in modes.items()
        }
        with open(os.path.join(self.config_dir, "inputdataconfig.json"), "w") as file:
            json.dump(document, file)

    @property
    def directories(self) -> dict[str, Any]:
        return {"pipe_dir": self.pipe_dir, "config_dir": self.config_dir, "state_dir": self.state_dir}

    def path(self, channel: str, epoch: int) -> str:
        return fifo_path(self.pipe_dir, channel, epoch)

    def next_epoch(self, channel: str = "train") -> int:
        """The index in the state file."""
        with open(os.path.join(self.state_dir, f".{channel}-pipe_mode-state")) as file:
            return int(file.read())

    def publish(
        self,
        epoch: int,
        state: TrailerState,
        *,
        channel: str = "train",
        total: int | None = 0,
        delivered: int = 0,
        error: str | None = None,
        **more: Any,
    ) -> None:
        write_trailer(
            self.pipe_dir,
            Trailer(
                channel=channel,
                epoch=epoch,
                state=state,
                bytes_total=total,
                bytes_delivered=delivered,
                error=error,
                **more,
            ),
        )

    def list_keys(
        self, objects: Sequence[tuple[int, str]], *, epoch: int = 0, channel: str = "train"
    ) -> None:
        """Write the key list of an epoch whose objects have these numbers of bytes, and these keys."""
        path, offset = key_list_path(self.pipe_dir, channel, epoch), 0
        with open(path, "wb") as file:
            file.write(first_line(""))
            for size, key in objects:
                file.write(encoded(KeyListLine(offset, 0, key, "b")))
                offset += size

    def withdraw(self, epoch: int, channel: str = "train") -> None:
        """Remove a trailer."""
        os.unlink(trailer_path(self.pipe_dir, channel, epoch))

    def feed(  # noqa: PLR0913 - a test names only what it is about
        self,
        epoch: int,
        data: bytes,
        *,
        channel: str = "train",
        state: TrailerState = "complete",
        total: int | None = None,
        delivered: int | None = None,
        error: str | None = None,
        proof: bool = True,
        hold: bool = False,
        unknown: bool = False,
        **more: Any,
    ) -> Feed:
        """Offer an epoch: trailer, FIFO, and a thread that waits for the reader and writes `data`.

        `state` "open" publishes no last trailer: that is a sidecar that died. `hold` keeps the write end
        open after that until `release` is set. `unknown`: the length is told at the end only.
        `more`: further fields of the trailers.
        """
        opening = None if unknown else len(data) if total is None else total
        total = len(data) if total is None else total
        if proof:
            self.publish(epoch, "open", channel=channel, total=opening, **more)
        path = self.path(channel, epoch)
        for earlier, last in self.feeds:
            if earlier == path:
                last.join()  # it removes the FIFO of this name when its reader has gone
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        feed = Feed()

        def write() -> None:
            try:
                fd = os.open(path, os.O_WRONLY)
                try:
                    feed.opened.set()
                    left = memoryview(data)
                    while left:
                        left = left[os.write(fd, left) :]
                    if proof and state != "open":
                        self.publish(
                            epoch,
                            state,
                            channel=channel,
                            total=total,
                            delivered=len(data) if delivered is None else delivered,
                            error=error,
                            **more,
                        )
                    os.unlink(path)  # gone before the end of file can be seen (contract §1.4)
                    feed.written.set()
                    if hold:
                        feed.release.wait()
                except BrokenPipeError:
                    feed.reader_gone = True
                    os.unlink(path)
                finally:
                    os.close(fd)
            except BaseException as problem:  # noqa: BLE001 - handed to the test
                feed.error = problem
                feed.opened.set()

        feed.thread = threading.Thread(target=write, name=f"feed {channel}_{epoch}", daemon=True)
        self.feeds.append((path, feed))
        feed.thread.start()
        return feed

    def close(self) -> None:
        """Release every writer and report what went wrong in one."""
        for path, feed in self.feeds:
            feed.release.set()
            if not feed.opened.is_set():
                with contextlib.suppress(FileNotFoundError):
                    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    feed.opened.wait()  # the thread may not have opened it yet
                    os.close(reader)
            feed.join()
        for _, feed in self.feeds:
            if feed.error is not None:
                raise feed.error
