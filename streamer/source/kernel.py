"""The kernel transport: ranged GETs whose bodies never enter this process.

For plain-HTTP endpoints. The request is signed by botocore's signer and sent on a lane; the body goes
socket ─splice→ receiver by `exchange.Exchange`. Whatever this transport is not made for (redirects,
chunked bodies, refusals that botocore knows how to mend) is handed to the portable transport, part by
part, so both answer for the same bytes by the same rules.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast
from urllib.request import getproxies, proxy_bypass

from streamer.errors import Transient, Where
from streamer.source.exchange import Exchange, Head, Refusal, Unspliceable
from streamer.source.faults import from_answer
from streamer.source.lanes import Lane, LanePool
from streamer.source.portable import PortableSource
from streamer.source.ranges import Receiver, SpliceReceiver, check_head
from streamer.source.signing import Place, RangeSigner

_CODE = re.compile(rb"<Code>([^<]{1,200})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{0,500})</Message>")


def why_not(endpoint_url: str, buckets: set[str]) -> str | None:
    """Why the kernel transport cannot be used for these buckets; None if it can.

    `endpoint_url` is what botocore resolved.
    """
    if not endpoint_url.startswith("http://"):
        return "the endpoint is TLS, so bodies must be decrypted in user space"
    host = endpoint_url.removeprefix("http://").split("/")[0]
    if "http" in getproxies() and not proxy_bypass(host):
        return "an HTTP proxy is set for the endpoint"
    if any(bucket.endswith("--x-s3") for bucket in buckets):
        return "directory buckets need session credentials"
    return None


class KernelSource:
    """A `RangeSource` whose receivers must be `SpliceReceiver`s."""

    name = "kernel splice"

    def __init__(self, signer: RangeSigner, fallback: PortableSource) -> None:
        self._signer = signer
        self._fallback = fallback
        self._pools: dict[tuple[str, int], LanePool] = {}

    def close(self) -> None:
        """Close idle lanes; those in use close with the fetches that use them."""
        for pool in self._pools.values():
            pool.close()

    async def fetch(self, into: Receiver, *, attempt: int) -> None:
        part, first = into.part, into.part.start + into.received
        where = Where(part.object.bucket, part.object.key, first, attempt)
        place = await self._signer.place(part.object.bucket)
        pool = self._pools.get((place.host, place.port))
        if pool is None:
            pool = self._pools[place.host, place.port] = LanePool(place.host, place.port)
        try:
            refusal = await self._ask(pool, place, cast(SpliceReceiver, into), first, where)
        except Unspliceable:
            await self._fallback.fetch(into, attempt=attempt)
            return
        if refusal is not None:
            raise _mapped(refusal, where)

    async def _ask(
        self, pool: LanePool, place: Place, into: SpliceReceiver, first: int, where: Where
    ) -> Refusal | None:
        """One request; once more if an idle lane turns out to have been closed by the server."""
        part = into.part

        def check(head: Head) -> None:
            headers = head.headers
            check_head(
                part,
                first,
                replace(where, request_id=headers.get("x-amz-request-id")),
                status=head.status,
                content_range=headers.get("content-range"),
                content_length=head.content_length,
                etag=headers.get("etag"),
            )

        while True:
            request = await self._signer.head(place, part, first)
            lane = await pool.take(where)
            exchange = Exchange(lane, into, where, check=check)
            reused, lane.requests = lane.requests > 0, lane.requests + 1
            try:
                _send(lane, request, where)
                refusal = await exchange.run()
            except Transient:
                lane.close()
                if reused and not exchange.heard:
                    continue  # it was closed as we took it; the request never reached anybody
                raise
            except BaseException:
                lane.close()
                raise
            if exchange.keep_alive:
                pool.give(lane)
            else:
                lane.close()
            return refusal


def _send(lane: Lane, request: bytes, where: Where) -> None:
    """A head of a kilobyte always fits the empty send buffer of a lane."""
    try:
        sent = lane.sock.send(request)
    except OSError as error:
        raise Transient(f"the connection broke ({error.strerror or error})", where) from error
    if sent != len(request):
        raise Transient("the request did not fit the socket", where)


def _mapped(refusal: Refusal, where: Where) -> Exception:
    headers: Any = refusal.head.headers
    code, message = _CODE.search(refusal.body), _MESSAGE.search(refusal.body)
    return from_answer(
        status=refusal.head.status,
        code=code[1].decode("utf-8", "replace") if code else str(refusal.head.status),
        message=message[1].decode("utf-8", "replace") if message else "",
        request_id=headers.get("x-amz-request-id"),
        retry_after=headers.get("retry-after"),
        where=where,
    )
