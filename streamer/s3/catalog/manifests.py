"""Manifests: the entries of a channel named one by one (contract §4).

    S3 ─ body, resumed where it breaks ─ gunzip, if its magic says so ─ scanner ─ many HEADs ─ entries

A manifest is never held whole: its text passes through as it arrives, and what stays is an entry of the plan.
The HEADs that give size and ETag (`inspector`) run side by side and end in any order; entries are added in
the manifest's. A row whose HEADs are slow holds back later ones, never their HEADs, until `ROWS` wait: then
the manifest is read no further. A manifest that cannot be read to its proven end is an error, for a truncated
one might look like a shorter one.

The rules of the text itself are in `manifest_text`.
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
from streamer.s3.client.bounded import within_stall
from streamer.s3.client.faults import first_error, map_errors
from streamer.s3.ranges import check_header

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from streamer.s3.catalog.object_info import ObjectInspector

    Progress = Callable[[int], None]
    """Told how many entries there are so far, at each and at each piece of the manifest."""

ROWS = 2048
"""Rows, and objects in them, whose HEADs are awaited at one time."""
ATTEMPTS = 5
"""Requests for the rest of a manifest whose body breaks off, without a byte of progress."""
_PLAIN_READ = 256 * 1024


async def plan_manifest(
    client: Any,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    inspector: ObjectInspector | None = None,
    progress: Progress | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """The plan of a `ManifestFile` channel (contract §4.1): the objects in the manifest's order.

    `client` reads the manifest and `inspector` finds what it names; without `inspector`, `client` does.
    `memory`: what all plans may take; ConfigError if they take more. Raises
    ConfigError naming the position for a manifest that breaks a rule, SourceError otherwise.
    """
    arrangement = arrangement or Arrangement()
    entries = arrangement.entries()
    scanner = ArrayScanner(str(uri))

    def rows(text: bytes, *, last: bool) -> Iterator[_Row]:
        for place, name in scanner.feed(text, last=last):
            yield _Row(place, [name])

    await _Filling(inspector or AiobotocoreHeadClient(client), entries, progress, memory).run(
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
    """The plan of an `AugmentedManifestFile` channel (contract §4.2): one entry a line.

    An entry is the listed attributes in the order of `attributes`: of one whose name ends in `-ref` the
    object that it names, of any other its text. `inspector` and `progress` as of `plan_manifest`. Raises
    ConfigError naming line and attribute for a manifest that breaks a rule, SourceError otherwise.
    """
    if not attributes:
        raise ConfigError("AttributeNames is empty: list the attributes to stream, in order")
    arrangement = arrangement or Arrangement()
    objects = sum(name.endswith("-ref") for name in attributes)
    entries = arrangement.entries(objects_each=objects)
    scanner = LineScanner(str(uri), attributes)

    def rows(text: bytes, *, last: bool) -> Iterator[_Row]:
        for place, values in scanner.feed(text, last=last):
            yield _Row(place, values)

    await _Filling(inspector or AiobotocoreHeadClient(client), entries, progress, memory).run(
        client, uri, rows
    )
    return Plan.arranged(entries, arrangement)


class _Row:
    """An entry to be: literals as bytes, objects as URIs, then as the tasks that ask for them."""

    __slots__ = ("items", "place")

    def __init__(self, place: str, items: Sequence[bytes | str]) -> None:
        self.place = place
        self.items: list[bytes | str | asyncio.Task[ObjectRef]] = list(items)

    @property
    def tasks(self) -> int:
        return sum(isinstance(item, asyncio.Task) for item in self.items)


class _Rows(Protocol):
    """A scanner's rows as they become whole."""

    def __call__(self, text: bytes, *, last: bool) -> Iterator[_Row]: ...


class _Filling:
    """Adds an entry for every row of one manifest, with the HEADs of later rows under way meanwhile."""

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
        """Raises ConfigError, SourceError."""
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
                self._tell()
                for text in inflate.feed(chunk):
                    for row in rows(text, last=False):
                        await self._take(row, group)
            for row in rows(inflate.finish(), last=True):
                await self._take(row, group)
            while self._pending:
                await self._settle()

    async def _take(self, row: _Row, group: asyncio.TaskGroup) -> None:
        row.items = [
            group.create_task(self._find(item, row.place)) if isinstance(item, str) else item
            for item in row.items
        ]
        self._running += row.tasks
        self._pending.append(row)
        while max(self._running, len(self._pending)) > ROWS:
            await self._settle()

    async def _settle(self) -> None:
        row = self._pending.popleft()
        self._running -= row.tasks
        found: list[ObjectRef | bytes] = []
        for item in row.items:
            if isinstance(item, asyncio.Task):
                found.append(ref := await item)
                self._claim.take([ref])
            elif isinstance(item, bytes):
                found.append(item)
        try:
            self._entries.add(*found)
        except ConfigError as error:
            raise ConfigError(f"{row.place}: {error}") from error
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(len(self._entries))

    async def _find(self, uri: str, place: str) -> ObjectRef:
        """The object, or the version that the URI asks for."""
        try:
            (bucket, key), version = parse_object_uri(uri)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        try:
            return await self._inspector.stat(bucket, key, version)
        except SourceError as error:
            raise type(error)(f"{place}: {error.message}", error.context) from error


async def _read(client: Any, uri: S3Uri) -> AsyncGenerator[bytes, None]:
    """The body of one object in pieces, of one version, resumed where it breaks off. Raises SourceError."""
    received, size, failures, etag = 0, -1, 0, ""
    pinned: dict[str, str] = {}
    while received != size:
        context = ErrorContext(uri.bucket, uri.key, received, failures + 1)
        before = received
        try:
            with map_errors(context):
                answer = await client.get_object(Bucket=uri.bucket, Key=uri.key, **pinned)
                async with answer["Body"] as body:
                    status = answer["ResponseMetadata"]["HTTPStatusCode"]
                    if size < 0:
                        if status != http.HTTPStatus.OK:
                            raise BadAnswer(f"answered {status} to a GET without a range", context)
                        size, etag = answer.get("ContentLength", -1), answer.get("ETag", "")
                        if size < 0:
                            raise BadAnswer(
                                "answered without Content-Length, so nothing proves the end", context
                            )
                    else:
                        check_header(
                            ObjectRef(uri.bucket, uri.key, size, bare_etag(etag)),
                            received,
                            size,
                            context,
                            status=status,
                            content_range=answer.get("ContentRange"),
                            content_length=answer.get("ContentLength"),
                            etag=answer.get("ETag"),
                            version=None,
                        )
                    content = body.raw_stream.content
                    async with within_stall(client.meta.config.read_timeout, context) as stall:
                        while data := await content.read(_PLAIN_READ):
                            received += len(data)
                            if received > size:
                                raise BadAnswer(f"sent more than the {size} bytes that it promised", context)
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
                    raise  # to be read anew, whole: without an ETag the rest may be of another version
                pinned = {"IfMatch": etag, "Range": f"bytes={received}-{size - 1}"}
