"""The interface between transports and relay: open a body, then pull its bytes.

    relay      decides when each part is fetched and where its bytes wait
    transport  `RangeSource.open`: sends GETs, checks a response header, returns the `Body` of the part's rest
    stage      pulls: `splice_into` a pipe, or `read_into` memory; registers a callback for further bytes
    failure    the transport raises SourceError; the relay opens another body from the next missing byte

The task that opened a body owns it: the task waits in `taken` while the stage uses the body, and then closes
it once. Bytes that the stage does not take stay in the socket, and TCP's flow control slows the server.

Waiting uses a callback and no task: on uvloop a callback takes 0.6 µs and a woken task 1.9 to 2.5 µs, and the
stage waits about ten times for a body of 8 MiB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from streamer.errors import BadAnswer, ErrorContext, SourceChanged, SourceError
from streamer.plan.validators import bare_etag, described, is_modified, modified
from streamer.secrets import quoted
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.plan import ObjectRef, Part

Phase = Literal["credentials", "connect", "first_byte", "body", "throttled", "retry"]
PHASES: tuple[Phase, ...] = ("credentials", "connect", "first_byte", "body", "throttled", "retry")
"""Phases of a request for a part. throttled, retry: the waits before a retry, after SlowDown and after any
other failure."""


NO_HEADER: Mapping[str, str] = {}


Outcome = SourceError | Literal["ok", "cancelled"]
"""How a GET has ended."""
OnRequestEnded = Callable[[Outcome, int, float, float, Mapping[str, str]], None]
"""Called when a GET has ended with: outcome; bytes of the range, if all were taken, else 0; seconds to the
response header; seconds to the end of the body; fields of the response header by lower-case name, if any."""
OnWhole = Callable[["ObjectRef", Mapping[str, str]], None]
"""Called with an object and the fields of a response header by lower-case name."""


def ignore(*_: object) -> None:
    """Ignore what a request reports."""


@dataclass(slots=True)
class RangeRequest:
    """Request for the bytes of a part from byte `first` on: one GET for each range, as many as needed."""

    part: Part
    first: int = 0
    """Offset in the part of the first byte."""
    attempt: int = 1
    """Number of the attempt, from 1, which errors name. A later one begins with one GET at a time."""
    avoid: str | None = None
    """An address not to send the request to, if the endpoint has another."""
    on_phase: Callable[[Phase], None] = ignore
    """Called when the request enters a phase. Some transports report no phase and stay at `first_byte`."""
    peer: str | None = None
    """Address that the first GET was sent to; None if the transport does not set it."""
    requests: int = 1
    """GETs that may be in flight at once."""
    on_request_ended: OnRequestEnded = ignore
    """Called when a GET has ended; at the latest by `Body.close`, or before `open` fails."""
    on_whole: OnWhole | None = None
    """Called with the response header of the GET of a whole object, which then asks for its checksum."""
    on_spare: Callable[[int], None] = ignore
    """Called with a number of `requests` that are not needed any more."""

    @property
    def context(self) -> ErrorContext:
        ref, offset = self.part.at(self.first)
        return ErrorContext(ref.bucket, ref.key, offset, self.attempt)


class Body(Protocol):
    """The rest of a part, in order. Closed once, by the task that opened it."""

    @property
    def left(self) -> int:
        """Number of bytes that the stage has not taken."""

    @property
    def spliceable(self) -> bool:
        """Whether `splice_into` is supported; otherwise the bytes must be read."""

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        """Move 1 to `most` bytes into a pipe without reading them; return the number.

        The last bytes that have arrived stay, unless the whole body has (`streamer.s3.client.doubt`); with
        `revocable` none stays, and BlockingIOError may mean that none has arrived. Raises NothingArrived if
        there are no others, BlockingIOError if the pipe is full, BrokenPipeError if the pipe has no reader,
        SourceError if no further byte will come. A revocable call may move bytes before it raises that.
        """

    def read_into(self, memory: memoryview) -> int:
        """Read all bytes that have arrived, at most `len(memory)`; return the number, at least 1.

        Raises BlockingIOError if no byte has arrived, SourceError if no further byte will come.
        """

    def probe(self) -> None:
        """Raise the error that `read_into` would raise now; take no byte."""

    def doubted(self) -> tuple[int, bytes]:
        """Return how many bytes were taken of a response that is not whole, and bytes that follow them.

        The latter had stayed in the socket of a body that has failed.
        """

    def notify(self, call: Callable[[], None]) -> None:
        """Call `call` once when the stage should take bytes, or when the body has failed.

        That is when enough bytes for a large move have arrived, or fewer have waited long. A body that stalls
        before that fails: `call` is called, and the next move raises. A further `notify` or `park` replaces
        this one. `call` must not raise.
        """

    def park(self, call: Callable[[], None]) -> None:
        """Call `call` once when the transport can hold no more bytes or the body has failed (`notify`)."""

    def hush(self) -> None:
        """Cancel the last `notify` or `park`. After that the body cannot stall."""

    async def taken(self) -> None:
        """Wait until every byte has been taken. Raises SourceError if no further byte will come."""

    def close(self) -> None:
        """Return the connection to its pool, or close it if bytes are left. No callback follows."""


class RangeSource(Protocol):
    """A transport, which opens the bodies of several parts at once."""

    @property
    def together(self) -> int:
        """Bytes of small ranges that a part should have together; 0: each range has a part of its own."""

    async def open(self, request: RangeRequest) -> Body:
        """Send the first GETs, and check the header of the first response.

        Raises SourceError. Cancellation closes the connection in use.
        """


_NOT_BY_IF_MATCH = {"InvalidRange", "NoSuchVersion", "InvalidObjectState", "InvalidBucketName", "416"}
"""Codes of error responses whose cause is not If-Match."""
_OMISSION = "if `penstock doctor` finds that the server refuses If-Match, set Penstock.Endpoint.IfMatch: omit"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")


def check_header(
    ref: ObjectRef,
    first: int,
    end: int,
    context: ErrorContext,
    *,
    status: int,
    content_length: int | None,
    fields: Mapping[str, str],
) -> None:
    """Check that a response is bytes `first` to `end` of the version that `ref` names.

    The status must be 206 (RFC 9110 §15.3.7), or 200 with a right Content-Range, which some compatible
    servers send. The response must prove its version by its ETag or by the requested version id, because a
    server may ignore If-Match and `versionId`; or by its Last-Modified, if the object was listed without an
    ETag (`streamer.plan.validators`). `fields`: by lower-case name. Raises SourceChanged if version or size
    differ, BadAnswer if the response does not state them, or if its range or length differs from the
    request's; both name a compression or inflation that may be the cause.
    """
    try:
        _check_header(ref, first, end, context, status=status, content_length=content_length, fields=fields)
    except (BadAnswer, SourceChanged) as error:
        error.message += transformation(fields, content_length)
        raise


def transformation(fields: Mapping[str, str], content_length: int | None) -> str:
    """Return the signs that a response was compressed or inflated on its way, and the remedy, as text.

    Empty without a sign. An object that is stored with a Content-Encoding has one sign too, so only a
    response that contradicts its request may be explained by it.
    """
    encoding = content_encoding(fields)
    signs = [f"its Content-Encoding is {quoted(encoding)!r}"] if encoding else []
    if fields.get("etag", "").startswith("W/"):
        signs.append("its ETag is weak")
    if content_length is None:
        signs.append("it has no Content-Length")
    if not signs:
        return ""
    return (
        f"; the response may have been compressed or inflated on its way ({', '.join(signs)}): turn that "
        "off in the store, CDN or proxy, or set Penstock.Endpoint.Url to an endpoint that sends objects as "
        "they are stored"
    )


def content_encoding(fields: Mapping[str, str]) -> str:
    """Return the encoding of a response's bytes; empty if they are as they were uploaded.

    Some servers keep the `aws-chunked` of an upload.
    """
    names = [name.strip().lower() for name in fields.get("content-encoding", "").split(",")]
    return ", ".join(name for name in names if name not in ("", "identity", "aws-chunked"))


def _check_header(
    ref: ObjectRef,
    first: int,
    end: int,
    context: ErrorContext,
    *,
    status: int,
    content_length: int | None,
    fields: Mapping[str, str],
) -> None:
    if status not in (200, 206):
        raise BadAnswer(f"the response to a ranged GET has status {status}", context)
    version = fields.get("x-amz-version-id")
    check_version(ref.version, version, context)
    _check_validator(ref, context, fields, proven=ref.version is not None and version is not None)
    content_range = fields.get("content-range")
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:
        whole = status == 200 and first == 0 and end == ref.size
        if not (whole and content_length == ref.size):
            raise BadAnswer(
                f"the response to a ranged GET has status {status} and Content-Range "
                f"{quoted(str(content_range))!r}",
                context,
            )
        return
    begin, last, size = map(int, match.groups())
    if size != ref.size:
        same = "" if is_modified(ref.etag) else ", with the same ETag"
        raise SourceChanged(
            f"the object has {counted(size, 'byte')} now; {ref.size} were listed{same}", context
        )
    if (begin, last + 1) != (first, end):
        raise BadAnswer(
            f"the response has bytes {begin}-{last}, not the requested {first}-{end - 1}", context
        )
    if content_length is not None and content_length != end - first:
        raise BadAnswer(
            f"the response has Content-Length {content_length} for a range of {counted(end - first, 'byte')}",
            context,
        )
    if content_length is None and fields.get("etag", "").startswith("W/"):
        # S3's ETags are strong; what compresses or inflates makes them weak. Its bytes would be taken.
        raise BadAnswer("the response has other bytes than the stored ones", context)


def _check_validator(
    ref: ObjectRef, context: ErrorContext, fields: Mapping[str, str], *, proven: bool
) -> None:
    """Check that a response has the validator with which its object was listed.

    `proven`: a version id proves its version too, so it may have no validator. Raises SourceChanged,
    BadAnswer.
    """
    by_time = is_modified(ref.etag)
    name = "Last-Modified" if by_time else "ETag"
    sent = fields.get(name.lower())
    found = modified(sent) if by_time else bare_etag(sent or "")
    if not found:
        if not proven:
            stated = f"the invalid {name} {quoted(sent)!r}" if sent else f"no {name}"
            raise BadAnswer(f"the response has {stated}, so its bytes may be of another version", context)
    elif found != ref.etag:
        if not by_time and found.startswith(ref.etag):  # Apache and Jetty append -gzip, --gzip, ;br
            raise BadAnswer(
                f"the response has the ETag {quoted(found)} of a compressed or inflated form of the object "
                f"{ref.etag}; turn compression off in the store, CDN or proxy",
                context,
            )
        raise SourceChanged(
            f"the object was replaced after it was listed ({described(ref.etag)} then, "
            f"{quoted(str(sent))} now)",
            context,
        )


def suggest_omission(error: SourceError) -> None:
    """Name Endpoint.IfMatch in the error of a GET with If-Match, if a refusal of that may be its cause.

    Some servers answer 501 or 400 to the header, or 412 although the ETag is right.
    """
    refused = type(error) is BadAnswer or isinstance(error, SourceChanged)
    if refused and error.code and error.code not in _NOT_BY_IF_MATCH:
        error.message += f"; {_OMISSION}"


def check_version(requested: str | None, version: str | None, context: ErrorContext) -> None:
    """Raise BadAnswer for a response of another version than `requested`.

    `version`: the response's `x-amz-version-id`. S3 names the version in each response to a request with
    `versionId`; a bucket that never had versions may leave out `null`.
    """
    if requested is None or version == requested or (version is None and requested == "null"):
        return
    description = "states no version" if version is None else f"is of version {quoted(version)}"
    raise BadAnswer(
        f"the response {description}, and version {requested} was requested; the server ignores versionId",
        context,
    )
