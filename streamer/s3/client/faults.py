"""The boundary with botocore and aiohttp: their errors become ours, with the place and the fix.

`map_errors` wraps every foreign call. A code that botocore reports decides first, then the HTTP
status, then the exception's type. Any other exception means that a parser met a response for which it was not
made: `not_understood`, with that exception as the cause.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from streamer.errors import (
    BadAnswer,
    ClockSkew,
    ConfigError,
    Deleted,
    Denied,
    ErrorContext,
    Expired,
    Missing,
    ObjectMissing,
    PenstockError,
    SourceChanged,
    SourceError,
    Throttled,
    Transient,
    Truncated,
    WrongEndpoint,
)
from streamer.s3.client.redirects import REGION, escaped_id
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

_THROTTLE = {
    "SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
    "RequestThrottledException", "TooManyRequestsException", "TooManyRequests", "RequestLimitExceeded",
    "BandwidthLimitExceeded", "ServiceUnavailable",
}  # fmt: skip
_TRANSIENT = {
    "InternalError",
    "InternalFailure",
    "RequestTimeout",
    "RequestTimeoutException",
    "OperationAborted",
}
_EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
}
"""What renewed credentials may mend; a key that is unknown may have been rotated."""
_GONE = {"NoSuchKey", "NotFound", "404"}
ELSEWHERE = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
"""The bucket is in another region than the request was for."""
_CHANGED = {"PreconditionFailed", "InvalidRange", "NoSuchVersion"}

CODE = re.compile(rb"<Code>([^<]{1,200})</Code>")
MANY_REASONS = {400, 401, 403}
"""Statuses of which only the code tells what may pass: credentials that have expired, a wrong clock."""
_NOT_OFFERED = (501, 505)
"""Statuses of 500 and above that do not pass: not implemented, HTTP version not supported."""

_FIX = {
    "NoSuchBucket": "no such bucket",
    "NoSuchKey": "no such object",
    "AccessDenied": "access denied; the credentials need s3:ListBucket on the bucket and s3:GetObject in it",
    # HEAD has no body, so its status stands for the code.
    "404": "no such object",
    "403": "access denied, or no such object (without s3:ListBucket, S3 does not tell); the credentials need "
    "s3:GetObject and s3:ListBucket on the bucket",
    "InvalidAccessKeyId": "the access key id is unknown to this endpoint",
    "SignatureDoesNotMatch": "the signature is refused; check the secret key, the region and the endpoint",
    "ExpiredToken": "the session token has expired; renew the credentials",
    "InvalidToken": "the session token is refused; renew the credentials",
    "RequestTimeTooSkewed": "this machine's clock is off by too much; set the time",
    "PreconditionFailed": "the object was replaced after it was listed",
    "412": "the object was replaced after it was listed",
    "NotImplemented": "the endpoint does not offer what this request needs",
    "InvalidRange": "the object is shorter than when it was listed",
}
_REFUSED_SKEW = 900.0
"""Seconds that a signature may be off (RequestTimeTooSkewed); a refusal of HEAD does not say why."""
_EARLIEST, _LATEST = 2020, 2200
"""Years that an endpoint's clock may show; a Date outside them is none."""
_ABSENT = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
_MISCONFIGURED = (
    boto.ProfileNotFound,
    boto.NoRegionError,
    boto.ConfigParseError,
    boto.InvalidConfigError,
)
_BROKEN = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    aiohttp.ClientError,
    TimeoutError,
    OSError,
)


@contextlib.contextmanager
def map_errors(context: ErrorContext) -> Iterator[None]:
    """Let no foreign exception pass: raise the SourceError (or ConfigError) that it means instead."""
    try:
        yield
    except SourceError as error:
        if error.context.bucket is None:  # raised within aiobotocore, which does not say for what
            error.context = replace(context, request_id=error.context.request_id)
        raise
    except PenstockError:
        raise
    except Exception as error:
        raise mapped(error, context) from error


