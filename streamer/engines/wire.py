"""Messages between parent and engine: tuples of plain values, in `marshal`'s format.

Both processes run the same interpreter and trust each other, which is what `marshal` needs.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from streamer import errors
from streamer.errors import BadAnswer, ClockSkew, ErrorContext, SourceError, Transient
from streamer.plan import ObjectRef, Part, Span
from streamer.s3.fallback import LeftToAiobotocore
from streamer.s3.ranges import RequestReport

PackedPart = tuple[str, str, int, str, str | None, int, int, bytes, bytes]
PackedError = tuple[Any, ...]
PackedReport = tuple[Any, ...]


def pack_part(part: Part) -> PackedPart:
    """Return what an engine needs to know of a part."""
    ref = part.object
    identity = ref.bucket, ref.key, ref.size, ref.etag, ref.version
    return (*identity, part.start, part.end, part.leading, part.trailing)


def unpack_parts(packed: list[PackedPart]) -> Part:
    """Return a part, or the span of several. The epoch is not sent; offsets count from the first byte."""
    parts: list[Part] = []
    offset = 0
    for bucket, key, size, etag, version, start, end, leading, trailing in packed:
        ref = ObjectRef(bucket, key, size, etag, version)
        parts.append(Part(0, ref, start, end, offset, leading, trailing))
        offset += len(parts[-1])
    return parts[0] if len(parts) == 1 else Span.of(parts)


def pack_error(error: SourceError) -> PackedError:
    """Return the error without its cause."""
    return (
        type(error).__name__,
        error.message,
        astuple(error.context),
        error.retry_after,
        error.code,
        getattr(error, "silent", getattr(error, "ahead", 0.0)),
    )


def unpack_error(packed: PackedError) -> SourceError:
    """Return the error. A class that `streamer.errors` does not have becomes BadAnswer."""
    name, message, context, retry_after, code, seconds = packed
    found = LeftToAiobotocore if name == LeftToAiobotocore.__name__ else getattr(errors, name, BadAnswer)
    error: SourceError = found(message, ErrorContext(*context))
    error.retry_after, error.code = retry_after, code
    if isinstance(error, Transient):
        error.silent = seconds
    elif isinstance(error, ClockSkew):
        error.ahead = seconds
    return error


def pack_report(report: RequestReport) -> PackedReport:
    """Return the fields of the report."""
    return (
        dict(report.requests), dict(report.retries), report.resumes, report.done, report.errors,
        report.throttled,
    )  # fmt: skip


def unpack_report(packed: PackedReport) -> RequestReport:
    """Return the report."""
    return RequestReport(*packed)
