"""Writes of the S3 stub: PUTs and multipart uploads, with If-Match and If-None-Match, as S3 answers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from tests.kit.raw import etag

Written = tuple[str, str, str]
"""Operation, `bucket/key`, and the condition: an ETag, `*`, or nothing."""


@dataclass
class Puts:
    """Answers the requests that write the stub's objects."""

    content: Callable[[], dict[str, bytes]]
    """Returns these, by `bucket/key`."""
    seen: list[Written] = field(default_factory=list)
    before: deque[Callable[[], None]] = field(default_factory=deque)
    """Called before the next objects are made, as if another client wrote in between."""
    refused: deque[tuple[int, str]] = field(default_factory=deque)
    """Statuses and codes of the next answers; an answer without a code has no body."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Parts by upload id."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = f"{request.match_info['bucket']}/{request.match_info['key']}"
        upload, part = request.query.get("uploadId"), request.query.get("partNumber")
        body = await request.read()
        condition = request.headers.get("If-Match") or request.headers.get("If-None-Match") or ""
        operation = {
            "PUT": "PutObject" if upload is None else "UploadPart",
            "POST": "CompleteMultipartUpload" if upload else "CreateMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }[request.method]
        self.seen.append((operation, name, condition.strip('"')))
        if self.refused:
            return _error(*self.refused.popleft())
        match operation:
            case "PutObject":
                return self._make(name, body, request)
            case "CreateMultipartUpload":
                self.uploads[number := f"upload{len(self.uploads)}"] = {}
                return _xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
            case "UploadPart":
                self.uploads[upload or ""][int(part or 0)] = body
                return web.Response(headers={"ETag": f'"{etag(body)}"'})
            case "AbortMultipartUpload":
                del self.uploads[upload or ""]
                return web.Response(status=204)
        parts = self.uploads[upload or ""]
        made = self._make(name, b"".join(data for _, data in sorted(parts.items())), request)
        if made.status == 200:
            del self.uploads[upload or ""]
            return _xml("CompleteMultipartUploadResult", f"<ETag>{made.headers['ETag']}</ETag>")
        return made

    def _make(self, name: str, body: bytes, request: web.Request) -> web.Response:
        if self.before:
            self.before.popleft()()
        objects = self.content()
        now, wanted = objects.get(name), request.headers.get("If-Match")
        if wanted is not None and now is None:
            return _error(404, "NoSuchKey")
        if (wanted is not None and wanted.strip('"') != etag(now or b"")) or (
            "If-None-Match" in request.headers and now is not None
        ):
            return _error(412, "PreconditionFailed")
        objects[name] = body
        return web.Response(headers={"ETag": f'"{etag(body)}"'})


def _xml(name: str, inside: str) -> web.Response:
    return web.Response(text=f"<{name}>{inside}</{name}>", content_type="application/xml")


def _error(status: int, code: str) -> web.Response:
    return web.Response(
        status=status,
        text=f"<Error><Code>{code}</Code><Message>scripted</Message></Error>" if code else "",
        content_type="application/xml",
    )