@contextlib.contextmanager
def of_listed() -> Iterator[None]:
    """Around a request for an object that was listed: if it is not there, it was deleted since then."""
    try:
        yield
    except ObjectMissing as error:
        raise deleted(error) from error


def deleted(error: ObjectMissing) -> Deleted:
    """What it means that a listed object is not there."""
    return Deleted(f"the object was deleted after it was listed: {error.message}", error.context)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of our errors in what a TaskGroup raised; the group itself if it is about something else."""
    for error in errors.exceptions:
        found = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, PenstockError):
            return found
    return errors


def mapped(error: BaseException, context: ErrorContext) -> PenstockError:
    """Our error for a foreign one that was met at `context`."""
    if isinstance(error, boto.ClientError):
        return _from_client_error(error, context)
    said = quoted(error_text(error))
    if isinstance(error, _ABSENT):
        return Denied(
            f"no usable credentials ({said}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, "
            "or Penstock.Endpoint.Anonymous: true",
            context,
        )
    if isinstance(error, boto.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in said:
            return BadAnswer(untrusted(said), context)
        return BadAnswer(
            f"TLS failed ({said}); does the server speak TLS at this port? If not, write http:// in "
            "Penstock.Endpoint.Url",
            context,
        )
    if isinstance(error, RefusalCutOff):
        return cut_off(error.kwargs["status"], context)
    if isinstance(error, (aiohttp.ClientPayloadError, boto.IncompleteReadError)):
        return Truncated("the body broke off", context)
    if isinstance(error, boto.EndpointConnectionError):
        return Transient(f"{said}; is the endpoint up, and Penstock.Endpoint.Url right?", context)
    if isinstance(error, _BROKEN):
        return Transient(f"the connection failed ({type(error).__name__}: {said})", context)
    if isinstance(error, ResponseParserError):
        return BadAnswer(f"the answer cannot be understood ({said})", context)
    if isinstance(error, boto.PaginationError):
        return BadAnswer(f"the listing does not advance ({said})", context)
    if isinstance(error, boto.ParamValidationError):
        return ConfigError(f"{said}; correct the S3 URI {context}")
    if isinstance(error, _MISCONFIGURED):
        return ConfigError(f"{said}; see Penstock.Endpoint")
    if isinstance(error, boto.BotoCoreError):
        return BadAnswer(f"{type(error).__name__}: {said}", context)
    return not_understood(error, context)


def not_understood(error: BaseException, context: ErrorContext) -> BadAnswer:
    """Our error for an exception that a response caused and no code of ours or botocore's expects."""
    return BadAnswer(
        f"the response cannot be understood ({type(error).__name__}: {quoted(str(error))})", context
    )


class RefusalCutOff(boto.HTTPClientError):  # type: ignore[misc]
    """One of `MANY_REASONS` whose body broke off before its code, as botocore's own retries understand it."""

    fmt = "answered {status}, and the reason was cut off"


def broken(error: OSError, context: ErrorContext) -> Transient:
    """The error for a connection that the kernel or OpenSSL says has broken."""
    return Transient(f"the connection broke ({error.strerror or error})", context)


def cut_off(status: int, context: ErrorContext) -> Truncated:
    """The error for one of `MANY_REASONS` whose body broke off before its code."""
    return Truncated(f"answered {status}, and the reason was cut off", context)


def untrusted(said: str) -> str:
    """The error about a certificate that is not trusted."""
    return (
        f"TLS failed ({said}); Penstock.Endpoint.CaBundle must hold the certificate of the server's "
        "authority if that is a private one, and Penstock.Endpoint.Url a name that the certificate has"
    )


def answered_code(error: PenstockError) -> str:
    """The code of the S3 answer that the error was made from; empty if there was none."""
    cause = error.__cause__
    return str(cause.response.get("Error", {}).get("Code", "")) if isinstance(cause, boto.ClientError) else ""


