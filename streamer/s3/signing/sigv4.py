"""Signature Version 4 for requests without a body: GET and HEAD.

botocore's signer supports every request; its headers, URLs and logging were about two thirds of the cost of a
small object. `GetSigner` computes the same signature for known headers in a tenth of the time (5 against
61 µs). A property test compares both byte for byte.
Source: IAM User Guide, "Create a signed AWS API request".
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.s3.client.endpoint import Keys

_NO_BODY = hashlib.sha256(b"").hexdigest()


class GetSigner:
    """Signs GETs and HEADs for one region.

    It caches the signing key of the day, the order of header names for each set of names, and the timestamp
    of the current second.
    """

    def __init__(self, region: str) -> None:
        self.region = region
        self._cached_key: tuple[str, str, _Hmac] | None = None
        self._orders: dict[tuple[str, ...], tuple[list[tuple[str, str]], str]] = {}
        self._timestamp = (-1, "")

    def sign(
        self,
        host: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        credentials: Keys,
        *,
        method: str = "GET",
        now: float | None = None,
    ) -> dict[str, str]:
        """Return `headers` and the headers that authenticate them; all must be sent unchanged.

        `path`, `query`: encoded, and `query` sorted. `host`: the Host header, which is not in `headers`.
        `credentials`: also botocore's frozen ones. `now`: seconds since 1970.
        """
        stamp = self._stamp(int(time.time() if now is None else now))
        day = stamp[:8]
        signed = {**headers, "X-Amz-Date": stamp, "X-Amz-Content-SHA256": _NO_BODY}
        if credentials.token:
            signed["X-Amz-Security-Token"] = credentials.token
        order, names = self._order(tuple(signed))
        values = {"Host": host, **signed}
        written = "".join([f"{lower}:{values[name]}\n" for name, lower in order])
        if " " in written:  # rarely
            written = "".join([f"{lower}:{_canonical_value(values[name])}\n" for name, lower in order])
        canonical = f"{method}\n{path}\n{query}\n{written}\n{names}\n{_NO_BODY}"
        scope = f"{day}/{self.region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        signature = self._key(day, credentials.secret_key).hexdigest(text.encode())
        signed["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return signed

    def _stamp(self, second: int) -> str:
        if self._timestamp[0] != second:
            self._timestamp = second, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        return self._timestamp[1]

    def _order(self, names: tuple[str, ...]) -> tuple[list[tuple[str, str]], str]:
        """Return the names and Host in signing order, and the text of SignedHeaders."""
        order_and_text = self._orders.get(names)
        if order_and_text is None:
            order = sorted(("Host", *names), key=str.lower)
            lowered = [(name, name.lower()) for name in order]
            order_and_text = self._orders[names] = lowered, ";".join(order).lower()
        return order_and_text

    def _key(self, day: str, secret: str) -> _Hmac:
        if self._cached_key is not None and self._cached_key[:2] == (day, secret):
            return self._cached_key[2]
        key = b"AWS4" + secret.encode()
        for step in (day, self.region, "s3", "aws4_request"):
            key = hmac.digest(key, step.encode(), "sha256")
        signing = _Hmac(key)
        self._cached_key = (day, secret, signing)
        return signing


class _Hmac:
    """HMAC-SHA256 of many messages with one key (RFC 2104), in a third of the time of `hmac.digest`."""

    def __init__(self, key: bytes) -> None:
        """`key`: at most 64 bytes."""
        block = key.ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def hexdigest(self, message: bytes) -> str:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.hexdigest()


def _canonical_value(value: str) -> str:
    """Return a header's value in the form that is signed: trimmed, with single spaces."""
    return " ".join(value.split()) if " " in value else value
