"""Listing: which object versions a prefix names, as S3 sees them now.

Called once per channel and job; what it returns is frozen into the plan. A prefix is a pure string
prefix without delimiter, as in SageMaker: `s3://b/train` also names `train-old/x` (contract §3.1).

S3 gives a thousand keys an answer, and the next answer only after the last. So a prefix that is not
through after some pages is asked for its "folders" (common prefixes up to the next `/`), and each is
listed on its own, many at a time, the large ones by the same rule again:

    prefix ─ pages, in turn ─ still more? ─ folders ─┬─ pages, in turn ─ …      16 requests at a time
                                                     └─ pages, in turn ─ …

Where there are so many folders that they may hardly be larger than a page, the pages go on in turn.
The result does not depend on any of this: a folder's keys are those with its prefix, whatever order the
server has, and the whole is put into the byte order of keys.
"""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from streamer.errors import BadAnswer, ErrorContext, Missing
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri, is_folder_marker
from streamer.s3.catalog.validation import PlanMemory, described_object, short
from streamer.s3.client.faults import first_error, map_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from streamer.s3.catalog.validation import PlanClaim

LISTS = 16
"""Listing requests in flight for one prefix."""
PATIENCE = 4
"""Pages taken in turn before folders are looked for: a small prefix costs no further request."""
MOST_FOLDERS = 256
"""With more on one level a request for each would hardly be worth it."""


MOST_EMPTY = 1000
"""Pages in a row that may name nothing; S3 sends such pages where it passes over what was deleted."""

_NAMED = (("Contents", "Key"), ("CommonPrefixes", "Prefix"))
"""What a page of a listing names, and how."""


_WANTED = {"Contents": {"Key", "Size", "ETag"}, "CommonPrefixes": {"Prefix"}}
"""What every entry of a listing must say."""


class _Lister:
    """One listing of one bucket."""

    def __init__(
        self,
        client: Any,
        bucket: str,
        arrangement: Arrangement,
        *,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._arrangement = arrangement
        self._turns = asyncio.Semaphore(LISTS)
        self._progress = progress
        self._known = 0
        self._empty = 0
        """Pages in a row that named nothing."""

    async def page(self, prefix: str, **asked: str) -> dict[str, Any]:
        """One page, as far as it can be true. Raises SourceError."""
        context = ErrorContext(self._bucket, prefix)
        async with self._turns:
            with map_errors(context):
                page: dict[str, Any] = await self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=prefix, **asked
                )
        if "IsTruncated" not in page:
            raise BadAnswer("the listing cannot be understood (it does not say whether it ends)", context)
        for name, wanted in _WANTED.items():
            for entry in page.get(name, ()):
                if not wanted <= entry.keys():
                    raise BadAnswer(
                        f"the listing has an entry without its {', '.join(sorted(wanted))}", context
                    )
                for found in (entry.get("Key"), entry.get("Prefix")):
                    if found is not None and not found.startswith(prefix):
                        raise BadAnswer(
                            f"the listing names {short(found)}, which does not begin with the prefix", context
                        )
        if page.get("NextContinuationToken") and not page["IsTruncated"]:
            raise BadAnswer("the listing cannot be understood (it ends, and names a further page)", context)
        if page["IsTruncated"] and not page.get("NextContinuationToken"):
            raise BadAnswer("the listing does not advance (truncated, without a further token)", context)
        return page

    def _advances(self, prefix: str, page: dict[str, Any], begun: set[str]) -> None:
        """Raise BadAnswer for a page that begins as one before it did, or has the token of one.

        `begun`: first names and tokens of the pages before. A server, or a cache before it, that goes round
        in a circle would be listed for ever; one that sends a page again would have its objects streamed
        twice.
        """
        first = [page[name][0][key] for name, key in _NAMED if page.get(name)]
        if page["IsTruncated"]:
            first.append(f"token\0{page['NextContinuationToken']}")
        for name in first:
            if name in begun:
                raise BadAnswer(
                    f"the listing does not advance (a page begins again with {name!r})",
                    ErrorContext(self._bucket, prefix),
                )
        begun.update(first)
        self._empty = 0 if any(page.get(name) for name, _ in _NAMED) else self._empty + 1
        if self._empty > MOST_EMPTY:
            raise BadAnswer(
                f"the listing does not advance ({MOST_EMPTY} pages in a row name nothing)",
                ErrorContext(self._bucket, prefix),
            )

    def refs(self, page: dict[str, Any], claim: PlanClaim) -> list[ObjectRef]:
        """The objects of a page, without folder markers. Raises BadAnswer, ConfigError."""
        described = [
            described_object(
                ErrorContext(self._bucket, entry["Key"]), entry["Key"], size=entry["Size"], etag=entry["ETag"]
            )
            for entry in page.get("Contents", ())
        ]
        found = [ref for ref in described if not is_folder_marker(ref)]
        claim.take(found)
        return found

    async def below(self, prefix: str, claim: PlanClaim) -> Entries:
        """Every object whose key starts with `prefix`, as far as the server keeps order in order.

        The objects are counted in `claim`. Raises SourceError, or a group of such; ConfigError for an object
        that cannot be wrapped.
        """
        in_turn = claim.claim()
        entries = self._arrangement.entries()
        asked: dict[str, str] = {}
        begun: set[str] = set()
        pages = 0
        while True:
            page = await self.page(prefix, **asked)
            self._advances(prefix, page, begun)
            for ref in self.refs(page, in_turn):
                entries.add(ref)
            self._known += len(page.get("Contents", ()))
            if self._progress is not None and page.get("Contents"):  # an empty page is no progress
                self._progress(self._known)
            if not page["IsTruncated"]:
                return entries
            asked = {"ContinuationToken": page["NextContinuationToken"]}
            pages += 1
            if pages == PATIENCE:
                before, by_folders = self._known, claim.claim()
                if (found := await self._by_folders(prefix, by_folders)) is not None:
                    in_turn.release()
                    return found
                by_folders.release()
                self._known = before

    async def _by_folders(self, prefix: str, claim: PlanClaim) -> Entries | None:
        """The same, folder by folder; None if there are too many for that."""
        runs: list[Entries | asyncio.Task[Entries]] = [self._arrangement.entries()]
        async with asyncio.TaskGroup() as group:
            folders = 0
            async for item in self._level(prefix, claim):
                loose = runs[-1]
                if isinstance(item, ObjectRef):
                    if not isinstance(loose, Entries):
                        runs.append(loose := self._arrangement.entries())
                    loose.add(item)
                    continue
                folders += 1
                if folders > MOST_FOLDERS or item == prefix:
                    for run in runs:
                        if isinstance(run, asyncio.Task):
                            run.cancel()
                    return None
                runs.append(group.create_task(self.below(item, claim)))
        entries = self._arrangement.entries()
        for run in runs:
            entries.extend(run if isinstance(run, Entries) else run.result())
        return entries

    async def _level(self, prefix: str, claim: PlanClaim) -> AsyncIterator[ObjectRef | str]:
        """What is directly below `prefix`: objects, and the names of folders at their place among them."""
        asked: dict[str, str] = {}
        begun: set[str] = set()
        while True:
            page = await self.page(prefix, Delimiter="/", **asked)
            self._advances(prefix, page, begun)
            found: list[tuple[bytes, ObjectRef | str]] = [
                (ref.key.encode(), ref) for ref in self.refs(page, claim)
            ]
            found += [(each["Prefix"].encode(), each["Prefix"]) for each in page.get("CommonPrefixes", ())]
            found.sort(key=itemgetter(0))
            if self._progress is not None and found:
                self._progress(self._known)
            for _, item in found:
                yield item
            if not page["IsTruncated"]:
                return
            asked = {"ContinuationToken": page["NextContinuationToken"]}


