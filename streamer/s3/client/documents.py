"""Checks the XML documents of S3 before a parser gets them.

S3 writes XML in UTF-8 and without a document type. An XML parser expands the entities of a document type, and
other encodings could hide one, so such a document never reaches the parser. A document also has at most
`MAX_TAGS` tags: a million of them kept the event loop busy for 2 s.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from xml.etree.ElementTree import ParseError
from xml.parsers import expat

from streamer.errors import ErrorContext, InvalidResponse
from streamer.s3.client.faults import IS_HTML, error_from_body
from streamer.secrets import quoted

MAX_ERROR_BODY = 256 * 1024
"""Most bytes of an error body that are read; S3's error bodies have less than 1 KiB."""
MAX_DOCUMENT = 6 * 1024 * 1024
"""Most bytes of a listing page. A thousand keys of 1,024 bytes, each byte written as `%XX`, are 4 MB."""
MAX_TAGS = 200_000
"""Most tags of a listing page, which one turn of the event loop parses. A thousand keys have about 30,000."""
_BAD_CHARACTER = {4, 14}
"""Codes of expat: an invalid token, a reference to an invalid character."""
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
    if IS_HTML(body):
        raise error_from_body(HTTPStatus.OK, bytes(body), {}, context or ErrorContext())
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


def check_xml(document: bytes) -> None:
    """Raise InvalidResponse for a page of a listing that is no XML.

    botocore takes such a page for an internal error of S3, and repeats the request.
    """
    try:
        expat.ParserCreate().Parse(document, True)  # noqa: FBT003 - positional alone
    except expat.ExpatError as error:
        raise unparsable(document, error, None) from error


def unparsable(
    document: bytes, error: ParseError | expat.ExpatError, context: ErrorContext | None
) -> InvalidResponse:
    """Return the error for a page of a listing that a parser refuses. It names a key that is the reason."""
    line, column = error.position if isinstance(error, ParseError) else (error.lineno, error.offset)
    start = sum(len(each) + 1 for each in document.split(b"\n")[: line - 1])
    before = document[: start + column]
    text = str(error)
    if getattr(error, "code", 0) in _BAD_CHARACTER and before.rfind(b"<Key>") > before.rfind(b"</Key>"):
        key = document[before.rfind(b"<Key>") + len(b"<Key>") :].partition(b"</Key>")[0]
        text += (
            f": the key {key[:200]!r} has a character that XML cannot have, or is not UTF-8, and the server "
            "does not encode it (encoding-type=url); rename the object, or name the others in a manifest"
        )
    return invalid_listing(text, context)


def invalid_listing(reason: str, context: ErrorContext | None) -> InvalidResponse:
    """Return the error for a page that S3 never sends."""
    return InvalidResponse(f"the listing is invalid ({quoted(reason)})", context)
