"""An S3 server on a real socket that misbehaves on request.

It keeps objects in memory and answers ListObjectsV2 and ranged GETs rightly, until a fault is scripted:
faults are taken in order by the GETs (of one key, or of any), each once. Other faults come by chance, from
`weather`. More kinds of fault are in `faults`; a proxy for real servers is in `proxy`. The
server runs on a loop of its own in a thread, so that nothing the code under test does to its loop can help or
hinder it.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any
from urllib.parse import quote as url_quote
from xml.sax.saxutils import escape

from aiohttp import web

from tests.kit.puts import Puts
from tests.kit.raw import etag

PAGE = 1000
ANY = ""
THREAD = "s3 stub"
"""Name of the server's thread."""


@dataclass(frozen=True)
class Seen:
    """One GET of an object, as it arrived."""

    key: str
    range: str
    if_match: str | None
    authorization: str | None
    token: str | None
    amz: dict[str, str] = field(default_factory=dict)
    """Its `x-amz-` headers, names in lower case."""


@dataclass
class Answer:
    """A right answer to a ranged GET, for a fault to spoil."""

    request: web.Request
    body: bytes
    headers: dict[str, str]
    status: int = 206


Fault = Callable[[Answer], Awaitable[web.StreamResponse]]


@dataclass
class S3Stub:
    """The server's content and script. Objects are bytes; an ETag is the MD5, as S3's."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    """By `bucket/key`."""
    faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    """By `bucket/key`, `bucket/key@first byte`, or ANY."""
    seen: list[Seen] = field(default_factory=list)
    versions: dict[str, bytes] = field(default_factory=dict)
    """Older contents, by `bucket/key?version id`."""
    head_count: int = 0
    """HEADs answered, and the most at one time."""
    most_heads: int = 0
    head_faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    """By `bucket/key`, for HEADs."""
    head_requests: list[dict[str, str]] = field(default_factory=list)
    """Headers of every HEAD, names in lower case."""
    _head_connections: set[asyncio.Transport] = field(default_factory=set)
    _heads_now: int = 0
    together: set[str] = field(default_factory=set)
    """Control requests that are answered once all of them have come: `head KEY`, `list PREFIX`."""
    _arrived: set[str] = field(default_factory=set)
    _all_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    weather: Callable[[str, int, int], Fault | None] | None = None
    """A fault for a GET, by `bucket/key`, first byte and bytes wanted, where no fault is scripted."""
    refused_keys: dict[str, str] = field(default_factory=dict)
    """Error codes with which requests signed by these access keys are answered."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Where a listing goes on for a continuation token, if not behind it."""
    checksums: dict[str, dict[str, str]] = field(default_factory=dict)
    """By `bucket/key`, headers for whoever asks with `x-amz-checksum-mode`."""
    listings: list[str] = field(default_factory=list)
    """Prefixes of the listing requests."""
    split_listings: int = 0
    """Listing requests with `start-after`."""
    listings_together: int = 0
    """Number of first listing requests that are answered once all of them have come."""
    _listings_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    page: int = 0
    """Names in a page of a listing; 0 for S3's own thousand."""
    pages_allowed: int | None = None
    """Number of listing requests that are answered; those after it wait for `allow_pages`."""
    _pages_moved: asyncio.Event = field(default_factory=asyncio.Event)
    unsorted_pages: bool = False
    """List the names of each page from the last to the first."""
    listed_sizes: dict[str, int] = field(default_factory=dict)
    """By `bucket/key`, sizes that listings have in place of the right ones."""
    bare_listing_etags: bool = False
    times: dict[str, str] = field(default_factory=dict)
    """By `bucket/key`, the time of modification in ISO 8601; the server has no ETag of these objects."""
    listed_times: bool = True
    """Listings have the times."""
    written: dict[str, str] = field(default_factory=dict)
    """By `bucket/key`, the time in ISO 8601 that listings have beside the ETag."""
    if_match_refused: tuple[int, str] | None = None
    """Status and code with which every GET that has If-Match is answered."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends every `stall`."""
    loop: asyncio.AbstractEventLoop | None = None
    """The loop of the server's thread."""
    requests_in_flight: int = 0
    most_in_flight: int = 0
    transports: set[asyncio.Transport] = field(default_factory=set)
    """Connections that have carried a GET of an object."""

    puts: Puts = field(init=False)

    def __post_init__(self) -> None:
        self.puts = Puts(lambda: self.objects, self.checksums)

    @property
    def connections(self) -> int:
        """Connections that have carried a GET of an object."""
        return len(self.transports)

    @property
    def head_connections(self) -> int:
        """Connections that have carried a HEAD."""
        return len(self._head_connections)

    def script_head(self, *faults: Fault, key: str) -> None:
        self.head_faults[key].extend(faults)

    def script(self, *faults: Fault, key: str = ANY, first: int | None = None) -> None:
        """Faults for the next GETs of `key`; with `first`, for those whose range begins at that byte.

        Parallel requests of one object arrive in any order, so a test that means the head of line names it.
        """
        self.faults[key if first is None else f"{key}@{first}"].extend(faults)

    def release(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.released.set)

    def allow_pages(self, count: int | None = None) -> None:
        """Limit the listing requests that are answered in all; None: no limit."""
        assert self.loop is not None

        def allow() -> None:
            self.pages_allowed = count
            moved, self._pages_moved = self._pages_moved, asyncio.Event()
            moved.set()

        self.loop.call_soon_threadsafe(allow)

    async def get(self, request: web.Request) -> web.StreamResponse:
        if code := self.refused_keys.get(access_key(request)):
            return error(403, code)
        bucket, key = request.match_info["bucket"], request.match_info["key"]
        buckets = {name.split("/", 1)[0] for name in self.objects}
        if bucket not in buckets:
            return error(404, "NoSuchBucket")
        if not key and "uploads" in request.query:
            return self.puts.list_uploads(bucket, request.query.get("prefix", ""))
        if not key:
            return await self.answer_listing(request, bucket)
        if request.method == "HEAD":
            return await self._head(request, f"{bucket}/{key}")
        return await self._object(request, key, f"{bucket}/{key}")

    async def _object(self, request: web.Request, key: str, name: str) -> web.StreamResponse:
        """A GET of an object: noted, and refused unless it is for what there is."""
        wanted, if_match = request.headers.get("Range", ""), request.headers.get("If-Match")
        token = request.headers.get("X-Amz-Security-Token")
        amz = {name.lower(): value for name, value in request.headers.items() if name.lower()[:6] == "x-amz-"}
        self.seen.append(Seen(key, wanted, if_match, request.headers.get("Authorization"), token, amz))
        if if_match is not None and self.if_match_refused is not None:
            return error(*self.if_match_refused)
        if name not in self.objects:
            return error(404, "NoSuchKey")
        version = request.query.get("versionId")
        data = self.versions[f"{name}?{version}"] if version else self.objects[name]
        if if_match is not None and if_match.strip('"') != etag(data):
            return error(412, "PreconditionFailed")
        if not wanted and request.headers.get("x-amz-checksum-mode") != "ENABLED":
            return await self._whole(request, name, data)
        return await self._range(request, name, data, wanted=wanted, version=version)

    async def _range(
        self, request: web.Request, name: str, data: bytes, *, wanted: str, version: str | None
    ) -> web.StreamResponse:
        """The range `wanted` of an object, all of it if empty, or what a fault makes of it."""
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first or 0), min(int(last or len(data)) + 1, len(data))
        headers = {**self._validator(name, data), "x-amz-request-id": f"REQ{len(self.seen)}"}
        headers |= (
            {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            if wanted
            else self.checksums.get(name, {})
        )
        answer = Answer(request, data[start:end], headers, 206 if wanted else 200)
        if version:
            answer.headers["x-amz-version-id"] = version
        if request.transport is None:
            return web.Response(status=400)  # the client has left already
        self.transports.add(request.transport)
        self.requests_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.requests_in_flight)
        try:
            for queue in (self.faults.get(f"{name}@{start}"), self.faults.get(name), self.faults.get(ANY)):
                if queue:
                    return await queue.popleft()(answer)
            if self.weather and (struck := self.weather(name, start, end - start)):
                return await struck(answer)
            return web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        except ConnectionResetError:
            return web.Response(status=400)  # the client has left in the middle
        finally:
            self.requests_in_flight -= 1

    async def _head(self, request: web.Request, name: str) -> web.StreamResponse:
        version = request.query.get("versionId")
        data = self.versions.get(f"{name}?{version}") if version else self.objects.get(name)
        if data is None:
            return web.Response(status=404)
        self.head_requests.append({name.lower(): value for name, value in request.headers.items()})
        if request.transport is not None:
            self._head_connections.add(request.transport)
        self._heads_now += 1
        self.most_heads = max(self.most_heads, self._heads_now)
        try:
            await self._together(f"head {name}")
            self.head_count += 1
            headers = {"Content-Length": str(len(data)), **self._validator(name, data)}
            headers |= self.puts.metadata.get(name, {})
            if version:
                headers["x-amz-version-id"] = version
            if request.headers.get("x-amz-checksum-mode") == "ENABLED":
                headers |= self.checksums.get(name, {})
            if queue := self.head_faults.get(name):
                return await queue.popleft()(Answer(request, b"", headers, 200))
            return web.Response(headers=headers)
        finally:
            self._heads_now -= 1

    def _validator(self, name: str, data: bytes) -> dict[str, str]:
        """The ETag of an object in a response, or its time of modification."""
        if name not in self.times:
            return {"ETag": f'"{etag(data)}"'}
        moment = datetime.fromisoformat(self.times[name])
        return {"Last-Modified": format_datetime(moment.astimezone(UTC), usegmt=True)}

    def _listed_validator(self, name: str, quote: str) -> str:
        if name in self.times:
            return f"<LastModified>{self.times[name]}</LastModified>" if self.listed_times else ""
        written = f"<LastModified>{self.written[name]}</LastModified>" if name in self.written else ""
        return f"{written}<ETag>{quote}{etag(self.objects[name])}{quote}</ETag>"

    def _listed_size(self, name: str) -> int:
        return self.listed_sizes.get(name, len(self.objects[name]))

    async def _together(self, request: str) -> None:
        if request in self.together:
            self._arrived.add(request)
            if self._arrived == self.together:
                self._all_arrived.set()
            await self._all_arrived.wait()

    async def _whole(self, request: web.Request, name: str, data: bytes) -> web.StreamResponse:
        """A GET without a range: of a manifest."""
        answer = Answer(request, data, self._validator(name, data), 200)
        queue = self.faults.get(name)
        return await queue.popleft()(answer) if queue else web.Response(body=data, headers=answer.headers)

    async def answer_listing(self, request: web.Request, bucket: str) -> web.Response:
        prefix, after = request.query.get("prefix", ""), request.query.get("continuation-token", "")
        after = self.tokens.get(after, after) or request.query.get("start-after", "")
        names = sorted(name.split("/", 1)[1] for name in self.objects if name.split("/", 1)[0] == bucket)
        names = [name for name in names if name.startswith(prefix) and name > after]
        self.listings.append(prefix)
        number = len(self.listings)
        while self.pages_allowed is not None and number > self.pages_allowed:
            await self._pages_moved.wait()
        if "start-after" in request.query:
            self.split_listings += 1
            if self.split_listings == self.listings_together:
                self._listings_arrived.set()
            if self.split_listings <= self.listings_together:
                await self._listings_arrived.wait()
        await self._together(f"list {prefix}")
        most = self.page or PAGE
        page, more = names[:most], len(names) > most
        last = page[-1:]
        if self.unsorted_pages:
            page = page[::-1]
        encoded = request.query.get("encoding-type") == "url"
        write = functools.partial(url_quote, safe="/") if encoded else escape
        quote = "" if self.bare_listing_etags else "&quot;"
        entries = "".join(
            f"<Contents><Key>{write(key)}</Key>"
            f"{self._listed_validator(f'{bucket}/{key}', quote)}"
            f"<Size>{self._listed_size(f'{bucket}/{key}')}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(last[0])}</NextContinuationToken>" if more else ""
        encoding = "<EncodingType>url</EncodingType>" if encoded else ""
        return web.Response(
            content_type="application/xml",
            text=f"<ListBucketResult>{encoding}<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>",
        )


def access_key(request: web.Request) -> str:
    """Whose signature the request bears; empty if none."""
    _, found, rest = request.headers.get("Authorization", "").partition("Credential=")
    return rest.split("/")[0] if found else ""


def error(status: int, code: str, **headers: str) -> web.Response:
    return web.Response(
        status=status,
        text=f"<Error><Code>{code}</Code><Message>scripted</Message></Error>",
        content_type="application/xml",
        headers={"x-amz-request-id": "REQERR", **headers},
    )


def fails(status: int, code: str, **headers: str) -> Fault:
    """Answer with an S3 error document."""

    async def fault(_: Answer) -> web.StreamResponse:
        return error(status, code, **headers)

    return fault


def cut_after(count: int, *, once: asyncio.Event | None = None) -> Fault:
    """Send `count` bytes of the promised body, then close the connection; if given, only after `once`."""

    async def fault(answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(answer.body)
        await response.prepare(answer.request)
        await response.write(answer.body[:count])
        if once is not None:
            await once.wait()
        assert answer.request.transport is not None
        answer.request.transport.close()
        return response

    return fault


def with_headers(status: int = 206, **headers: str) -> Fault:
    """The right body under a wrong head; an empty value removes a header. Names have `_` for `-`."""

    async def fault(answer: Answer) -> web.StreamResponse:
        changed = {name.replace("_", "-"): value for name, value in headers.items()}
        merged = {name: value for name, value in (answer.headers | changed).items() if value}
        return web.Response(status=status, body=answer.body, headers=merged)

    return fault


def stalls(stub: S3Stub, *, after: int = 0) -> Fault:
    """Send `after` bytes, then nothing until `stub.release()`; then the rest."""

    async def fault(answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(answer.body)
        await response.prepare(answer.request)
        await response.write(answer.body[:after])
        await stub.released.wait()
        await response.write(answer.body[after:])
        return response

    return fault


def whole(stub: S3Stub) -> Fault:
    """200 with the whole object and a Content-Range that claims the range: a broken proxy."""

    async def fault(answer: Answer) -> web.StreamResponse:
        name = answer.request.path.lstrip("/")
        headers = {"ETag": answer.headers["ETag"]}
        return web.Response(status=200, body=stub.objects[name], headers=headers)

    return fault


async def turns() -> None:
    """Let the loop go through what is due, and what follows from that."""
    for _ in range(5):
        await asyncio.sleep(0)


async def accept_no_more(sockets: Iterable[socket.socket]) -> None:
    """Let the connections under way arrive, and take no others, before a server that listens there closes.

    asyncio loses a connection that is accepted while its server closes, and its client waits for ever.
    """
    for sock in sockets:
        asyncio.get_running_loop().remove_reader(sock.fileno())
    await turns()


class StubThread:
    """Runs an S3Stub on an address of this machine from `start` to `stop`; over TLS if given a context."""

    def __init__(self, tls: ssl.SSLContext | None = None, *, host: str = "127.0.0.1") -> None:
        self.stub = S3Stub()
        self._tls = tls
        self._host = host
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=THREAD)

    def start(self) -> S3Stub:
        self._thread.start()
        assert self._ready.wait()
        return self.stub

    def stop(self) -> None:
        assert self.stub.loop is not None
        assert self._stop is not None
        self.stub.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self.stub.loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=1 << 30)
        path, writes = r"/{bucket}/{key:[\s\S]*}", self.stub.puts.answer
        routes = [web.route(method, path, writes) for method in ("PUT", "POST", "DELETE")]
        app.add_routes([web.get("/{bucket}", self._bare), web.get(path, self.stub.get), *routes])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        listening = socket.create_server((self._host, 0))
        await web.SockSite(runner, listening, ssl_context=self._tls).start()
        scheme, port = "https" if self._tls else "http", listening.getsockname()[1]
        self.stub.url = f"{scheme}://{self._host}:{port}"
        self._ready.set()
        await self._stop.wait()
        self.stub.released.set()
        await accept_no_more([listening])
        await runner.cleanup()
        for transport in self.stub.transports:
            # One that has closed has no loop; over TLS on Python 3.11.2, after a second close(), no protocol.
            if all(getattr(transport, name, self) is not None for name in ("_loop", "_ssl_protocol")):
                transport.abort()  # it may still wait to send what nobody reads
        await turns()

    async def _bare(self, request: web.Request) -> Any:
        request.match_info["key"] = ""
        return await self.stub.get(request)
