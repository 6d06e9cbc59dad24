"""Plans channels from manifests, which name the objects one by one (contract §4).

    S3 ─ body, resumed after a failure ─ gunzip, if it is gzip ─ scanner ─ many HEADs ─ entries

A manifest is parsed as it arrives and never kept as a whole; only the plan's entries stay. The HEADs for size
and ETag (`inspector`) run concurrently and end in any order; entries are added in the manifest's order. HEADs
of later rows do not wait for a slow HEAD until `ROWS` rows wait; then reading the manifest pauses. A manifest
that cannot be read to its proven end is an error, because a truncated manifest may look like a shorter one.

`manifest_text` parses the text.
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from streamer.errors import BadAnswer, ConfigError, ErrorContext, SourceError, Transient, Truncated
from streamer.plan import (
    Arrangement,
    Entries,
    ObjectRef,
    Plan,
    S3Uri,
    bare_etag,
    is_etag,
    parse_object_uri,
    parse_s3_uri,
)
from streamer.s3.catalog.manifest_text import ArrayScanner, Gunzip, LineScanner
from streamer.s3.catalog.object_info import AiobotocoreHeadClient
from streamer.s3.catalog.validation import PlanMemory
from streamer.s3.client.faults import first_error, map_errors
from streamer.s3.client.stall import within_stall
from streamer.s3.ranges import check_header

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from streamer.s3.catalog.object_info import ObjectInspector

    Progress = Callable[[int], None]
    """Called with the number of entries so far, after each entry and each piece of the manifest."""

ROWS = 2048
"""Most rows, and most objects in them, whose HEADs are in flight."""
ATTEMPTS = 5
"""Most successive requests for the rest of a manifest without a byte of progress."""
_READ_SIZE = 256 * 1024


async def plan_manifest(
    client: Any,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    inspector: ObjectInspector | None = None,
    progress: Progress | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """Plan a `ManifestFile` channel (contract §4.1): the objects in the manifest's order.

    `client` reads the manifest; `inspector`, or `client` if there is none, sends the HEADs. Raises
    ConfigError naming the entry for a manifest that breaks a rule, ConfigError if the plans need more than
    `memory`, SourceError for a failed request.
    """
    arrangement = arrangement or Arrangement()
    entries = arrangement.entries()
    scanner = ArrayScanner(str(uri))

    def rows(text: bytes, *, last: bool) -> Iterator[_Row]:
        for context, name in scanner.feed(text, last=last):
            yield _Row(context, [name])

    await _PlanFiller(inspector or AiobotocoreHeadClient(client), entries, progress, memory).run(
        client, uri, rows
    )
    plan = Plan.arranged(entries, arrangement)
    plan.base = parse_s3_uri(scanner.prefix or "")
    return plan


async def plan_augmented(
    client: Any,
    uri: S3Uri,
    attributes: Sequence[str],
    arrangement: Arrangement | None = None,
    *,
    inspector: ObjectInspector | None = None,
    progress: Progress | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """Plan an `AugmentedManifestFile` channel (contract §4.2): one entry per line.

    An entry is the listed attributes in the order of `attributes`: an attribute whose name ends in `-ref` is
    the object that it names, any other is its text. `inspector`, `progress`, `memory`: as for
    `plan_manifest`. Raises ConfigError naming line and attribute for a manifest that breaks a rule,
    SourceError for a failed request.
    """
    if not attributes:
        raise ConfigError("AttributeNames is empty: list the attributes to stream, in order")
    arrangement = arrangement or Arrangement()
    objects = sum(name.endswith("-ref") for name in attributes)
    entries = arrangement.entries(objects_each=objects)
    scanner = LineScanner(str(uri), attributes)

    def rows(text: bytes, *, last: bool) -> Iterator[_Row]:
        for context, values in scanner.feed(text, last=last):
            yield _Row(context, values)

    await _PlanFiller(inspector or AiobotocoreHeadClient(client), entries, progress, memory).run(
        client, uri, rows
    )
    return Plan.arranged(entries, arrangement)


class _Row:
    """A row of a manifest: literals as bytes; objects as URIs, then as the tasks of their HEADs.

    `context` names manifest and row in errors.
    """

    __slots__ = ("context", "items")

    def __init__(self, context: str, items: Sequence[bytes | str]) -> None:
        self.context = context
        self.items: list[bytes | str | asyncio.Task[ObjectRef]] = list(items)

    @property
    def tasks(self) -> int:
        return sum(isinstance(item, asyncio.Task) for item in self.items)


class _Rows(Protocol):
    """Returns the rows that a further piece of text completes."""

    def __call__(self, text: bytes, *, last: bool) -> Iterator[_Row]: ...


class _PlanFiller:
    """Adds an entry for every row of one manifest, while the HEADs of later rows are in flight."""

    def __init__(
        self,
        inspector: ObjectInspector,
        entries: Entries,
        progress: Progress | None,
        memory: PlanMemory | None,
    ) -> None:
        self._inspector = inspector
        self._entries = entries
        self._progress = progress
        self._claim = (memory or PlanMemory()).claim()
        self._pending: deque[_Row] = deque()
        self._running = 0

    async def run(self, client: Any, uri: S3Uri, rows: _Rows) -> None:
        """Read the manifest and add its entries. Raises ConfigError, SourceError."""
        try:
            with self._claim:
                await self._fill(client, uri, rows)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        if not len(self._entries):
            raise ConfigError(f"{uri} names no object; a manifest needs at least one entry")

    async def _fill(self, client: Any, uri: S3Uri, rows: _Rows) -> None:
        async with asyncio.TaskGroup() as group, aclosing(_read(client, uri)) as body:
            inflate = Gunzip(str(uri))
            async for chunk in body:
                self._report_progress()
                for text in inflate.feed(chunk):
                    for row in rows(text, last=False):
                        await self._take(row, group)
            for row in rows(inflate.finish(), last=True):
                await self._take(row, group)
            while self._pending:
                await self._add_oldest()

    async def _take(self, row: _Row, group: asyncio.TaskGroup) -> None:
        row.items = [
            group.create_task(self._stat(item, row.context)) if isinstance(item, str) else item
            for item in row.items
        ]
        self._running += row.tasks
        self._pending.append(row)
        while max(self._running, len(self._pending)) > ROWS:
            await self._add_oldest()

    async def _add_oldest(self) -> None:
        row = self._pending.popleft()
        self._running -= row.tasks
        items: list[ObjectRef | bytes] = []
        for item in row.items:
            if isinstance(item, asyncio.Task):
                items.append(ref := await item)
                self._claim.take([ref])
            elif isinstance(item, bytes):
                items.append(item)
        try:
            self._entries.add(*items)
        except ConfigError as error:
            raise ConfigError(f"{row.context}: {error}") from error
        self._report_progress()

    def _report_progress(self) -> None:
        if self._progress is not None:
            self._progress(len(self._entries))

    async def _stat(self, uri: str, context: str) -> ObjectRef:
        """Send the HEAD of the object, or of the version in the URI. Raises SourceError."""
        try:
            (bucket, key), version = parse_object_uri(uri)
        except ConfigError as error:
            raise ConfigError(f"{context}: {error}") from error
        try:
            return await self._inspector.stat(bucket, key, version)
        except SourceError as error:
            raise type(error)(f"{context}: {error.message}", error.context) from error


async def _read(client: Any, uri: S3Uri) -> AsyncGenerator[bytes, None]:
    """Yield one version of an object in pieces; resume after a failure. Raises SourceError."""
    received, size, failures, etag = 0, -1, 0, ""
    pinned: dict[str, str] = {}
    while received != size:
        context = ErrorContext(uri.bucket, uri.key, received, failures + 1)
        before = received
        try:
            with map_errors(context):
                response = await client.get_object(Bucket=uri.bucket, Key=uri.key, **pinned)
                async with response["Body"] as body:
                    status = response["ResponseMetadata"]["HTTPStatusCode"]
                    if size < 0:
                        if status != http.HTTPStatus.OK:
                            raise BadAnswer(
                                f"the response to a GET without a range has status {status}", context
                            )
                        size, etag = response.get("ContentLength", -1), response.get("ETag", "")
                        if size < 0:
                            raise BadAnswer(
                                "the response has no Content-Length, so its end cannot be proven", context
                            )
                    else:
                        check_header(
                            ObjectRef(uri.bucket, uri.key, size, bare_etag(etag)),
                            received,
                            size,
                            context,
                            status=status,
                            content_range=response.get("ContentRange"),
                            content_length=response.get("ContentLength"),
                            etag=response.get("ETag"),
                            version=None,
                        )
                    content = body.raw_stream.content
                    async with within_stall(client.stall_timeout, context) as stall:
                        while data := await content.read(_READ_SIZE):
                            received += len(data)
                            if received > size:
                                raise BadAnswer(
                                    f"the body is longer than its Content-Length, {size} bytes", context
                                )
                            stall.pause()
                            yield data
                            stall.moved()
            if received != size:
                raise Truncated(f"the body ended {size - received} bytes early", context)
        except Transient:
            failures = 1 if received > before else failures + 1
            if failures >= ATTEMPTS:
                raise
            if size >= 0:
                if not is_etag(bare_etag(etag)):
                    raise  # without an ETag the rest may be of another version
                pinned = {"IfMatch": etag, "Range": f"bytes={received}-{size - 1}"}
