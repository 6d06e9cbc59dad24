"""Maps errors of botocore and aiohttp to `streamer.errors`, with their context and the fix.

`map_errors` wraps every foreign call. The error code that botocore reports decides first, then the HTTP
status, then the exception's class. For any other exception a parser could not read the response:
`not_understood` returns the error, with the exception as its cause.

Our own client uses this module too, so `mapped` alone imports botocore and aiohttp, which takes 0.3 s.
"""

from __future__ import annotations

import contextlib
import http
import re
import time
from dataclasses import replace
from html import unescape
from ssl import SSLError
from typing import TYPE_CHECKING, Any

from streamer.errors import (
    BadAnswer,
    ClockSkew,
    ConfigError,
    Deleted,
    Denied,
    ErrorContext,
    Expired,
    ForeignAnswer,
    InvalidResponse,
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
from streamer.s3.client.barriers import tls_failed
from streamer.s3.client.versions import moved_botocore
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REGION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
"""A region's name: one label of a host name, because AWS's endpoint rules put it into one."""
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
    "BadDigest",  # of a body that changed on its way
}
EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
}
"""Codes after which new credentials may help; InvalidAccessKeyId may mean that the key was rotated."""
_GONE = {"NoSuchKey", "NotFound", "404"}
OTHER_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
"""Codes for a bucket that is not in the region of the request."""
_CHANGED = {"PreconditionFailed", "InvalidRange", "NoSuchVersion"}

IS_HTML = re.compile(rb"\s*<(?:!doctype )?html\b", re.IGNORECASE).match
"""Matches the start of a page of HTML, which S3 never sends by itself."""
_ERROR_DOCUMENT = re.compile(rb"\s*(?:(?:<\?xml[^>]*>\s*)?<Error[\s>]|(?i:<(?:!doctype )?html\b))").match
"""Matches the start of an error's document, which some servers send with the status 200, and of HTML."""
CODE = re.compile(rb"<Code>([^<]{1,200})</Code>")
MANY_REASONS = {400, 401, 403}
"""Statuses whose error code decides whether a retry may help: expired credentials, a wrong clock."""
_ASK_AGAIN = (408, 425)
"""Statuses of 400 and above that ask for the request again: a proxy's time-out of an idle connection, or of a
request that it did not see in time; TLS early data that was refused."""
_NOT_OFFERED = (501, 505)
"""Statuses of 500 and above that are not retried: not implemented, HTTP version not supported."""

