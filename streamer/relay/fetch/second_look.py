"""Looks again before an epoch fails because an object was deleted or replaced after it was listed.

    404                 ─┬─ S3 has the object by another spelling of its key: the listing is encoded wrongly
    404, 412, other ETag ─┴─ another listed object: if it differs too, the listing may be wrong

A first such response is no proof: a server may encode the keys of its listings in a way of its own, or list
other ETags than it sends. The text would make people hunt for somebody who deletes objects.
"""

from __future__ import annotations

import asyncio
import itertools
import unicodedata
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from streamer.errors import BadAnswer, Deleted, PenstockError, SourceChanged, SourceError
from streamer.plan import ObjectRef, Part, Segment
from streamer.s3.ranges import RangeRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import Plan
    from streamer.s3.ranges import RangeSource

PATIENCE = 10.0
"""Seconds after which the look is given up: some twenty requests, one after the other."""
MOST_BLANKS = 4
"""Blanks of a key each of which may be a `+`; every combination is a spelling."""
_FIX = "name the objects in a manifest (S3DataType: ManifestFile), or update the server"

_DOUBT: dict[type[SourceChanged], str] = {
    Deleted: f"a server may encode the keys of its listings in a way of its own; then {_FIX}",
    SourceChanged: "its ETags or sizes may differ from those of GETs, which `penstock doctor` tells",
}


async def explained(error: SourceChanged, ref: ObjectRef, plan: Plan, source: RangeSource) -> SourceError:
    """Return the error of an object that is not as it was listed, after a second look."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await _looked(error, ref, plan, source)
    except TimeoutError:
        return error


async def _looked(error: SourceChanged, ref: ObjectRef, plan: Plan, source: RangeSource) -> SourceError:
    if isinstance(error, Deleted):
        for key in spellings(ref.key):
            if await _is_as_listed(replace(ref, key=key), source):
                return BadAnswer(
                    f"the listing names an object {ref.key!r}, which S3 has as {key!r}: the server encodes "
                    f"the keys of its listings in another way than S3 (EncodingType); {_FIX}",
                    error.context,
                )
        if "\ufffd" in ref.key:
            return BadAnswer(
                "no such object: the listing has a key that is not UTF-8, of which U+FFFD replaces a byte, "
                "so no request can name it; rename the object, or leave it out by Exclude",
                error.context,
            )
    other = next(_others(ref, plan), None)
    if other is None:
        error.message += f"; or the listing is wrong: {_DOUBT[type(error)]}"
        return error
    found = await _error_of(other, source)
    if isinstance(found, SourceChanged) and isinstance(found, Deleted) == isinstance(error, Deleted):
        what, done = ("found", "deletes") if isinstance(error, Deleted) else ("as it was listed", "replaces")
        error.message = (
            f"neither this object nor s3://{other.bucket}/{other.key} is {what}: somebody {done} them, or "
            f"the listing is wrong: {_DOUBT[type(error)]}{_reason(error)}"
        )
    return error


def _reason(error: SourceChanged) -> str:
    """Return the end of the error's text: what the response says, without the conclusion from it."""
    whole, found, reason = error.message.partition(" after it was listed")
    return reason if reason.startswith(" (") else f"; {reason.lstrip(': ') if found else whole}"


def spellings(key: str) -> list[str]:
    """Return the keys that a server may list as `key` by mistake."""
    import html  # its table of entities takes a millisecond

    found = [
        unquote(key),  # encoded without EncodingType, or twice
        unquote_plus(key),
        key.replace("+", " "),
        quote(key, safe="/"),  # EncodingType, and not encoded
        quote_plus(key, safe="/"),
        html.unescape(key),  # escaped twice
        unicodedata.normalize("NFC", key),  # as some file systems spell names
        unicodedata.normalize("NFD", key),
        key.replace("\n", "\r"),  # XML reads a carriage return as a line feed
        key.replace("\n", "\r\n"),
    ]
    with suppress(UnicodeError):
        found.append(key.encode("latin-1").decode())  # UTF-8 twice
    # `+` left as it is under EncodingType, where it stands for a blank.
    blanks = [index for index, character in enumerate(key) if character == " "][:MOST_BLANKS]
    for chosen in itertools.product("+ ", repeat=len(blanks)):
        characters = list(key)
        for index, character in zip(blanks, chosen, strict=True):
            characters[index] = character
        found.append("".join(characters))
    if len(blanks) == MOST_BLANKS:
        found.append(key.replace(" ", "+"))
    return [each for each in dict.fromkeys(found) if each != key]


def _others(ref: ObjectRef, plan: Plan) -> Iterator[ObjectRef]:
    """Yield the plan's other objects that have bytes."""
    for items in plan.entries:
        for item in items:
            if isinstance(item, ObjectRef) and item.size and item.key != ref.key:
                yield item


async def _is_as_listed(ref: ObjectRef, source: RangeSource) -> bool:
    return await _error_of(ref, source) is None


async def _error_of(ref: ObjectRef, source: RangeSource) -> PenstockError | None:
    """Request the object's first byte; return the error, or None if the object is as it was listed."""
    try:
        body = await source.open(RangeRequest(Part.of(0, 0, [Segment(ref, 0, 1)])))
    except PenstockError as error:
        return error
    body.close()
    return None
