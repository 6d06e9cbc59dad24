"""The one small tree of errors that leaves this library.

Foreign exceptions (botocore, aiohttp, OSError) are mapped into it at the boundary that met them and
travel as `__cause__`. The three endings of a stream have three names: `ReaderGone` (the peer closed),
`TruncatedStream` (it broke), and a normal return (it is complete). A `SourceError` says which bytes
of which object failed, on which attempt, under which S3 request id, and whether asking again can help.
"""

from __future__ import annotations

from dataclasses import dataclass


class PenstockError(Exception):
    """Base of every error this project raises on purpose; its text is fit to be shown to a user."""


class ConfigError(PenstockError):
    """The request cannot be carried out as written. The text says what to change."""


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """The place in the source that an error speaks of; every field may be unknown."""

    bucket: str | None = None
    key: str | None = None
    offset: int | None = None
    """Byte offset in the object: where the request began, or where the object is found damaged."""
    attempt: int | None = None
    """1 for the first try of this part."""
    request_id: str | None = None
    """The `x-amz-request-id` of the answer; S3 support asks for it."""

    def __str__(self) -> str:
        place = "" if self.bucket is None else f"s3://{self.bucket}/{self.key or ''}"
        facts = [
            f"{name} {value}"
            for name, value in (
                ("offset", self.offset),
                ("attempt", self.attempt),
                ("request id", self.request_id),
            )
            if value is not None
        ]
        return " ".join(part for part in (place, f"({', '.join(facts)})" if facts else "") if part)


class SourceError(PenstockError):
    """S3 did not give what was asked for."""

    retryable = False
    """Whether the same request may succeed later."""
    kind = "source"
    """Bounded label for metrics."""

    def __init__(
        self, message: str, context: ErrorContext | None = None, *, retry_after: float | None = None
    ) -> None:
        self.message = message
        self.context = context or ErrorContext()
        self.retry_after = retry_after
        """Seconds that the server asked us to wait, if it did."""
        super().__init__(message)

    def __str__(self) -> str:
        place = str(self.context)
        return f"{self.message}: {place}" if place else self.message


class Denied(SourceError):
    """Credentials are absent, wrong or insufficient."""

    kind = "denied"


class Expired(Denied):
    """Credentials that were good once are refused or cannot be renewed; new ones may come."""

    retryable = True
    kind = "expired"


class ClockSkew(Denied):
    """S3 refuses signatures because this machine's clock is off; it may be set."""

    retryable = True
    kind = "skewed"

    def __init__(self, message: str, context: ErrorContext | None = None, *, ahead: float = 0.0) -> None:
        super().__init__(message, context)
        self.ahead = ahead
        """Seconds by which this machine's clock is ahead of the endpoint's; 0 if that told no time."""


class Missing(SourceError):
    """No such bucket, no such object, or a prefix that matches nothing."""

    kind = "missing"


class ObjectMissing(Missing):
    """The object itself is not there, in a bucket that is."""


class SourceChanged(SourceError):
    """The object is no longer the one that was listed. Never retried: that would mix two versions."""

    kind = "changed"


class Deleted(SourceChanged):
    """The object was deleted after it was listed."""


class BadAnswer(SourceError):
    """The endpoint answered something that the S3 protocol does not allow here."""

    kind = "bad_answer"


class WrongEndpoint(BadAnswer):
    """The bucket is in another region, or at another address, than the job file names."""


class Transient(SourceError):
    """A connection broke, timed out, or the server had an internal error."""

    retryable = True
    kind = "transient"

    def __init__(
        self,
        message: str,
        context: ErrorContext | None = None,
        *,
        retry_after: float | None = None,
        silent: float = 0.0,
    ) -> None:
        super().__init__(message, context, retry_after=retry_after)
        self.silent = silent
        """Seconds without a byte of the body that went before the error."""


class Throttled(Transient):
    """The endpoint asked for fewer requests (503 SlowDown and its kin)."""

    kind = "throttled"


class Truncated(Transient):
    """The body ended before the length that its head promised."""

    kind = "truncated"


class CorruptObject(SourceError):
    """A compressed object that cannot be inflated: damaged, cut off, or not compressed at all.

    The offset is where in the object it was noticed. Never retried: the bytes are those of its ETag.
    """

    kind = "corrupt"


class Mismatch(SourceError):
    """The bytes of a whole object have another checksum than S3 keeps of it. They are delivered already."""

    kind = "mismatch"


class GaveUp(SourceError):
    """A retryable error lasted longer than the allowed time without a single byte of progress."""

    kind = "gave_up"


class SinkError(PenstockError):
    """The FIFO side failed: the directory, a FIFO or the process's limits."""

    kind = "local"
    """Bounded label for metrics."""


class Shortage(SinkError):
    """A refusal by this machine that concerns one channel and may pass: it is waited for.

    Space, descriptors, threads or memory are lacking, a directory cannot be written, a disk fails.
    """


class KeeperLost(SinkError):
    """The keeper has died, and with it every FIFO that it held: nothing is left to go on with."""


class ReaderGone(SinkError):
    """The reader closed its end before the epoch's last byte. Legal: it ends the epoch (contract §1.3)."""


class StreamError(PenstockError):
    """What a reader got is not a proven whole epoch, or not records of the format."""


class TruncatedStream(StreamError):
    """The stream ended before the epoch did; the text says how many bytes of how many arrived, and why."""


class CutRecord(TruncatedStream):
    """The stream ended inside a record, though all of it arrived: an object ends inside a record."""


class CorruptRecord(StreamError):
    """The bytes are not a record of the declared format; the text gives the offset in the stream."""


class ChannelError(PenstockError):
    """The channel does not exist, is not a Pipe channel, or its FIFO did not appear in time."""