async def first_page(client: Any, uri: S3Uri) -> tuple[list[ObjectRef], bool]:
    """The objects on the first page of a prefix, and whether further pages follow. Raises SourceError."""
    lister = _Lister(client, uri.bucket, Arrangement(), progress=None)
    page = await lister.page(uri.key)
    return lister.refs(page, PlanMemory().claim()), bool(page["IsTruncated"])


async def list_prefix(
    client: Any,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | None = None,
) -> Entries:
    """Every object whose key starts with `uri.key`, in the byte order of keys, without folder markers.

    Raises SourceError: Missing for an absent bucket, Denied, Transient once the client's own attempts
    are used up, BadAnswer for a listing that does not advance. ConfigError if an object cannot be wrapped.
    `progress` is told about how many objects have been heard of, some of them twice. `memory`: what all plans
    may take; ConfigError if they take more.
    """
    arrangement = arrangement or Arrangement()
    try:
        with (memory or PlanMemory()).claim() as claim:
            found = await _Lister(client, uri.bucket, arrangement, progress=progress).below(uri.key, claim)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    ordered, twice = await asyncio.to_thread(_in_order, found)  # a second or two for a million
    if twice is not None:
        raise BadAnswer("the listing names the object twice", ErrorContext(uri.bucket, twice))
    return ordered


def _in_order(found: Entries) -> tuple[Entries, str | None]:
    ordered = found.in_key_order()
    return ordered, ordered.key_twice()


async def plan_prefix(
    client: Any,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """The plan of an `S3Prefix` channel. Raises as `list_prefix` does, and Missing if no object matches."""
    arrangement = arrangement or Arrangement()
    entries = await list_prefix(client, uri, arrangement, progress=progress, memory=memory)
    if not len(entries):
        raise Missing(
            "no object matches this prefix; check S3Uri (a prefix is case-sensitive)", ErrorContext(*uri)
        )
    plan = Plan.arranged(entries, arrangement)
    plan.base = uri
    return plan


async def plan_uris(
    client: Any,
    uris: list[S3Uri],
    arrangement: Arrangement | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """The plan of `penstock cat`: the URIs in the order given. `progress`, `memory`: as of `list_prefix`.

    An exact key is that one object; anything else is a prefix. Raises as `plan_prefix` does.
    """
    objects: list[ObjectRef] = []
    for uri in uris:
        found = [*(await plan_prefix(client, uri, progress=progress, memory=memory)).refs(0)]
        # An exact key sorts before every key that it is a prefix of.
        objects += found[:1] if found[0].key == uri.key else found
    return Plan.of(objects, arrangement)
