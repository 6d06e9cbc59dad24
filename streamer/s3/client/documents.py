"""Checks the XML documents of S3 before a parser gets them.

S3 writes XML in UTF-8 and without a document type. An XML parser expands the entities of a document type, and
other encodings could hide one, so such a document never reaches the parser. A document also has at most
`MAX_TAGS` tags: a million of them kept the event loop busy for 2 s.
"""

from __future__ import annotations

import re

from streamer.errors import ErrorContext, InvalidResponse

MAX_ERROR_BODY = 256 * 1024
"""Most bytes of an error body that are read; S3's error bodies have less than 1 KiB."""
MAX_DOCUMENT = 6 * 1024 * 1024
"""Most bytes of a listing page. A thousand keys of 1,024 bytes, each byte written as `%XX`, are 4 MB."""
MAX_TAGS = 200_000
"""Most tags of a listing page, which one turn of the event loop parses. A thousand keys have about 30,000."""
_ENCODING = re.compile(rb"""<\?xml[^>]{0,100}encoding\s{0,9}=\s{0,9}["']([^"']{1,40})""")


def checked_document(body: bytes | bytearray, context: ErrorContext | None = None) -> bytes:
    """Return the body if it is a page of a listing that a parser may get. Raises InvalidResponse."""
    if len(body) > MAX_DOCUMENT:
        raise InvalidResponse(
            f"the response is longer than {MAX_DOCUMENT} bytes, which no page of a listing is", context
        )
    if body.count(b"<") > MAX_TAGS:
        raise InvalidResponse(
            f"the response has more than {MAX_TAGS} tags, which no page of a listing has", context
        )
    if body.startswith(b"\x1f\x8b"):
        raise InvalidResponse(
            "the listing is compressed, against Accept-Encoding: identity; turn compression off in the proxy "
            "or CDN in front of the endpoint",
            context,
        )
    if not is_plain_xml(body):
        raise InvalidResponse(
            "the response is XML with a document type or not in UTF-8, which S3 never sends", context
        )
    return bytes(body)


def is_plain_xml(body: bytes | bytearray) -> bool:
    """Return whether the body is in UTF-8 and has no document type."""
    encoding = _ENCODING.search(body, 0, 256)
    other_encoding = encoding is not None and encoding[1].lower() not in (b"utf-8", b"us-ascii")
    return not (
        other_encoding
        or b"\0" in body[:256]
        or body.startswith((b"\xff\xfe", b"\xfe\xff"))
        or b"<!DOCTYPE" in body
    )
