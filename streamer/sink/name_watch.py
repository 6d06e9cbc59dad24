"""Reports names of the FIFO directory that may have been removed or replaced.

    inotify(7) ─ one watch of the directory ─▶ NameWatch ─ an Event for each waiting name ─▶ FifoDirectory

A reader that opens a FIFO by its name waits for ever if the sidecar waits in another one, which had that name
before. An event is only a hint: who waits for it compares the name with the FIFO. One instance and one watch
serve all channels, since the kernel grants a user few of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from streamer.linux import changed_names, open_inotify, watch_for_losses

if TYPE_CHECKING:
    from collections.abc import Iterator


class NameWatch:
    """Watches the names of one directory, for the running event loop, until `close`."""

    def __init__(self, directory: str) -> None:
        """Raises OSError where the kernel, a sandbox or a limit forbids inotify."""
        self._directory = directory
        self._waiting: dict[bytes, asyncio.Event] = {}
        self._fd = open_inotify()
        try:
            watch_for_losses(self._fd, directory)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._on_events)
        except BaseException:
            os.close(self._fd)
            raise

    def __repr__(self) -> str:
        return f"<NameWatch {self._directory}, {len(self._waiting)} names>"

    def renew(self) -> None:
        """Watch the directory that has the path now, which may be another one than before."""
        with contextlib.suppress(OSError):  # it does not exist, which its user notices
            watch_for_losses(self._fd, self._directory)

    @contextlib.contextmanager
    def changes(self, name: str) -> Iterator[asyncio.Event]:
        """Return an event that is set whenever `name` may have been removed or replaced. One user a name."""
        changed = self._waiting[os.fsencode(name)] = asyncio.Event()
        try:
            yield changed
        finally:
            del self._waiting[os.fsencode(name)]

    def _on_events(self) -> None:
        names = changed_names(self._fd)
        for name in self._waiting if b"" in names else names & self._waiting.keys():
            self._waiting[name].set()

    def close(self) -> None:
        """End the watch."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
