"""The transport whose requests are sent by engine processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from streamer.engines.body import BodyPipes, EngineBody
from streamer.engines.engine import Engine, Engines, EngineSettings
from streamer.engines.wire import pack_part
from streamer.errors import Transient
from streamer.s3.client.credentials import renewed
from streamer.s3.fallback import Fallback, LeftToAiobotocore
from streamer.s3.http.poller import FairPoller
from streamer.units import MIB

if TYPE_CHECKING:
    from streamer.plan import Part
    from streamer.retry import RetryPolicy
    from streamer.s3.client.session import Clients
    from streamer.s3.ranges import Body, RangeRequest
    from streamer.s3.signing.endpoints import BucketEndpoint
    from streamer.s3.signing.requests import RangeSigner

SPAN_SIZE = 4 * MIB
"""Bytes of small objects in one span: the parent's cost is per span, and a lost span is fetched again."""
PIPES_EACH = 2
"""Pipes per engine for bodies that nobody waits for yet. An engine decrypts so many bodies ahead; more would
leave the processor's cache before they are taken."""


class EngineSource:
    """A `RangeSource` over engine processes. `fallback` fetches what they leave to the parent."""

    name = "engines"
    span_size = SPAN_SIZE

    def __init__(
        self,
        engines: Engines,
        signer: RangeSigner,
        fallback: Fallback,
        *,
        count: int,
        tls: bool,
        limit: float,
    ) -> None:
        """`tls`: whether bodies are decrypted. `limit`: seconds to wait for a process while none serves."""
        self.engines = engines
        self._signer = signer
        self._fallback = fallback
        self._limit = limit
        self._pipes = BodyPipes(PIPES_EACH * count, ahead=tls and count > 1)
        self._poller = FairPoller()
        self._poller.open()
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """Close the idle pipes; a pipe in use is closed with its body."""
        self._pipes.close()
        self._poller.close()

    async def open(self, request: RangeRequest) -> Body:
        parts = request.part.rest(request.first)
        credentials, sent_at = self._signer.credentials, time.monotonic()

        engine = await self._ready_engine(request, parts)
        number = next(self._numbers)
        body = EngineBody(
            number,
            request,
            engine,
            pipes=self._pipes,
            poller=self._poller,
            on_expired=lambda error: renewed(error, credentials, sent_at),
        )
        request.reported = True
        request.on_phase("first_byte")
        packed = [pack_part(part) for part in parts]
        engine.send("open", number, request.requests, request.avoid, request.once, packed)
        try:
            await body.wait_open()
        except BaseException as error:
            body.close()
            if isinstance(error, LeftToAiobotocore):
                return await self._fallback.open(request, error)
            raise
        return body

    async def _ready_engine(self, request: RangeRequest, parts: list[Part]) -> Engine:
        """Return an engine that has the credentials and endpoints for the parts. Raises SourceError."""
        request.on_phase("credentials")
        keys = await self._signer.keys(parts[0].object)
        endpoints = {}
        for bucket in {part.object.bucket for part in parts if part.body}:
            endpoints[bucket] = await self._signer.endpoint(bucket)
        request.on_phase("connect")
        try:
            async with asyncio.timeout(self._limit):
                engine = await self.engines.least_busy()
        except TimeoutError as error:
            text = f"no engine process has served for {self._limit:.0f} s; see their messages"
            raise Transient(text, request.context) from error
        if keys is not None and engine.sent.get("") != keys:
            engine.sent[""] = keys
            engine.send("keys", keys.access_key, keys.secret_key, keys.token)
        for bucket, endpoint in endpoints.items():
            if engine.sent.get(bucket) is not endpoint:
                engine.sent[bucket] = endpoint
                engine.send(*_described(bucket, endpoint))
        return engine


def _described(bucket: str, endpoint: BucketEndpoint) -> tuple[Any, ...]:
    return (
        "endpoint",
        bucket,
        endpoint.host,
        endpoint.port,
        endpoint.tls,
        endpoint.authority,
        endpoint.prefix,
        endpoint.signer.region,
    )


def settings_of(clients: Clients, retry: RetryPolicy) -> EngineSettings:
    """Return the settings of the engines for these clients."""
    return EngineSettings(
        anonymous=clients.anonymous,
        headers=clients.reading.headers(),
        sends_if_match=clients.data.sends_if_match,
        stall_timeout=clients.stall_timeout,
        retry=asdict(replace(retry, wrong_answers=1)),  # the parent repeats a request after a wrong answer
    )