KEY_PROBLEMS = (
    "KMS.DisabledException",
    "KMS.InvalidStateException",
    "KMS.KMSInvalidStateException",
    "KMS.NotFoundException",
)
"""Codes for an object whose SSE-KMS key cannot be used by anybody."""
ENCRYPTED = (
    "set Penstock.Endpoint.SseCustomerKeyFile for objects that are encrypted with a customer's key (SSE-C), "
    "and for no others"
)
EXPLANATIONS = {
    "NoSuchBucket": "no such bucket; check S3Uri; on an S3-compatible server try Endpoint.PathStyle: true",
    "NoSuchKey": "no such object",
    "AccessDenied": "access denied; the credentials need s3:ListBucket on the bucket and s3:GetObject in it",
    # HEAD has no body, so its status stands for the code.
    "400": f"refused without a reason, as any HEAD; check the region; {ENCRYPTED}",
    "404": "no such object",
    "401": "not authorized, which S3 itself never says; check the keys and the gateway in front of S3",
    "403": "access denied, or no such object (S3 tells them apart only with s3:ListBucket); the credentials "
    "need s3:GetObject and s3:ListBucket on the bucket",
    "InvalidAccessKeyId": "the access key id is unknown to this endpoint; correct it, the profile or the "
    "endpoint; temporary keys need AWS_SESSION_TOKEN",
    "SignatureDoesNotMatch": "the signature is refused; check the secret key, the region and the endpoint",
    "InvalidObjectState": "the object is in an archive class; restore it, or store it in another class",
    "AccountProblem": "the AWS account has a problem; it may be suspended, or a bill may be unpaid",
    "AllAccessDisabled": "AWS has disabled all access to the bucket; ask the owner of its account",
    **dict.fromkeys(
        KEY_PROBLEMS,
        "S3 cannot use the KMS key of the object; enable the key, or cancel its deletion",
    ),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException"), "the session token has expired; renew the credentials"
    ),
    "InvalidToken": "the session token is refused; set AWS_SESSION_TOKEN to that of the keys, or renew them",
    "RequestTimeTooSkewed": "this machine's clock is off by too much; set the time",
    "PreconditionFailed": "the object was replaced after it was listed",
    "412": "the object was replaced after it was listed",
    "NotImplemented": "the endpoint does not support this request",
    "InvalidRange": "the object is shorter than when it was listed",
    "416": "the object is shorter than when it was listed",
}
"""By code, what it means and what to do, which follow S3's own message."""
IN_HOST_NAME = (
    "path-style requests are not supported there; set Penstock.Endpoint.PathStyle: false, which puts the "
    "bucket into the host name"
)
"""Remedy at a server that refuses the bucket in the path."""
NAMES_POLICY = "change the policy that the message names"
"""Remedy for a denial whose message has the action, the resource and the kind of policy."""
FIXES = (ENCRYPTED, IN_HOST_NAME, NAMES_POLICY)
"""Remedies of errors that have several causes: the error's text has the right one."""
_BY_MESSAGE = (
    (re.compile(r"virtual.?host|path.?style", re.IGNORECASE), IN_HOST_NAME),
    (re.compile(r"not authorized to perform"), NAMES_POLICY),
)
"""Remedies by a server's message, the first that fits."""
_ABOUT_ENCRYPTION = re.compile(r"encrypt|customer.{1,9}key", re.IGNORECASE)
NOT_BY_CREDENTIALS = frozenset({"InvalidObjectState", "AccountProblem", "AllAccessDisabled", *KEY_PROBLEMS})
"""Codes of denials that other credentials or another policy would get too."""
_STATUSES = frozenset(http.HTTPStatus)
_MESSAGE = re.compile(rb"<Message>([^<]{1,500})")
_OF_AN_OBJECT = {"etag", "last-modified", "content-range", "x-amz-version-id"}
ERROR_BYTES = 64 * 1024
"""Bytes of a body that is read as an error's; S3's errors have less than 1 KiB."""
_TITLE = re.compile(rb"<title[^>]{0,99}>([^<]{1,200})", re.IGNORECASE)
_TAG = re.compile(rb"<(?:style|script).*?</|<[^>]*>?", re.DOTALL | re.IGNORECASE)
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_REFUSED_SKEW = 900.0
"""Most seconds by which a signature's time may differ from S3's (RequestTimeTooSkewed). A 403 to HEAD has no
code, so a larger difference counts as its reason."""
_EARLIEST, _LATEST = 2020, 2200
"""Years of a plausible Date header; a Date outside them is ignored."""


@contextlib.contextmanager
def map_errors(context: ErrorContext) -> Iterator[None]:
    """Raise our SourceError or ConfigError for every foreign exception of the block."""
    try:
        yield
    except SourceError as error:
        if error.context.bucket is None:  # raised inside aiobotocore, which does not name the object
            error.context = replace(context, request_id=error.context.request_id)
        raise
    except PenstockError:
        raise
    except Exception as error:
        raise mapped(error, context) from error


@contextlib.contextmanager
def of_listed() -> Iterator[None]:
    """Wrap a request for a listed object. Raises Deleted if the object is missing now."""
    try:
        yield
    except ObjectMissing as error:
        raise deleted(error) from error


