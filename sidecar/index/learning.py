"""Learns the record index of a channel while it streams, so that no other job has to read the objects for it.

    bytes of a FIFO ─▶ ObjectScans ─▶ row ─┐
    bytes of a FIFO ─▶ ObjectScans ─▶ row ─┴▶ IndexLearner ─ once a second ─▶ IndexFile
                                                           ─ once a minute, and after an epoch ─▶ S3

The bytes are in memory: those of an object without a row are read, and those of one with a row go the way of
the channel without this key, spliced if the transport can (`streamer.relay.staging.taps`). So the second
epoch costs nothing.

Learning must not fail an epoch. An index that cannot be opened, or no longer be written, is logged, and the
channel streams on without it; an object that has no row is left to `penstock index build`, which scans just
the objects without one. A process that is killed loses the rows of the last second, with an index in S3 those
that are not stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from sidecar.index.build import APPEND_EVERY, MOST_LOGGED
from sidecar.index.file import open_index
from sidecar.index.objects import Access
from sidecar.index.scans import ObjectScans
from sidecar.index.target import IndexUpload, index_target
from sidecar.process.logs import log
from streamer.aio import in_thread, time_limit
from streamer.errors import ConfigError, PenstockError, SinkError
from streamer.plan.record_table import only_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from sidecar.config.job import Job
    from sidecar.config.records import RecordsConfig
    from sidecar.index.file import IndexFile
    from streamer.formats.borders import BadRecord
    from streamer.formats.record_index import IndexedObject
    from streamer.plan import ObjectRef, Plan
    from streamer.s3.client.session import Clients
    from streamer.trailer import Trailer

MOST_PENDING = 1 << 20
"""Numbers in pending rows after which they are appended at once: 8 MiB."""
LAST_STORE = 10.0
"""Most seconds that the end of a job waits until the index is stored in S3."""
ROW_NUMBERS = 40
"""Numbers that a pending row counts for, besides its offsets."""


class IndexLearner:
    """The index of one channel, and the rows that are not in its file yet.

    Its owner runs and closes it.
    """

    def __init__(self, channel: str, file: IndexFile, plan: Plan, upload: IndexUpload) -> None:
        """`plan`: of the channel. `upload`: stores the file in S3."""
        self.channel = channel
        self._file = file
        self._plan = plan
        self._upload = upload
        self._pending: list[IndexedObject] = []
        self._numbers = 0
        """Numbers in the pending rows."""
        self._settled: set[int] = set()
        """Versions of objects that are refused, or whose rows are pending."""
        self._learnt = self._refused = 0
        self._reported = (0, 0)
        self._news, self._full = asyncio.Event(), asyncio.Event()
        self._ended = self._complete = self._measured = self._stopped = False
        self._at_open = file.writes
        self._replaceable = file.index.replaced + len(file.index)
        """Most rows that are replaced if each object has one version in the plan, and none changes."""

    def __repr__(self) -> str:
        return f"<IndexLearner {self._file.name}, {self._learnt} rows>"

    def tap(self) -> ObjectScans:
        """Return the tap of one more FIFO of the channel."""
        return self._scans(self.add)

    def _scans(self, on_row: Callable[[ObjectRef, IndexedObject], None]) -> ObjectScans:
        return ObjectScans(
            self._file.index.format,
            on_row=on_row,
            on_bad=self._refuse,
            lacks=self.lacks,
            limited=True,
        )

    def lacks(self, name: int, version: int) -> bool:
        """Return whether a row of this version of an object is wanted."""
        return not (self._stopped or version in self._settled or self._file.index.has(name, version))

    def add(self, _: ObjectRef, row: IndexedObject) -> None:
        """Add the row of an object."""
        self._pending.append(row)
        self._settled.add(row.version)
        self._numbers += ROW_NUMBERS + len(row.offsets)
        self._news.set()
        if self._numbers > MOST_PENDING:
            self._full.set()

    def _refuse(self, ref: ObjectRef, version: int, error: BadRecord) -> None:
        self._settled.add(version)
        self._refused += 1
        if self._refused <= MOST_LOGGED:
            log.warning(
                "object is not in the record index",
                channel=self.channel,
                object=f"s3://{ref.bucket}/{ref.key}",
                why=f"{error}; at byte {error.offset}",
            )

    def epoch_ended(self, trailer: Trailer) -> None:
        """Store what was learnt soon."""
        self._ended, self._complete = True, self._complete or trailer.state == "complete"
        self._news.set()
        self._full.set()

    async def run(self) -> None:
        """Keep the rows until it is cancelled. Raises no error of the index."""
        while True:
            await self._news.wait()
            self._news.clear()
            self._full.clear()
            await self._keep()
            if self._ended:
                self._ended = False
                await self._conclude()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(APPEND_EVERY):
                    await self._full.wait()

    async def _keep(self) -> None:
        """Append the pending rows to the file; stop learning if that fails."""
        if not self._pending or self._stopped:
            return
        rows, self._pending, self._numbers = self._pending, [], 0
        writes = self._file.writes
        try:
            await in_thread(self._file.append, rows)
        except SinkError as error:
            self._stop(str(error))
        finally:  # the thread has ended, also if this task was cancelled
            if self._file.writes != writes:
                self._appended(rows)

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._settled.clear()
        log.warning("record index not learnt", channel=self.channel, error=why)

    def _appended(self, rows: list[IndexedObject]) -> None:
        """Note that the file has these rows."""
        self._learnt += len(rows)
        self._settled.difference_update(row.version for row in rows)
        try:
            self._upload.appended(rows)
        except PenstockError as error:
            self._not_stored(error)
        if self._file.index.replaced > self._replaceable:  # or every epoch would write rows for both
            self._stop(
                f"{self._file.name} has one version of each object, and the manifest names an object in two, "
                "or objects were replaced while the job ran; correct the manifest, or leave Records out"
            )

    async def _conclude(self) -> None:
        """Add the rows of empty objects, store the index, and log what was learnt, at the end of an epoch."""
        if self._complete and not self._measured:
            for ref, row in await in_thread(self._empty_objects):
                self.add(ref, row)
            self._measured = True
            await self._keep()
        if self._file.writes != self._at_open:
            try:
                await self._upload.finish()
            except PenstockError as error:
                self._not_stored(error)
        if (found := (self._learnt, self._refused)) != self._reported:
            self._reported = found
            log.info(
                "record index learnt",
                channel=self.channel,
                index=self._file.name,
                learnt=self._learnt,
                refused=self._refused,
                objects=len(self._file.index),
            )

    def _empty_objects(self) -> list[tuple[ObjectRef, IndexedObject]]:
        """Return the plan's objects that have no byte, and their rows; takes time for a large plan."""
        rows: list[tuple[ObjectRef, IndexedObject]] = []
        scans, entries = self._scans(lambda *row: rows.append(row)), self._plan.entries
        empty = (number for number in range(len(entries)) if not entries.sizes[number])
        scans.measure(only_object(entries, number) for number in empty)
        return rows

    def _not_stored(self, error: PenstockError) -> None:
        log.warning("record index not stored", channel=self.channel, error=str(error))

    async def close(self) -> None:
        """Append what is pending and store it. `run` must have ended."""
        try:
            async with time_limit(LAST_STORE):
                await self._keep()
                await self._conclude()
        except TimeoutError:
            log.warning("record index not stored", channel=self.channel, error="the job ended before")
        finally:
            await self._upload.cancel()


