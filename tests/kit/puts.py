"""Writes of the S3 stub: PUTs and multipart uploads, with conditions and CRC-64NVME, as S3 answers them."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from awscrt.checksums import crc64nvme

from tests.kit.raw import etag

Spoil = Callable[[str, web.Request, web.Response], web.Response]
"""Returns what is sent in place of the right answer, from the operation, the request and that answer."""
Written = tuple[str, str, str]
"""Operation, `bucket/key`, and the condition: an ETag, `*`, or nothing."""


@dataclass
class Puts:
    """Answers the requests that write the stub's objects."""

    content: Callable[[], dict[str, bytes]]
    """Returns these, by `bucket/key`."""
    checksums: dict[str, dict[str, str]]
    """By `bucket/key`, headers of the checksum that is stored."""
    seen: list[Written] = field(default_factory=list)
    before: deque[Callable[[], None]] = field(default_factory=deque)
    """Called before the next objects are made, as if another client wrote in between."""
    refused: deque[tuple[int, str]] = field(default_factory=deque)
    """Statuses and codes of the next answers; an answer without a code has no body."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Parts by upload id."""
    keys: dict[str, str] = field(default_factory=dict)
    """`bucket/key` by upload id."""
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Headers of metadata and encryption, by `bucket/key` or upload id."""
    on_part: Callable[[], None] = lambda: None
    """Called with each part that has arrived."""
    spoil: Spoil = lambda _operation, _request, response: response
    lost: int = 0
    """Number of the next objects that are made, and whose responses say 503."""
    as_ceph: bool = False
    """If-Match is compared with its quotes, and completions have no condition: Ceph 16 does so."""
    garbled: int = 0
    """Number of the next bodies that another byte arrives in."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = f"{request.match_info['bucket']}/{request.match_info['key']}"
        upload = request.query.get("uploadId")
        body = await request.read()
        if self.garbled and request.method == "PUT":
            self.garbled, body = self.garbled - 1, bytes([body[0] ^ 1]) + body[1:]
        condition = request.headers.get("If-Match") or request.headers.get("If-None-Match") or ""
        operation = {
            "PUT": "PutObject" if upload is None else "UploadPart",
            "POST": "CompleteMultipartUpload" if upload else "CreateMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }[request.method]
        self.seen.append((operation, name, condition.strip('"')))
        if self.refused:
            return error(*self.refused.popleft())
        return self.spoil(operation, request, self._right(operation, request, name, body))

    def _right(self, operation: str, request: web.Request, name: str, body: bytes) -> web.Response:
        upload, part = request.query.get("uploadId"), request.query.get("partNumber")
        if request.method == "PUT" and request.headers["x-amz-checksum-crc64nvme"] != _crc(body):
            return error(400, "BadDigest")
        if operation == "PutObject":
            return self._make(name, body, request.headers, _metadata(request))
        if operation == "CreateMultipartUpload":
            self.uploads[number := f"upload{len(self.seen)}"] = {}
            self.keys[number], self.metadata[number] = name, _metadata(request)
            return xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
        if upload not in self.uploads:
            return error(404, "NoSuchUpload")
        if operation == "UploadPart":
            self.uploads[upload][int(part or 0)] = body
            self.on_part()
            return web.Response(headers={"ETag": f'"{etag(body)}"'})
        if operation == "AbortMultipartUpload":
            del self.uploads[upload]
            return web.Response(status=204)
        return self._complete(name, upload, request)

    def _complete(self, name: str, upload: str, request: web.Request) -> web.Response:
        whole = b"".join(data for _, data in sorted(self.uploads[upload].items()))
        if request.headers["x-amz-checksum-crc64nvme"] != _crc(whole):
            return error(400, "BadDigest")
        made = self._make(name, whole, {} if self.as_ceph else request.headers, self.metadata[upload])
        if self.content().get(name) == whole:
            del self.uploads[upload]
        if made.status != 200:
            return made
        return xml("CompleteMultipartUploadResult", f"<ETag>{made.headers['ETag']}</ETag>")

    def list_uploads(self, bucket: str, prefix: str) -> web.Response:
        """The answer to ListMultipartUploads."""
        found = ((number, self.keys[number].partition("/")) for number in self.uploads)
        return xml(
            "ListMultipartUploadsResult",
            "".join(
                f"<Upload><Key>{key}</Key><UploadId>{number}</UploadId></Upload>"
                for number, (of, _, key) in found
                if of == bucket and key.startswith(prefix)
            ),
        )

    def _make(
        self, name: str, body: bytes, headers: Mapping[str, str], metadata: dict[str, str]
    ) -> web.Response:
        if self.before:
            self.before.popleft()()
        objects = self.content()
        now, wanted = objects.get(name), headers.get("If-Match")
        if wanted is not None and now is None:
            return error(404, "NoSuchKey")
        if not self.as_ceph and wanted is not None:
            wanted = wanted.strip('"')
        if (wanted is not None and wanted != etag(now or b"")) or (
            "If-None-Match" in headers and now is not None
        ):
            return error(412, "PreconditionFailed")
        objects[name], self.metadata[name] = body, metadata
        self.checksums[name] = {"x-amz-checksum-crc64nvme": _crc(body), "x-amz-checksum-type": "FULL_OBJECT"}
        if self.lost:
            self.lost -= 1
            return error(503, "ServiceUnavailable")
        return web.Response(headers={"ETag": f'"{etag(body)}"'})


def _metadata(request: web.Request) -> dict[str, str]:
    names = ("x-amz-meta-", "x-amz-server-side-encryption")
    return {name.lower(): value for name, value in request.headers.items() if name.lower().startswith(names)}


def _crc(body: bytes) -> str:
    return base64.b64encode(crc64nvme(body).to_bytes(8, "big")).decode()


def xml(name: str, inside: str) -> web.Response:
    return web.Response(text=f"<{name}>{inside}</{name}>", content_type="application/xml")


def error(status: int, code: str, message: str = "scripted") -> web.Response:
    return web.Response(
        status=status,
        text=f"<Error><Code>{code}</Code><Message>{message}</Message></Error>" if code else "",
        content_type="application/xml",
    )