def deleted(error: ObjectMissing) -> Deleted:
    """Return the error for a listed object that is missing now."""
    return Deleted(f"the object was deleted after it was listed: {error.message}", error.context)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first PenstockError of a TaskGroup's errors; the group itself if it has none."""
    for error in errors.exceptions:
        first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(first, PenstockError):
            return first
    return errors


def mapped(error: BaseException, context: ErrorContext) -> PenstockError:  # noqa: PLR0911 - a table
    """Return the PenstockError for a foreign error; the first class that fits decides."""
    import aiohttp
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    if isinstance(error, boto.ClientError):
        return _from_client_error(error, context)
    text = quoted(error_text(error))
    if isinstance(
        error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
    ):
        return without_credentials(text, context)
    if isinstance(error, boto.HTTPClientError) and "status" in error.kwargs:  # `bounded.RefusalCutOff`
        return cut_off(error.kwargs["status"], context)
    if isinstance(error, (aiohttp.ClientPayloadError, boto.IncompleteReadError)):
        return Truncated("the body broke off", context)
    if isinstance(error, boto.EndpointConnectionError):
        fix = "check that the endpoint is up, and Penstock.Endpoint.Url or Penstock.Endpoint.Region right"
        return Transient(f"{text}; {fix}", context)
    botocore_broken = (boto.HTTPClientError, boto.ConnectionError, boto.ResponseStreamingError)
    if isinstance(error, (*botocore_broken, aiohttp.ClientError, OSError)):
        return Transient(f"the connection failed ({type(error).__name__}: {text})", context)
    if isinstance(error, ResponseParserError):
        return InvalidResponse(f"the response cannot be parsed ({text})", context)
    if isinstance(error, boto.ParamValidationError):
        return ConfigError(f"{text}; correct the S3 URI {context}")
    if isinstance(
        error, (boto.ProfileNotFound, boto.NoRegionError, boto.ConfigParseError, boto.InvalidConfigError)
    ):
        key = "Region" if isinstance(error, boto.NoRegionError) else "Profile, or the file with the profiles"
        return ConfigError(f"{text}; correct Penstock.Endpoint.{key}")
    if isinstance(error, boto.BotoCoreError):
        return BadAnswer(f"{type(error).__name__}: {text}", context)
    if moved := moved_botocore():
        return ConfigError(moved)
    return not_understood(error, context)


def without_credentials(reason: str, context: ErrorContext) -> Denied:
    """Return the error for a request that cannot be signed."""
    return Denied(
        f"no usable credentials ({reason}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, "
        "or Penstock.Endpoint.Anonymous: true",
        context,
    )


def not_understood(error: BaseException, context: ErrorContext) -> InvalidResponse:
    """Return the error for an exception that a response caused and that no other rule covers."""
    return InvalidResponse(
        f"the response cannot be parsed ({type(error).__name__}: {quoted(str(error))})", context
    )


def broken(error: OSError, context: ErrorContext, *, before: bool = True) -> SourceError:
    """Return the error for a connection that failed in the kernel or in OpenSSL. `before`: see `barriers`."""
    if isinstance(error, SSLError) and (refused := tls_failed(error, context, before=before)) is not None:
        return refused
    return Transient(f"the connection broke ({error.strerror or error})", context)


def cut_off(status: int, context: ErrorContext) -> Truncated:
    """Return the error for a status of `MANY_REASONS` whose body broke off before its code."""
    return Truncated(f"the response with status {status} broke off before its error code", context)


def error_text(error: BaseException) -> str:
    """Return the error's text, without the output of a credential_process, which may contain secrets."""
    if getattr(error, "kwargs", {}).get("provider") == "custom-process":  # a CredentialRetrievalError
        return "the credential_process failed; run it by hand to see why"
    return str(error)


def escaped_id(request_id: str | None) -> str | None:
    """Return a request id for errors, redacted because a server may repeat a secret of the request in it."""
    return quoted(request_id) if request_id else None


