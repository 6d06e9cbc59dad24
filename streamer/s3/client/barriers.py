"""What a request passes before S3: TLS and proxies, whose refusals look final.

    nothing has passed in this run       Barred, at once: a setting is wrong
    a response has come that way before  BarredNow, retried: a certificate or a proxy is being replaced

A set of `passed` barriers, one for all clients, has the hosts and the proxies through which a response has
come. TLS 1.3 refuses a client without a certificate only after the handshake, so a handshake alone does not
count. What usually passes by itself (a proxy that cannot reach the host, an alert about an internal error) is
Transient.
"""

from __future__ import annotations

import os
import re
import ssl
from http import HTTPStatus
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from streamer.errors import Barred, BarredNow, ErrorContext, SourceError, Transient
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAY_PASS = re.compile(
    "internal error|eof|closed|bad record mac|decryption failed|record overflow|decode error", re.IGNORECASE
)
"""In OpenSSL's reason: errors of a server or of bytes on their way."""
_NO_TLS = "if the server has no TLS at this port, write http:// in Penstock.Endpoint.Url"
_REMEDIES = {
    "expired|not yet valid": "renew the server's certificate, or set this machine's clock",
    "invalid CA|key identifier|key usage|critical": "the authority's certificate lacks fields: issue it anew",
    "too weak|too small": "issue the certificate anew, with a key of 2,048 bits and SHA-256",
    "legacy renegotiation": "the server, or the middlebox before it, lacks secure renegotiation (RFC 5746): "
    "update it",
    "verify failed": "Penstock.Endpoint.CaBundle must have the certificate of the server's authority if that "
    "is a private one (this machine's are often in /etc/ssl/certs/ca-certificates.crt), and "
    "Penstock.Endpoint.Url a name in the server's certificate",
    "certificate required|alert (?:bad|no|unknown|unsupported) c|alert certificate": "the server demands a "
    "client certificate, and Penstock has none: name another endpoint",
    "protocol version|unsupported protocol|no protocols": "the server speaks neither TLS 1.2 nor 1.3: update "
    "it, or the middlebox before it",
    "handshake failure|insufficient security|no shared cipher|no ciphers": "the server accepts no cipher of "
    "this client's, or demands a client certificate: correct its TLS settings, or name another endpoint",
}
"""Remedies by OpenSSL's reason, the first that fits."""
_LOGIN = "write its user and password before its host in the variable"
_ALLOW = "have it allow the host, or name the host in NO_PROXY"
_TITLE = re.compile(rb"<(?:title|h1)[^>]{0,99}>([^<]{1,200})", re.IGNORECASE)


def barred(text: str, context: ErrorContext, *, before: bool) -> SourceError:
    """Return the error for a refusal. `before`: whether a response has come that way in this run."""
    return BarredNow(text, context) if before else Barred(text, context)


def tls_failed(error: BaseException, context: ErrorContext, *, before: bool) -> SourceError | None:
    """Return the error if an exception, or one of its causes, is a refusal of TLS; else None."""
    # aiohttp's own classes are among those of ssl, and add a host and a type to the reason.
    refusals = [each for each in causes(error) if isinstance(each, ssl.SSLError)]
    reason = str(refusals[-1]) if refusals else ""
    if not reason or _MAY_PASS.search(reason):
        return None
    fits = (fix for pattern, fix in _REMEDIES.items() if re.search(pattern, reason, re.IGNORECASE))
    remedy = next(fits, _NO_TLS)
    return barred(f"TLS failed ({quoted(reason)}); {remedy}", context, before=before)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes, and the errors that aiohttp and botocore keep in their own ways."""
    left: list[object] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            kept = getattr(each, "kwargs", {}).get("error")
            own = getattr(each, "os_error", None), getattr(each, "certificate_error", None)
            left += [each.__context__, each.__cause__, *own, kept]


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL. NO_PROXY may have addresses and networks."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from urllib.request import getproxies, proxy_bypass  # takes 10 ms

    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme)
    if not proxy or proxy_bypass(parts.netloc) or _in_networks(parts.hostname, proxies.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _in_networks(host: str | None, entries: str) -> bool:
    """Return whether the host is an address in one of the networks."""
    try:
        address = ip_address(host or "")
    except ValueError:
        return False
    for entry in entries.split(","):
        try:
            if address in ip_network(entry.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False


def proxy_text(proxy: str, url: str) -> str:
    """Return how errors name a proxy: its address without a password, and the variable."""
    parts, name = urlsplit(proxy), f"{urlsplit(url).scheme}_proxy"
    variable = name if name in os.environ else name.upper()
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} ({variable})"


def proxy_failed(error: BaseException, proxy: str, url: str, *, before: bool) -> SourceError:
    """Return the error for a connection that the proxy did not make. `url`: of the request."""
    whom = proxy_text(proxy, url)
    for each in causes(error):
        if status := getattr(each, "status", 0):  # of the answer to CONNECT
            return _proxy_error(whom, url, status, getattr(each, "message", ""), before=before)
    numbers = (each.errno for each in causes(error) if isinstance(each, OSError))
    number = next((each for each in numbers if each and each > 0), None)
    reason = os.strerror(number) if number else quoted(str(error))
    return Transient(f"cannot connect to the proxy {whom} ({reason}); check that it is up")


def proxy_answer(response: Any, proxy: str, url: str, *, before: bool) -> SourceError | None:
    """Return the error for an error response that is the proxy's own; None if it may be S3's.

    `response`: aiobotocore's, with its body.
    """
    status, headers, body = response.status_code, response.headers, response._content  # noqa: SLF001
    of_s3 = any(name.lower().startswith("x-amz-") for name in headers) or b"<Code>" in body
    if status != HTTPStatus.PROXY_AUTHENTICATION_REQUIRED and (of_s3 or not (body or "via" in headers)):
        return None
    if status not in (HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED) and status < 500:
        return None
    title = _TITLE.search(body)
    words = title[1].decode("utf-8", "replace") if title else ""
    return _proxy_error(proxy_text(proxy, url), url, status, words, before=before)


def _proxy_error(whom: str, url: str, status: int, words: str, *, before: bool) -> SourceError:
    phrase = HTTPStatus(status).phrase if status in frozenset(HTTPStatus) else ""
    text = " ".join(f"{status} {phrase}".split())
    if words and words.strip() != phrase:
        text += f", {quoted(words)!r}"
    host = urlsplit(url).hostname
    if status >= 500 or status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS):
        return Transient(
            f"the proxy {whom} does not reach {host} ({text}); if it need not, name the host in NO_PROXY"
        )
    remedy = _LOGIN if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED else _ALLOW
    return barred(f"the proxy {whom} refuses {host} ({text}); {remedy}", ErrorContext(), before=before)
