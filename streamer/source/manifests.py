"""Manifests: the entries of a channel named one by one (contract §4).

    S3 ─ body, resumed where it breaks ─ gunzip, if its magic says so ─ scanner ─ HEADs, 64 at once ─ entries

A manifest is never held whole: its text passes through as it arrives, and what stays is an entry of the
plan. The HEADs that give size and ETag run side by side, within a bound, and in any order; entries are
added in the manifest's. A manifest that cannot be read to its proven end is an error, for a truncated
one might look like a shorter one.

The rules of the text itself are in `manifest_text`; here is what goes to S3.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from streamer.errors import BadAnswer, ConfigError, SourceError, Transient, Truncated, Where
from streamer.plan import (
    Arrangement,
    Entries,
    ObjectRef,
    Plan,
    S3Uri,
    bare_etag,
    parse_object_uri,
    parse_s3_uri,
)
from streamer.source.faults import first_error, map_errors
from streamer.source.manifest_text import ArrayScanner, Gunzip, LineScanner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

HEADS = 64
"""HEAD requests in flight."""
ATTEMPTS = 5
"""Requests for the rest of a manifest whose body breaks off, without a byte of progress."""
_PLAIN_READ = 256 * 1024


async def plan_manifest(client: Any, uri: S3Uri, arrangement: Arrangement | None = None) -> Plan:
    """The plan of a `ManifestFile` channel (contract §4.1): the objects in the manifest's order.

    Raises ConfigError naming the position for a manifest that breaks a rule, SourceError otherwise.
    """
    arrangement = arrangement or Arrangement()
    entries = arrangement.entries()
    scanner = ArrayScanner(str(uri))

    def rows(text: bytes, *, last: bool) -> Iterator[_Row]:
        for place, name in scanner.feed(text, last=last):
            yield _Row(place, [name])

    await _fill(client, uri, entries, rows)
    plan = Plan.arranged(entries, arrangement)
    plan.base = parse_s3_uri(scanner.prefix or "")
    return plan


async def plan_augmented(
    client: Any, uri: S3Uri, attributes: Sequence[str], arrangement: Arrangement | None = None
) -> Plan:
    """The plan of an `AugmentedManifestFile` channel (contract §4.2): one entry a line.

    An entry is the listed attributes in the order of `attributes`: of one whose name ends in `-ref` the
    object that it names, of any other its text. Raises ConfigError naming line and attribute for a
    manifest that breaks a rule, SourceError otherwise.
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

    await _fill(client, uri, entries, rows)
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


async def _fill(client: Any, uri: S3Uri, entries: Entries, rows: _Rows) -> None:
    """Add an entry for every row of the manifest, with the HEADs of later rows under way meanwhile."""
    pending: deque[_Row] = deque()
    running = 0

    async def take(row: _Row, group: asyncio.TaskGroup) -> None:
        nonlocal running
        running += _ask(client, row, group)
        pending.append(row)
        while max(running, len(pending)) > HEADS:
            await settle()

    async def settle() -> None:
        nonlocal running
        row = pending.popleft()
        running -= row.tasks
        found: list[ObjectRef | bytes] = []
        for item in row.items:
            if isinstance(item, asyncio.Task):
                found.append(await item)
            elif isinstance(item, bytes):
                found.append(item)
        try:
            entries.add(*found)
        except ConfigError as error:
            raise ConfigError(f"{row.place}: {error}") from error

    try:
        async with asyncio.TaskGroup() as group, aclosing(_read(client, uri)) as body:
            inflate = Gunzip(str(uri))
            async for chunk in body:
                for text in inflate.feed(chunk):
                    for row in rows(text, last=False):
                        await take(row, group)
            for row in rows(inflate.finish(), last=True):
                await take(row, group)
            while pending:
                await settle()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    if not len(entries):
        raise ConfigError(f"{uri} names no object; a manifest needs at least one entry")


def _ask(client: Any, row: _Row, group: asyncio.TaskGroup) -> int:
    """Start the HEADs of a row; return how many."""
    row.items = [
        group.create_task(_head(client, item, row.place)) if isinstance(item, str) else item
        for item in row.items
    ]
    return row.tasks


async def _head(client: Any, uri: str, place: str) -> ObjectRef:
    """Size and ETag of the object, or of the version that the URI asks for."""
    try:
        (bucket, key), version = parse_object_uri(uri)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    asked = {"VersionId": version} if version else {}
    try:
        with map_errors(Where(bucket, key)):
            answer = await client.head_object(Bucket=bucket, Key=key, **asked)
    except SourceError as error:
        raise type(error)(f"{place}: {error.message}", error.where) from error
    return ObjectRef(bucket, key, answer["ContentLength"], bare_etag(answer["ETag"]), version)


async def _read(client: Any, uri: S3Uri) -> AsyncGenerator[bytes, None]:
    """The body of one object in pieces, of one version, resumed where it breaks off. Raises SourceError."""
    received, size, failures = 0, -1, 0
    pinned: dict[str, str] = {}
    while received != size:
        where = Where(uri.bucket, uri.key, received, failures + 1)
        before = received
        try:
            with map_errors(where):
                answer = await client.get_object(Bucket=uri.bucket, Key=uri.key, **pinned)
                async with answer["Body"] as body:
                    if size < 0:
                        size = answer["ContentLength"]
                    elif not answer.get("ContentRange", "").startswith(f"bytes {received}-"):
                        raise BadAnswer(f"sent another range than from byte {received}", where)
                    content = body.raw_stream.content
                    while data := await content.read(_PLAIN_READ):
                        received += len(data)
                        yield data
            if received != size:
                raise Truncated(f"the body ended {size - received} bytes early", where)
        except Transient:
            failures = 1 if received > before else failures + 1
            if failures >= ATTEMPTS:
                raise
        pinned = {"IfMatch": answer["ETag"], "Range": f"bytes={received}-{size - 1}"} if size >= 0 else {}