def error_text(error: BaseException) -> str:
    """The error's text, less what a credential_process wrote: nobody knows which word of that is secret."""
    if isinstance(error, boto.CredentialRetrievalError) and error.kwargs.get("provider") == "custom-process":
        return "the credential_process failed; run it by hand to see why"
    return str(error)


def _from_client_error(error: Any, context: ErrorContext) -> SourceError:
    """Our error for an answer that botocore has parsed."""
    answer = error.response
    metadata = answer.get("ResponseMetadata", {})
    said = answer.get("Error", {})
    region = metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region") or said.get("Region")
    return from_answer(
        status=int(metadata.get("HTTPStatusCode", 0)),
        code=str(said.get("Code", "")),
        message=said.get("Message") or "",
        request_id=metadata.get("RequestId"),
        retry_after=metadata.get("HTTPHeaders", {}).get("retry-after"),
        date=metadata.get("HTTPHeaders", {}).get("date"),
        region=region,
        context=context,
    )


def from_answer(
    *,
    status: int,
    code: str,
    message: str,
    request_id: str | None,
    retry_after: str | None,
    date: str | None,
    region: str | None = None,
    context: ErrorContext,
) -> SourceError:
    """Our error for an answer of S3's that is none of what was asked for.

    `date`: its header of that name. `region`: that of the bucket, if the answer names it.
    """
    place = ErrorContext(context.bucket, context.key, context.offset, context.attempt, escaped_id(request_id))
    text = f"{_FIX.get(code) or quoted(message or code)} (S3 said {_status(status, code)})"
    if code in _THROTTLE or status in (429, 503):
        return Throttled(text, place, retry_after=_seconds(retry_after))
    if code == "NotImplemented" or status in _NOT_OFFERED:
        return BadAnswer(text, place)
    if code in _TRANSIENT or status >= 500:
        return Transient(text, place, retry_after=_seconds(retry_after))
    if code in ELSEWHERE or 300 <= status < 400:
        return WrongEndpoint(f"{_elsewhere(region)} (S3 said {_status(status, code)})", place)
    if code in _CHANGED or status in (412, 416):
        return SourceChanged(text, place)
    if code in _EXPIRED:
        return Expired(text, place)
    ahead = clock_ahead(date) or 0.0
    if code == "RequestTimeTooSkewed" or (code == "403" and abs(ahead) > _REFUSED_SKEW):
        off = f"it is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the endpoint's"
        text = f"{_FIX['RequestTimeTooSkewed']}; {off} (S3 said {_status(status, code)})"
        return ClockSkew(text, place, ahead=ahead)
    if code in _GONE or (status == 404 and code != "NoSuchBucket"):
        return ObjectMissing(text, place) if place.key else Missing(text, place)
    if status == 404:
        return Missing(text, place)
    if status in (401, 403) or code in _FIX:
        return Denied(text, place)
    return BadAnswer(text, place)


def _status(status: int, code: str) -> str:
    """Both, or one: the status stands for the code where the answer has none."""
    return str(status) if code in ("", str(status)) else f"{status} {quoted(code)}"


def _elsewhere(region: str | None) -> str:
    """What to do about a bucket that is in another region."""
    if region is None or not REGION.fullmatch(region):
        return "the bucket is in another region; set Penstock.Endpoint.Region to it"
    return (
        f"the bucket is in region {region}; set Penstock.Endpoint.Region: {region}, and, if it is set, "
        "Penstock.Endpoint.Url to an endpoint of that region"
    )


def clock_ahead(date: str | None) -> float | None:
    """Seconds by which our clock is ahead of a response's Date; None for no Date, or none that can be."""
    try:
        found = parsedate_to_datetime(date or "")
        return time.time() - found.timestamp() if _EARLIEST <= found.year < _LATEST else None
    except (ValueError, OverflowError, TypeError):
        return None


def _seconds(header: str | None) -> float | None:
    """A Retry-After in its number form; a date is as good as none here."""
    try:
        found = float(header) if header else None
    except ValueError:
        return None
    return found if found is not None and 0 <= found < math.inf else None
