"""Checks of `penstock doctor` on one object: a byte of it, with a right and with a wrong If-Match.

The ETags of all objects of the first pages are compared too.

The client that the job would use sends the requests. A connection that fails is tried once more.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from sidecar.doctor.machine import Finding
from sidecar.doctor.remedies import failed
from sidecar.process.exits import Exit, exit_code
from streamer.errors import ErrorContext, ObjectMissing, PenstockError, SourceChanged, Transient
from streamer.plan import ObjectRef, bare_etag, is_modified
from streamer.plan.validators import described, modified
from streamer.s3.client.faults import clock_ahead
from streamer.s3.pages.object_get import ControlClient, read_first
from streamer.s3.ranges import check_header, transformation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from streamer.s3.client.session import Clients
    from streamer.s3.pages.object_get import ObjectResponse

SKEW_WARNED, SKEW_REFUSED = 60.0, 900.0
"""Seconds of clock skew. S3 refuses signatures that are 15 minutes off (RequestTimeTooSkewed)."""
CHECKSUM = "x-amz-checksum-"
"""Begin of the names of the header fields with checksums."""
NO_SUCH_ETAG = '"00000000000000000000000000000000"'


async def _get(control: ControlClient, ref: ObjectRef, **headers: str) -> tuple[ObjectResponse, bytes]:
    """Get one byte with these headers, with `_` for `-`; return the response and two bytes at most."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["Range"] = f"bytes={_offset(ref)}-{_offset(ref)}"
    try:
        response, data = await read_first(control, ref, named)
    except Transient:  # another address of the endpoint may answer
        response, data = await read_first(control, ref, named)
    return response, data[:2]


def _offset(ref: ObjectRef) -> int:
    """Return the offset of the byte that is asked for.

    Some servers answer `bytes=0-0` with the whole object. A run sends it only for objects of one byte.
    """
    return min(1, ref.size - 1)


async def read_checks(clients: Clients, name: str, ref: ObjectRef) -> AsyncIterator[Finding]:
    """Read one byte of an object; check how the endpoint handles Range, If-Match and checksums."""
    with contextlib.closing(ControlClient(clients)) as control:
        try:
            response, data = await _get(control, ref, x_amz_checksum_mode="ENABLED")
        except ObjectMissing as error:
            fix = (
                "The listing has this key, and GET does not find it: the server may encode the keys of its "
                "listings in a way of its own. Name the objects in a manifest."
            )
            yield Finding(f"get {name}", "failure", str(error), fix, exit_code(error))
            return
        except PenstockError as error:
            yield failed(f"get {name}", error, "s3:GetObject on the objects")
            return
        yield Finding(f"get {name}", "ok", f"s3://{ref.bucket}/{ref.key}")
        yield _range(name, ref, response, data)
        if (finding := _etag(name, ref, response)) is not None:
            yield finding
        yield _clock(response.fields.get("date"))
        yield await _if_match(clients, name, ref, control)
    checksums = sorted(
        field.removeprefix(CHECKSUM).upper() for field in response.fields if field.startswith(CHECKSUM)
    )
    text = ", ".join(each for each in checksums if each != "TYPE")
    yield Finding(f"checksums {name}", "ok", text or "S3 has none")


def _etag(name: str, ref: ObjectRef, response: ObjectResponse) -> Finding | None:
    """Return a finding unless the response has the listed ETag."""
    check = f"ETag {name}"
    sent = modified(response.last_modified) if is_modified(ref.etag) else bare_etag(response.etag or "")
    if sent != ref.etag:
        fix = "The sidecar cannot tell versions of an object apart there: take another endpoint."
        text = f"listed as {described(ref.etag)}, sent as {described(sent) if sent else 'none'}"
        return Finding(check, "failure", text, fix, Exit.UNREACHABLE)
    if is_modified(ref.etag):
        fix = "Do not replace an object twice within a second, nor under a job; no record index is possible."
        return Finding(check, "warning", "none; size and Last-Modified are compared instead", fix)
    return None


def etags_differ(name: str, refs: Sequence[ObjectRef]) -> Finding | None:
    """Return a warning if objects of different sizes have one ETag, which then proves no version."""
    first: dict[tuple[str, str], ObjectRef] = {}
    for ref in refs:
        if is_modified(ref.etag):
            continue
        other = first.setdefault((ref.bucket, ref.etag), ref)
        if ref.size != other.size:
            text = f"{ref.etag} for objects of different sizes: {other.key}, {ref.key}"
            fix = "No ETag proves a version there: do not change objects under a job."
            return Finding(f"ETag {name}", "warning", text, fix)
    return None


def _range(name: str, ref: ObjectRef, response: ObjectResponse, data: bytes) -> Finding:
    """Check that a part would accept the response. The ETag has a finding of its own."""
    content_range = response.content_range
    text = f"answered {response.status} with {response.length} bytes for one"
    fields = {name: value for name, value in response.fields.items() if name != "x-amz-version-id"}
    with contextlib.suppress(PenstockError):
        check_header(
            replace(ref, etag="any"),
            _offset(ref),
            _offset(ref) + 1,
            ErrorContext(ref.bucket, ref.key),
            status=response.status,
            content_length=response.length,
            fields=fields | {"etag": "any"},
        )
        if len(data) == 1:
            return Finding(f"Range {name}", "ok", content_range or text)
    fix = "The endpoint ignores Range, as a proxy may: take another one. Penstock cannot stream from it."
    if content_range:
        text += f", Content-Range {content_range}"
    text += transformation(response.fields, response.length)
    return Finding(f"Range {name}", "failure", text, fix, Exit.UNREACHABLE)


async def _if_match(clients: Clients, name: str, ref: ObjectRef, control: ControlClient) -> Finding:
    """Check that the endpoint answers a request with the right ETag, and refuses one with a wrong ETag."""
    check = f"If-Match {name}"
    if not clients.data.sends_if_match:
        return Finding(check, "ok", "left out, as IfMatch: omit asks; the ETag of every response is compared")
    if is_modified(ref.etag):
        return Finding(check, "ok", "left out: the endpoint lists the objects without ETags")
    try:
        await _get(control, ref, If_Match=f'"{ref.etag}"')
    except PenstockError as error:
        text = f"refused, although the ETag is right: {error}"
        fix = "Set Penstock.Endpoint.IfMatch: omit; the ETag of every response is compared in any case."
        return Finding(check, "failure", text, fix, exit_code(error))
    try:
        await _get(control, ref, If_Match=NO_SUCH_ETAG)
    except SourceChanged:
        return Finding(check, "ok", "another version is refused")
    except PenstockError as error:
        return failed(check, error)
    fix = "Replaced objects are found by the ETag of the answer instead; do not change objects under a job."
    return Finding(check, "warning", "ignored: a wrong ETag was answered all the same", fix)


def _clock(date: str | None) -> Finding:
    skew = clock_ahead(date)
    if skew is None:
        return Finding("clock", "warning", "the endpoint tells no time", "Keep the clock right (NTP).")
    text = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the endpoint's"
    fix = "Set the clock (NTP): S3 refuses signatures that are 15 minutes off."
    if abs(skew) > SKEW_REFUSED:
        return Finding("clock", "failure", text, fix, Exit.DENIED)
    return Finding("clock", "warning", text, fix) if abs(skew) > SKEW_WARNED else Finding("clock", "ok", text)