def _from_client_error(error: Any, context: ErrorContext) -> SourceError:
    """Return the SourceError for an error response that botocore has parsed."""
    response = error.response
    metadata = response.get("ResponseMetadata", {})
    headers, details = metadata.get("HTTPHeaders", {}), response.get("Error", {})
    return error_from_response(
        status=int(metadata.get("HTTPStatusCode", 0)),
        code=str(details.get("Code", "")),
        message=details.get("Message") or "",
        fields={"x-amz-request-id": metadata.get("RequestId") or ""} | dict(headers),
        region=headers.get("x-amz-bucket-region") or details.get("Region"),
        context=context,
    )


def error_from_response(
    *,
    status: int,
    code: str,
    message: str,
    fields: Mapping[str, str],
    region: str | None = None,
    context: ErrorContext,
) -> SourceError:
    """Return the SourceError for an error response.

    `code`: S3's, or the status if the response has none; then `message` is `foreign_text` of its body.
    `fields`: of the header, by lower-case name. `region`: the bucket's region, if the response names it.
    """
    context = replace(context, request_id=escaped_id(fields.get("x-amz-request-id")))
    seconds, date = _seconds(fields.get("retry-after")), fields.get("date")
    if code == str(status):
        if message.lower() == _phrase(status):  # botocore's
            message = ""
        kind = fields.get("content-type", "")
        if (message or "html" in kind or "json" in kind) and not context.request_id:
            text = _foreign(status, message, fields)
            if status in (429, 503):
                return Throttled(text, context, retry_after=seconds)
            if status >= 500 or status in _ASK_AGAIN:
                return Transient(text, context, retry_after=seconds)
            return ForeignAnswer(text, context)
    text, answered = EXPLANATIONS.get(code, ""), f"(S3 responded {_status(status, code)})"
    # Ours say more than S3's about an object that is missing or was replaced.
    words = "" if status in (404, 412, 416) and text else quoted(message).removesuffix(".")
    if words and not text.startswith(words.lower()):
        text = next((each for pattern, each in _BY_MESSAGE if pattern.search(words)), text)
        text = f"{words} {answered}" + (f"; {text}" if text else "")
    else:
        text = f"{text or words or _phrase(status)} {answered}"
    if status == http.HTTPStatus.BAD_REQUEST and code.startswith("Inv") and _ABOUT_ENCRYPTION.search(message):
        error: SourceError = Denied(f"{text}; {ENCRYPTED}", context)
    else:
        error = _error_by_code(status, code, text, context, retry_after=seconds, date=date, region=region)
    error.code = code
    return error


def error_from_body(
    status: int, body: bytes, fields: Mapping[str, str], context: ErrorContext
) -> SourceError:
    """Return the SourceError for a response whose body is an error's. `fields`: see `error_from_response`."""
    code, found = CODE.search(body), _MESSAGE.search(body)
    message = unescape(found[1].decode("utf-8", "replace")) if found else ""
    return error_from_response(
        status=status,
        code=code[1].decode("utf-8", "replace") if code else str(status),
        message=message if code else foreign_text(body),
        fields=fields,
        context=context,
    )


def error_inside(
    status: int, body: bytes, fields: Mapping[str, str], context: ErrorContext
) -> SourceError | None:
    """Return the error whose document, or page of HTML, is the body of a success; None for other bodies."""
    return error_from_body(status, body, fields, context) if _ERROR_DOCUMENT(body) else None


def may_be_error(fields: Mapping[str, str], length: int | None) -> bool:
    """Return whether the body of a success may be an error's document: it is small, and of no version."""
    return not fields.keys() & _OF_AN_OBJECT and (length is None or length < ERROR_BYTES)


def foreign_text(body: bytes) -> str:
    """Return the words of an error's body that has no code of S3: its title, or its begin."""
    title = _TITLE.search(body)
    text = title[1] if title else _TAG.sub(b" ", body[:1000])
    return " ".join(text.decode("utf-8", "replace").split())[:200] or ("HTML" if IS_HTML(body) else "")