@contextlib.asynccontextmanager
async def learn_indexes(
    job: Job, clients: Clients, plans: Mapping[str, Plan]
) -> AsyncIterator[dict[str, IndexLearner]]:
    """Open the indexes that the job's channels learn; yield the learners by channel, and close them.

    Raises ConfigError for an index of another kind. One that cannot be opened is logged, and not learnt.
    """
    learners: dict[str, IndexLearner] = {}
    async with contextlib.AsyncExitStack() as stack:
        for channel in job.channels("Pipe"):
            name, records = channel.channel_name, channel.learnt
            if records is None:
                continue
            access = Access(job, clients)
            try:
                learners[name] = await stack.enter_async_context(
                    _learning(name, records, plans[name], access)
                )
            except ConfigError:
                raise
            except (PenstockError, OSError) as error:
                log.warning("record index not learnt", channel=name, error=str(error))
        yield learners


@contextlib.asynccontextmanager
async def _learning(
    channel: str, records: RecordsConfig, plan: Plan, access: Access
) -> AsyncIterator[IndexLearner]:
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(index_target(records.place, channel, access))
        opening = open_index(target.path, records.record_format, name=target.name)
        file = await in_thread(stack.enter_context, opening)
        learner = IndexLearner(channel, file, plan, IndexUpload(target, file))
        log.info(
            "record index is learnt",
            channel=channel,
            index=file.name,
            format=str(file.index.format),
            objects=len(file.index),
        )
        try:
            yield learner
        finally:
            await learner.close()
