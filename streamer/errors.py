"""All exceptions that this library raises on purpose.

Foreign exceptions (botocore, aiohttp, OSError) are mapped to these where they occur, and kept as
`__cause__`. A stream ends in one of three ways: `ReaderGone` (the reader closed it), `TruncatedStream` (it
broke), or a normal return (it is complete). A `SourceError` gives the object, offset, attempt and S3 request
id of the failure, and whether a retry can help.
"""

from __future__ import annotations

from dataclasses import dataclass


class PenstockError(Exception):
    """Base of every error that this project raises on purpose; its text is written for users."""


class ConfigError(PenstockError):
    """The job cannot be carried out as written. The text says what to change."""


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """Object and request of an error; any field may be unknown."""

    bucket: str | None = None
    key: str | None = None
    offset: int | None = None
    """Byte offset in the object: first byte of the request, or of the damage."""
    attempt: int | None = None
    """Number of the attempt at this part, from 1."""
    request_id: str | None = None
    """`x-amz-request-id` of the response, which S3 support needs."""

    def __str__(self) -> str:
        uri = "" if self.bucket is None else f"s3://{self.bucket}/{self.key or ''}"
        facts = [
            f"{name} {value}"
            for name, value in (
                ("offset", self.offset),
                ("attempt", self.attempt),
                ("request id", self.request_id),
            )
            if value is not None
        ]
        return " ".join(part for part in (uri, f"({', '.join(facts)})" if facts else "") if part)


class SourceError(PenstockError):
    """S3 did not return the requested bytes or listing."""

    retryable = False
    """Whether the same request may succeed later."""
    kind = "source"
    """Label in metrics."""
    awaited = "storage"
    """What is waited for while the request is retried."""

    def __init__(
        self, message: str, context: ErrorContext | None = None, *, retry_after: float | None = None
    ) -> None:
        self.message = message
        self.context = context or ErrorContext()
        self.retry_after = retry_after
        """Seconds in the response's Retry-After; None if the response has none."""
        self.code = ""
        """S3's code of the error response, such as `NoSuchBucket`; empty if there is none."""
        super().__init__(message)

    def __str__(self) -> str:
        context = str(self.context)
        return f"{self.message}: {context}" if context else self.message


class Denied(SourceError):
    """Credentials are absent, wrong or insufficient."""

    kind = "denied"


class Expired(Denied):
    """Credentials that were valid are refused, or their source has none now; it may have some later."""

    retryable = True
    kind = "expired"
    awaited = "credentials"


class ClockSkew(Denied):
    """S3 refuses signatures because this machine's clock is wrong; retried, as the clock may be corrected."""

    retryable = True
    kind = "skewed"

    def __init__(self, message: str, context: ErrorContext | None = None, *, ahead: float = 0.0) -> None:
        super().__init__(message, context)
        self.ahead = ahead
        """Seconds by which this machine's clock is ahead of the endpoint's; 0 if the response has no Date."""


class Missing(SourceError):
    """No such bucket, no such object, or a prefix that matches nothing."""

    kind = "missing"


class ObjectMissing(Missing):
    """The bucket exists, but not the object."""


class SourceChanged(SourceError):
    """The object was replaced or deleted after it was listed. Never retried: that would mix two versions."""

    kind = "changed"


class Deleted(SourceChanged):
    """The object was deleted after it was listed."""


class BadAnswer(SourceError):
    """The endpoint sent a response that the S3 protocol does not allow here."""

    kind = "bad_answer"


class InvalidResponse(BadAnswer):
    """A response that cannot be parsed or contradicts itself; it may have been damaged on its way."""


class ForeignAnswer(InvalidResponse):
    """An error of something in front of S3: a proxy, a firewall, a load balancer."""

    kind = "barred"


class WrongEndpoint(BadAnswer):
    """The bucket is in another region, or at another address, than the job file names."""


class OutOfOrder(BadAnswer):
    """A listing that is not in the byte order of keys, as S3's directory buckets and some servers send it."""


class PlanRefused(SourceError):
    """A listing names more objects than fit, or one that the job's settings refuse, while the epoch streams.

    Before the epoch begins this is a ConfigError.
    """

    kind = "refused"


class Transient(SourceError):
    """A connection broke or timed out, or the server had an internal error."""

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
        """Seconds without a byte of the body before the error."""


class Barred(SourceError):
    """TLS or a proxy lets no request through, and has let none through in this run."""

    kind = "barred"


class BarredNow(Transient):
    """What is in front of S3 (TLS, a proxy) lets no request through, though it has before; retried."""

    kind = "barred"


class Throttled(Transient):
    """The endpoint wants fewer requests (503 SlowDown and similar)."""

    kind = "throttled"


class Truncated(Transient):
    """The body was shorter than its response header stated."""

    kind = "truncated"


class CorruptObject(SourceError):
    """A compressed object that cannot be inflated: damaged, cut off, or not compressed at all.

    The context's offset is the first damaged byte. Never retried: the bytes match the object's ETag.
    """

    kind = "corrupt"


class Mismatch(SourceError):
    """A delivered object's checksum differs from the one that S3 stores."""

    kind = "mismatch"


class GaveUp(SourceError):
    """A retryable error lasted longer than `GiveUpAfter` without a byte of progress."""

    kind = "gave_up"


class SinkError(PenstockError):
    """The FIFO side failed: the directory, a FIFO, or a limit of the process."""

    kind = "local"
    """Label in metrics."""


class Shortage(SinkError):
    """A failure of this machine that affects one channel and may pass; the channel retries.

    Space, descriptors, threads or memory are exhausted, a directory cannot be written, or a disk fails.
    """


class KeeperLost(SinkError):
    """The keeper has died, and every FIFO that it held has ended. Nothing can be resumed."""


class ReaderGone(SinkError):
    """The reader closed its end before the epoch's last byte, which ends the epoch (contract §1.3)."""


class StreamError(PenstockError):
    """A reader received less than a proven whole epoch, or bytes that are not records of the format."""


class TruncatedStream(StreamError):
    """The stream ended before the epoch; the text gives bytes received, bytes expected, and the reason."""


class CutRecord(TruncatedStream):
    """A complete stream ended inside a record, because an object ends inside a record."""


class CorruptRecord(StreamError):
    """The bytes are not a record of the declared format; the text gives the offset in the stream."""


class RecordTooLarge(StreamError):
    """A record is larger than its reader may hold; the text gives both sizes."""


class ChannelError(PenstockError):
    """The channel does not exist, is not a Pipe channel, or its FIFO did not appear in time."""
