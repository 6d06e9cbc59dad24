"""What else an S3 server may do wrong: `stub` has the common faults, these are the rarer ones.

Nothing here, in `stub` or in `proxy` knows Penstock: the kit serves any S3 client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable

from aiohttp import web

from tests.kit.raw import etag
from tests.kit.stub import Answer, Fault, error, fails, with_headers

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: close(2) sends RST instead of FIN."""


async def _begin(answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(answer.body)
    await response.prepare(answer.request)
    return response


def resets_after(count: int) -> Fault:
    """Send `count` bytes of the body, then reset the connection."""

    async def fault(answer: Answer) -> web.StreamResponse:
        response = await _begin(answer)
        await response.write(answer.body[:count])
        reset(answer.request.transport)
        return response

    return fault


def reset(transport: asyncio.WriteTransport | None) -> None:
    """End the connection with RST, whatever is still on its way."""
    if transport is not None and (sock := transport.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError):  # it has ended by itself
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()


def drips(step: int, pause: float, *, most: float = 0.3) -> Fault:
    """Send the body `step` bytes at a time, `pause` seconds apart; the rest at once after `most` seconds."""

    async def fault(answer: Answer) -> web.StreamResponse:
        response = await _begin(answer)
        at, turns = 0, int(most / pause)
        while at < len(answer.body) and turns:
            await response.write(answer.body[at : at + step])
            at, turns = at + step, turns - 1
            await asyncio.sleep(pause)
        await response.write(answer.body[at:])
        return response

    return fault


def silent_for(seconds: float, *, after: int = 0) -> Fault:
    """Send `after` bytes, then nothing for so long, then the rest."""

    async def fault(answer: Answer) -> web.StreamResponse:
        response = await _begin(answer)
        await response.write(answer.body[:after])
        await asyncio.sleep(seconds)
        await response.write(answer.body[after:])
        return response

    return fault


def flips(at: float) -> Fault:
    """The right head and the right length, but one bit is another: at this fraction of the body."""

    async def fault(answer: Answer) -> web.StreamResponse:
        body = bytearray(answer.body)
        body[int(at * (len(body) - 1))] ^= 0x10
        return web.Response(status=answer.status, body=bytes(body), headers=answer.headers)

    return fault


def displaced() -> Fault:
    """The right body under the range that begins one byte later."""

    async def fault(answer: Answer) -> web.StreamResponse:
        span, total = answer.headers["Content-Range"].removeprefix("bytes ").split("/")
        first, last = (int(place) + 1 for place in span.split("-"))
        headers = answer.headers | {"Content-Range": f"bytes {first}-{last}/{total}"}
        return web.Response(status=answer.status, body=answer.body, headers=headers)

    return fault


async def chunked(answer: Answer) -> web.StreamResponse:
    """A body of unknown length."""
    answer.headers.pop("Content-Length", None)
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.enable_chunked_encoding()
    await response.prepare(answer.request)
    await response.write(answer.body)
    return response


def redirects(url: str, *, status: int = 307) -> Fault:
    """Another place for this very request; S3's redirects have no body of their own."""

    async def fault(answer: Answer) -> web.StreamResponse:
        return error(status, "TemporaryRedirect", Location=url + answer.request.raw_path)

    return fault


def newer(body: bytes) -> Fault:
    """Answers that ignore If-Match: the same range of another version, under that version's ETag."""

    async def fault(answer: Answer) -> web.StreamResponse:
        start = int(answer.headers["Content-Range"].split()[1].split("-")[0])
        piece = body[start : start + len(answer.body)]
        headers = {
            "Content-Range": f"bytes {start}-{start + len(piece) - 1}/{len(body)}",
            "ETag": f'"{etag(body)}"',
        }
        return web.Response(status=206, body=piece, headers=headers)

    return fault


WRONG: dict[str, Callable[[random.Random, int], Fault]] = {
    "range": lambda _dice, _size: displaced(),
    "no range": lambda _dice, _size: with_headers(Content_Range=""),
    "etag": lambda _dice, _size: with_headers(ETag='"another"'),
    "gone": lambda _dice, _size: fails(404, "NoSuchKey"),
    "denied": lambda _dice, _size: fails(403, "AccessDenied"),
    "replaced": lambda _dice, _size: fails(412, "PreconditionFailed"),
    "newer": lambda dice, size: newer(dice.randbytes(size * 2)),
}
"""Faults that no client may deliver anything after, unless it asks again and is answered rightly."""
