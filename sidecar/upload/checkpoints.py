"""Uploads checkpoints while the trainer writes them: each file whole, in the order in which they were closed.

    Watch ─ files ─▶ Order ─▶ `FILES_AT_ONCE` tasks ─▶ Store: parts at once, the object in turn ─▶ Journal

A file is read before its turn, and becomes visible when every file that was closed before it is in S3. If one
fails, all after it wait. It is tried again for ever while the trainer runs, and once after its end. What
fails then is left out, and the rest goes on, unless storage is away for `give_up_after`, which ends all.

A file that cannot be read, or whose key is another program's, is named and holds nothing up. One that was
removed or renamed is dropped. One that changes under its upload is found again when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from sidecar.process.logs import log
from sidecar.upload.markers import Marker
from sidecar.upload.order import Order, Step
from sidecar.upload.tree import LeftOut, TreeFile, find_file, mark_of, open_file, walk
from sidecar.upload.uploads import MOST_READS, FileChanged, Unreadable
from sidecar.upload.watch import CLOSED_REST, FOUND_REST, SCAN_EVERY, Watch, is_written
from streamer.aio import TaskGroup, in_thread
from streamer.errors import GaveUp, PenstockError, SourceError
from streamer.linux import read_events
from streamer.retry import Attempts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sidecar.upload.order import Entry
    from sidecar.upload.store import Store
    from sidecar.upload.watch import ClosedFile
    from streamer.directory import Directory

FILES_AT_ONCE = 8
"""Files that are uploaded, or wait for their turn with up to a part in memory."""
CLOCK_TICK = 0.02
"""Seconds after which a further change gives a file another time, so that its mark stands for its bytes."""
LONGEST_WAIT = 30.0
"""Most seconds between two attempts at an upload while the trainer runs."""


class _Dropped(PenstockError):
    """The file has been removed, or its entry has no place any more."""


class _Changing(_Dropped):
    """The file is being written again."""


class Checkpoints:
    """The upload of one directory, until `finish` or until `run` is cancelled."""

    def __init__(
        self, root: Directory, store: Store, hosts: tuple[int, Sequence[str]], *, marked: bool = False
    ) -> None:
        """`hosts`: the index of this host, and the names of all. `marked`: write markers of one host, too."""
        self.uploaded_files = 0
        modified = [stored.mark[2] / 1e9 for stored in store.journal.files.values()]
        self.newest: float | None = max(modified, default=None)
        """Time of the last change in S3 at the end of the last round; None before one has ended."""
        self.last_seconds = 0.0
        """Seconds from the first closed file to an empty queue, when that was last reached."""
        self._queued_at = 0.0
        self._round: deque[Entry] = deque()
        """What is left of the files that waited when the round began. A round ends, though the queue may have
        no end: because of a file that is always written again."""
        self._root = root
        self._store = store
        self._journal = store.journal
        self._prefix = store.uri.key
        self._hosts = hosts
        same = self._journal.same
        self._watch = Watch(root, self._prefix, lambda name, status: same(name, status) is None)
        self._order = Order(marked=marked or len(hosts[1]) > 1)
        self._order.resume(self._journal.files, self._journal.steps)
        self._events: list[tuple[int, int, bytes]] = []
        self._woken = asyncio.Event()
        self._turn = asyncio.Event()
        """Set, and replaced, when another entry may be the first."""
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()
        self._running = 0
        self._latest = self.newest
        """Time of the last change of the file that has become visible last."""
        self._failing = False
        self._unavailable = ""
        """Error of storage that was away for too long after the trainer's end."""

    @property
    def waiting_files(self) -> int:
        """Number of the files that are closed and not in S3."""
        return self._order.waiting_files

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the files that are closed and not in S3."""
        return self._order.waiting_bytes

    async def finish(self) -> list[LeftOut]:
        """Upload the rest after the trainer's end, while `run` runs; return what cannot be uploaded."""
        self._ending.set()
        self._woken.set()
        await self._ended.wait()
        return [LeftOut(*each) for each in self._watch.left_out.items()]

    async def run(self) -> None:
        """Watch and upload, until all is done after `finish`. Raises ConfigError without awscrt."""
        loop = asyncio.get_running_loop()
        self._watch.open()
        fd = self._watch.fd
        try:
            if fd >= 0:
                loop.add_reader(fd, self._read_events)
            found = await in_thread(self._watch.scan)
            async with TaskGroup() as self._tasks:
                await self._follow(found)
        finally:
            if fd >= 0:
                loop.remove_reader(fd)
            self._watch.close()
            self._ended.set()

    def _read_events(self) -> None:
        self._events += read_events(self._watch.fd)
        self._woken.set()

    async def _follow(self, found: list[ClosedFile]) -> None:
        """Take the files of events and scans, until the last scan after the trainer's end."""
        loop, watch = asyncio.get_running_loop(), self._watch
        scan_at = loop.time() + SCAN_EVERY
        while not self._ending.is_set():
            self._take(found)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(scan_at):
                    await self._woken.wait()
            found = await self._changed()
            if (begun := loop.time()) >= scan_at:
                self._order.remove_changing()
                found += await in_thread(partial(watch.scan, rested=SCAN_EVERY))
                scan_at = loop.time() + max(SCAN_EVERY, 100 * (loop.time() - begun))
        found += await self._changed()  # its events have the order of the last closes
        watch.left_out.clear()
        self._order.remove_changing()
        found += await in_thread(partial(watch.scan, ended=True))
        self._take(found)
        self._order.end()
        self._start()

    async def _changed(self) -> list[ClosedFile]:
        """Return the files of the events since the last call."""
        if self._watch.fd >= 0:
            self._read_events()
        self._woken.clear()
        events, self._events = self._events, []
        return await in_thread(self._watch.follow, events)

    def _take(self, found: list[ClosedFile]) -> None:
        if found and not len(self._order):
            self._queued_at = time.monotonic()
        self._order.take(found)
        self._round = self._round or deque(self._order.entries)
        for step, state in self._order.steps.items():
            self._journal.note_step(step, state is not Step.MARKED)
        self._wake()
        self._start()

    def _wake(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    def _start(self) -> None:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return  # the group takes no more tasks
        while self._running < FILES_AT_ONCE and (entry := self._order.next()) is not None:
            self._running += 1
            self._tasks.create_task(self._upload(entry))

    async def _upload(self, entry: Entry) -> None:
        put = self._put_marker if entry.mark is None else self._put_file
        try:
            await self._repeat(partial(put, entry))
        except _Changing:
            entry.changing = entry.event  # its close is the next event
        except _Dropped:
            pass
        except Unreadable as error:
            self._watch.leave_out(LeftOut(entry.name, str(error)))
        finally:
            self._running -= 1
            if not entry.changing:
                self._order.remove(entry)
            self._wake()
        while self._round and not self._order.has(self._round[0]):
            self._round.popleft()
        if not self._round:
            self.newest, self._round = self._latest, deque(self._order.entries)
        if not len(self._order):
            self.last_seconds = time.monotonic() - self._queued_at
        self._start()

    async def _repeat(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeat an attempt while storage fails. Raises _Dropped, Unreadable, but no SourceError."""
        policy = replace(
            self._store.policy, give_up_after=inf, longest_wait=LONGEST_WAIT, wrong_answers=sys.maxsize
        )
        attempts, changed = Attempts(policy, (SourceError,), what="an upload"), 0
        while True:
            last = self._ending.is_set()
            if self._unavailable:
                raise Unreadable(self._unavailable)
            try:
                return await attempt()
            except FileChanged as error:
                changed += 1
                if not self._ending.is_set():  # else no event and no scan finds it again
                    raise _Changing from error
                if changed == MOST_READS:
                    raise Unreadable(f"it changed {MOST_READS} times while it was read") from error
            except (FileNotFoundError, NotADirectoryError) as error:
                raise _Dropped from error
            except OSError as error:
                raise Unreadable(f"it cannot be read ({error.strerror})") from error
            except SourceError as error:
                self._note_failure(error)
                if last:
                    if isinstance(error, GaveUp):
                        self._unavailable = str(error)
                        self._wake()
                    raise Unreadable(str(error)) from error
                await self._pause(attempts.wait_after(error))

    def _note_failure(self, error: SourceError) -> None:
        self._store.failed[error.kind] += 1
        if not self._failing:
            self._failing = True
            log.warning("checkpoints cannot be uploaded", error=str(error), waiting_bytes=self.waiting_bytes)

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until the trainer's end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def _first(self, entry: Entry) -> None:
        """Wait until all that was closed before an entry is visible. Raises _Dropped, Unreadable."""
        self._check(entry)
        while not self._order.is_first(entry):
            if self._unavailable:
                raise Unreadable(self._unavailable)
            await self._turn.wait()
            self._check(entry)

    def _check(self, entry: Entry) -> None:
        """Raise _Dropped if an entry has no place any more."""
        if not self._order.has(entry):
            raise _Dropped

    async def _found(self, entry: Entry) -> TreeFile:
        """Return the file as it is now. Raises _Dropped, Unreadable."""
        self._check(entry)
        found = await in_thread(find_file, self._root, self._prefix, entry.name)
        if found is None:
            raise _Dropped
        if isinstance(found, LeftOut):
            raise Unreadable(found.reason)
        return found

    async def _put_file(self, entry: Entry) -> None:
        """Upload a file. Raises SourceError, OSError, FileChanged, _Dropped, Unreadable."""
        fd = await in_thread(open_file, self._root, await self._found(entry))
        try:
            ended = self._ending.is_set()
            written = not ended and is_written(fd)
            if written:
                raise FileChanged
            status = os.fstat(fd)
            if abs(time.time() - status.st_mtime) < CLOCK_TICK:
                await asyncio.sleep(CLOCK_TICK)
            if mark_of(os.fstat(fd)) != mark_of(status):
                raise FileChanged
            if self._journal.same(entry.name, status) is not None:
                return  # it was found twice

            async def before_made() -> None:
                if written is None:
                    rest = CLOSED_REST if entry.event else FOUND_REST
                    await self._pause(rest - abs(time.time() - status.st_mtime))  # it may be of the future
                await self._first(entry)
                if mark_of((await self._found(entry)).status) != mark_of(status):
                    raise FileChanged

            etag = await self._store.put(
                entry.name, fd, on_read=lambda _: self._check(entry), before_made=before_made
            )
        finally:
            os.close(fd)
        self._journal.note_file(entry.name, status, etag)
        self._latest = status.st_mtime
        self.uploaded_files += 1
        if self._failing:
            self._failing = False
            log.info("checkpoints are uploaded again", waiting_bytes=self.waiting_bytes)

    async def _put_marker(self, entry: Entry) -> None:
        """Upload the marker of a step, unless a file of it is not in S3. Raises as `_put_file`."""
        await self._first(entry)
        step = entry.name[:-1]
        marker = await in_thread(self._marker, step)
        if marker is None:
            raise _Dropped  # the file that is missing comes, and the marker after it
        if marker.files:
            await self._store.put_small(marker.name, marker.document())
        if self._order.has(entry):
            self._order.steps[step] = Step.MARKED
            self._journal.note_step(step, unmarked=False)

    def _marker(self, step: str) -> Marker | None:
        """Return the marker of a step; None if a file of it is not in S3 as it is now."""
        files: dict[str, tuple[int, str]] = {}
        modified = 0
        for each in walk(self._root, self._prefix, step):
            if isinstance(each, TreeFile):
                etag = self._journal.same(each.name, each.status)
                if etag is None:
                    return None
                files[each.name] = (each.size, etag)
                modified = max(modified, each.status.st_mtime_ns)
        index, hosts = self._hosts
        return Marker(step, hosts[index], hosts, modified, files)