def _foreign(status: int, words: str, fields: Mapping[str, str]) -> str:
    """Return the text of the error for an answer that is not S3's."""
    signs = [f"it says {quoted(words)!r}"] if words else []
    for name in ("content-type", "server", "via"):
        signs += [f"{name.title()}: {quoted(fields[name])}"] if fields.get(name) else []
    return (
        f"the answer is not S3's: {status} {_phrase(status)} ({', '.join(signs)}); see to the proxy, the "
        "firewall or the load balancer in front of the endpoint, or correct Penstock.Endpoint.Url"
    )


def _error_by_code(  # noqa: PLR0911 - a table; the first status or code that fits decides
    status: int,
    code: str,
    text: str,
    context: ErrorContext,
    *,
    retry_after: float | None,
    date: str | None,
    region: str | None,
) -> SourceError:
    if code in _THROTTLE or status in (429, 503):
        return Throttled(text, context, retry_after=retry_after)
    if code == "NotImplemented" or status in _NOT_OFFERED:
        return BadAnswer(text, context)
    failed = status >= 500 or status == http.HTTPStatus.OK  # an error inside a 200 is an internal one
    if code in _TRANSIENT or status in _ASK_AGAIN or (failed and code not in EXPLANATIONS):
        return Transient(text, context, retry_after=retry_after)
    if code in OTHER_REGION or 300 <= status < 400:
        return WrongEndpoint(f"{_region_fix(region)} (S3 responded {_status(status, code)})", context)
    if code in _CHANGED or status in (412, 416):
        return SourceChanged(text, context)
    if code in EXPIRED:
        return Expired(text, context)
    ahead = clock_ahead(date)
    if code == "403" and abs(ahead or 0.0) > _REFUSED_SKEW:
        code, text = "RequestTimeTooSkewed", f"{EXPLANATIONS['RequestTimeTooSkewed']} (S3 responded 403)"
    if code == "RequestTimeTooSkewed":
        return ClockSkew(text + _clocks(ahead), context, ahead=ahead or 0.0)
    if code in _GONE or (status == 404 and code != "NoSuchBucket"):
        return ObjectMissing(text, context) if context.key else Missing(text, context)
    if status == 404:
        return Missing(text, context)
    if status in (401, 403) or (code in EXPLANATIONS and code != "400"):
        return Denied(text, context)
    return BadAnswer(text, context)


def _clocks(ahead: float | None) -> str:
    """Return what the Date of a response says about this machine's clock; `ahead`: None without a Date."""
    if ahead is None:
        return ""
    if abs(ahead) < _REFUSED_SKEW / 2:
        return "; by the endpoint's Date it is right: a proxy may have held the request back"
    return f"; it is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the endpoint's"


def _phrase(status: int) -> str:
    """Return what a status means, for a response that gives no reason."""
    return http.HTTPStatus(status).phrase.lower() if status in _STATUSES else "no reason given"


def _status(status: int, code: str) -> str:
    """Return status and code; the status alone if the response has no code."""
    return str(status) if code in ("", str(status)) else f"{status} {quoted(code)}"


def _region_fix(region: str | None) -> str:
    """Return the remedy for a bucket in another region, as text."""
    if region is None or not REGION.fullmatch(region):
        return "the bucket is in another region; set Penstock.Endpoint.Region to that region"
    return (
        f"the bucket is in region {region}; set Penstock.Endpoint.Region: {region}, and set "
        "Penstock.Endpoint.Url, if that is set, to an endpoint of that region"
    )


def clock_ahead(date: str | None) -> float | None:
    """Return seconds by which this machine's clock is ahead of a Date header; None for an implausible one."""
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(date or "")
        return time.time() - moment.timestamp() if _EARLIEST <= moment.year < _LATEST else None
    except (ValueError, OverflowError, TypeError):
        return None


def _seconds(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for any other form, including a date."""
    return float(header) if header and _SECONDS.fullmatch(header) else None
