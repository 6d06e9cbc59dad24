"""Sends the requests of planning by our own HTTP client: HEADs, LISTs, GETs of manifests.

aiobotocore sends the requests of the buckets that it does not support (`why_not`), or all of them if the job
asks for that.
"""

from __future__ import annotations

import http
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Transient
from streamer.retry import SILENCE, noting_silence
from streamer.s3.client.final_answers import FINAL_STATUSES
from streamer.s3.http.client import HttpClient, Response
from streamer.s3.http_source import tls_context, why_not
from streamer.s3.signing.requests import RangeSigner

if TYPE_CHECKING:
    from streamer.s3.client.session import Clients
    from streamer.s3.signing.endpoints import BucketEndpoint


class ControlClient:
    """Our own HTTP client with the signer of planning's requests."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self._http: HttpClient | None = None
        """Opened by the first request, because certificates take 5 to 15 ms to load."""
        self._supported: dict[str, bool] = {}
        self.signer = RangeSigner.of(clients.control, clients)

    def close(self) -> None:
        """Close the connections. No request may be running."""
        if self._http is not None:
            self._http.close()

    def supports(self, bucket: str) -> bool:
        """Return whether our own client can send the requests of this bucket."""
        supported = self._supported.get(bucket)
        if supported is None:
            own = not self.clients.by_aiobotocore
            supported = self._supported[bucket] = own and why_not(self.clients, {bucket}) is None
        return supported

    def leave_to_aiobotocore(self, bucket: str) -> None:
        """Note that aiobotocore must send all further requests of this bucket."""
        self._supported[bucket] = False

    async def send(
        self,
        operation: str,
        endpoint: BucketEndpoint,
        context: ErrorContext,
        request: Callable[[], Awaitable[bytes]],
    ) -> Response:
        """Count and send a request; return its response. `operation`: S3's name of it. Raises SourceError.

        After a final answer on a used connection, it is sent again on a fresh one (`final_answers`).
        """
        clients = self.clients
        if self._http is None:
            tls = tls_context(clients.ca_bundle, clients.passed) if clients.over_tls else None
            self._http = HttpClient(tls, stall_timeout=clients.stall_timeout)
        clients.request_counts[operation] += 1
        with noting_silence(
            lambda: Transient(f"no answer from {endpoint.authority} for {SILENCE:g} s", context)
        ):
            response = await self._http.send(endpoint, context, request)
        if response.reused and response.header.status in FINAL_STATUSES:
            response.end(reuse=False)
            clients.request_counts[operation] += 1
            response = await self._http.send(endpoint, context, request, fresh=True)
        if response.header.status < http.HTTPStatus.MULTIPLE_CHOICES and clients.credentials is not None:
            clients.credentials.note_accepted()
        return response
