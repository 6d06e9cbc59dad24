"""Listing: which object versions a prefix names, as S3 sees them now.

Called once per channel and job; what it returns is frozen into the plan. A prefix is a pure string
prefix without delimiter, as in SageMaker: `s3://b/train` also names `train-old/x` (contract §3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamer.errors import Missing, Where
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri, bare_etag, is_folder_marker
from streamer.source.faults import map_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def list_prefix(client: Any, uri: S3Uri) -> AsyncIterator[ObjectRef]:
    """Every object whose key starts with `uri.key`, as listed.

    Raises SourceError: Missing for an absent bucket, Denied, Transient once the client's own attempts
    are used up, BadAnswer for a listing that does not advance.
    """
    with map_errors(Where(uri.bucket, uri.key)):
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=uri.bucket, Prefix=uri.key)
        async for page in pages:
            for entry in page.get("Contents", ()):
                yield ObjectRef(uri.bucket, entry["Key"], entry["Size"], bare_etag(entry["ETag"]))


async def _entries(client: Any, uri: S3Uri, arrangement: Arrangement) -> Entries:
    """The objects under a prefix, in key order. Raises SourceError, Missing if there is none."""
    entries = Entries(wrap=arrangement.wrap, inflate=arrangement.inflate)
    async for ref in list_prefix(client, uri):
        if not is_folder_marker(ref):
            entries.add(ref)
    if not len(entries):
        raise Missing("no object matches this prefix; check S3Uri (a prefix is case-sensitive)", Where(*uri))
    return entries.in_key_order()


async def plan_prefix(client: Any, uri: S3Uri, arrangement: Arrangement | None = None) -> Plan:
    """The plan of an `S3Prefix` channel.

    Raises SourceError, Missing if no object matches; ConfigError if an object cannot be wrapped.
    """
    arrangement = arrangement or Arrangement()
    return Plan.arranged(await _entries(client, uri, arrangement), arrangement)


async def plan_uris(client: Any, uris: list[S3Uri]) -> Plan:
    """The plan of `penstock cat`: the URIs in the order given.

    An exact key is that one object; anything else is a prefix. Raises as `plan_prefix` does.
    """
    objects: list[ObjectRef] = []
    for uri in uris:
        found = [*(await plan_prefix(client, uri)).refs(0)]
        # An exact key sorts before every key that it is a prefix of.
        objects += found[:1] if found[0].key == uri.key else found
    return Plan.of(objects)
