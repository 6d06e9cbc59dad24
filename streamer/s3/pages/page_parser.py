"""Parses the pages of ListObjectsV2 into columns: keys, sizes, validators.

    page ─┬─ objects in S3's form: one regular expression, which matches them without a gap ──┬─ columns
          │  the rest of the page: tree, in which one empty element stands for the objects ───┘
          └─ any other page: tree of the whole page

The C parser of the standard library builds the trees. The regular expression takes a fifth of their time. It
accepts objects whose fields come in S3's order, with texts in printable ASCII and without entities, but for
the quotes of ETags. Where it does not match, the whole page goes the other way, so it only has to be strict.

The parser refuses pages that S3 never sends: with another root, with a field twice where S3 sends it once,
with an entry without key or size, or with neither ETag nor LastModified, without keys and IsTruncated, or
with folders (CommonPrefixes), which Penstock never asks for. What other clients pass over without a loss is
passed over here too: a token on the last page, another case of `true`, an empty CommonPrefixes.
`documents.checked_document` has already refused document types and documents that are too long.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus, unquote_to_bytes
from xml.etree import ElementTree as ET

from streamer.errors import ErrorContext, InvalidResponse
from streamer.plan.validators import validator_of
from streamer.s3.client.documents import invalid_listing, unparsable
from streamer.secrets import quoted
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element

_ROOT = "ListBucketResult"
_NUMBER = re.compile("-?[0-9]+")
_LONGEST_SIZE = 20
"""Most digits of a size; a longer one is too large for any object."""


@dataclass(slots=True)
class Page:
    """One page of a listing, in columns of the same length."""

    keys: list[bytes] = field(default_factory=list)
    """In UTF-8."""
    sizes: list[int] = field(default_factory=list)
    """Bytes, as the server sent them."""
    etags: list[bytes] = field(default_factory=list)
    """Validators (`streamer.plan.validators`), in UTF-8."""
    token: str | None = None
    """The token of the next page; None on the last page."""
    missing: int = 0
    """Entries that the page lacks by its KeyCount."""

    def __len__(self) -> int:
        return len(self.keys)


def parse_page(document: bytes, context: ErrorContext) -> Page:
    """Parse the XML of one page. `context`: bucket and prefix. Raises InvalidResponse."""
    return parse_by_expression(document, context) or parse_by_tree(document, context)


def parse_by_expression(document: bytes, context: ErrorContext) -> Page | None:
    """Parse a page whose objects have S3's form; return None for any other. Raises InvalidResponse."""
    start, end = document.find(_FIRST_TAG), document.rfind(_LAST_TAG) + len(_LAST_TAG)
    if not 0 < start < end or not document.isascii():
        return None
    parts = _OBJECT.split(document[start:end])
    if b"".join(parts[::4]):
        return None  # the matches leave a gap
    try:
        root = ET.fromstring(document[:start] + _STAND_IN + document[end:])  # noqa: S314 - see `documents`
    except ET.ParseError:
        return None
    namespace = _namespace(root, context)
    if len(root.findall(f"{namespace}Contents")) != 1:
        return None  # the objects are inside a comment or another element
    keys = parts[1::4]
    encoded, token, missing = _top(root, namespace, context, len(keys))
    if encoded and _has_escape(b"".join(keys)):
        keys = [_decoded(key) if _has_escape(key) else key for key in keys]
    return Page(keys, list(map(int, parts[3::4])), parts[2::4], token, missing)


def _element(name: str, inside: bytes) -> bytes:
    return b"<%b>%b</%b>" % (name.encode(), inside, name.encode())


_TEXT = rb"[ -%'-;=?-~]*+"
"""Printable ASCII without `<`, `>` and `&`; `*+` never gives back, so no document takes quadratic time."""
# `(?>…)*+`, not `(?:…)*+`: before Python 3.11.5 that keeps the characters of its last try, which failed.
_QUOTE = rb'(?>&quot;|&#34;|")?+'
_OWNER = rb"(?>%b|%b)*+" % (_element("ID", _TEXT), _element("DisplayName", _TEXT))
_OTHERS = rb"(?>%b)*+" % b"|".join(
    [
        *(
            _element(name, _TEXT)
            for name in ("LastModified", "StorageClass", "ChecksumAlgorithm", "ChecksumType", "Type")
        ),
        _element("Owner", _OWNER),
    ]
)
_OBJECT = re.compile(
    _element(
        "Contents",
        _OTHERS.join(
            [
                _element("Key", rb"(%b)" % _TEXT),
                _element("ETag", rb"%b(?!W/)([!#-%%'-;=?-~]++)%b" % (_QUOTE, _QUOTE)),
                _element("Size", rb"([0-9]{1,%d}+)" % _LONGEST_SIZE),
                b"",
            ]
        ),
    )
)
_FIRST_TAG, _LAST_TAG, _STAND_IN = b"<Contents>", b"</Contents>", b"<Contents/>"


def parse_by_tree(document: bytes, context: ErrorContext) -> Page:
    """Parse a page of any form. Raises InvalidResponse."""
    try:
        root = ET.fromstring(document)  # noqa: S314 - see `documents.checked_document`
    except ET.ParseError as error:
        raise unparsable(document, error, context) from error
    namespace = _namespace(root, context)
    encoded, token, missing = _top(root, namespace, context, len(root.findall(f"{namespace}Contents")))
    keys, sizes, etags = _columns(root, namespace, context)
    if encoded:
        keys = [unquote_plus(key) if "%" in key or "+" in key else key for key in keys]
    return Page(
        [key.encode() for key in keys],
        [_size(size, context) for size in sizes],
        [etag.encode() for etag in etags],
        token,
        missing,
    )


def _namespace(root: Element, context: ErrorContext) -> str:
    """Return the namespace of the page's elements, in braces; empty if there is none."""
    namespace, _, name = root.tag.rpartition("}")
    if name != _ROOT:
        raise invalid_listing(f"its root is <{name[:40]}>", context)
    return namespace + ("}" if namespace else "")


def _top(root: Element, namespace: str, context: ErrorContext, keys: int) -> tuple[bool, str | None, int]:
    """Return whether the keys are URL-encoded, the token of the next page, and the entries that it lacks.

    `keys`: number of entries.
    """
    contents = f"{namespace}Contents"
    rest = [child for child in root if child.tag != contents]
    folders = root.iterfind(f"{namespace}CommonPrefixes/{namespace}Prefix")
    refuse_folders(context, found=any(folder.text for folder in folders))
    names = {"IsTruncated", "NextContinuationToken", "EncodingType", "KeyCount"}
    top = _fields(rest, namespace, names, context)
    count = top.get("KeyCount", "")
    missing = int(count) - keys if re.fullmatch("[0-9]{1,18}", count) else 0
    truncated = {"true": True, "false": False}.get(top.get("IsTruncated", "").strip().lower())
    token = next_token(top.get("NextContinuationToken"), context, truncated=truncated, keys=keys)
    return top.get("EncodingType") == "url", token, missing


def refuse_folders(context: ErrorContext, *, found: bool) -> None:
    """Raise InvalidResponse for a page with folders: their objects would be missing."""
    if found:
        raise InvalidResponse(
            "the listing is invalid (it has folders, CommonPrefixes, without a delimiter)", context
        )


def missing_keys(page: Page, context: ErrorContext) -> InvalidResponse:
    """Return the error for a page with fewer entries than its KeyCount: the others would be missing."""
    entries = counted(len(page), "entry", "entries")
    return invalid_listing(f"its KeyCount is {len(page) + page.missing}, and it has {entries}", context)


def next_token(token: str | None, context: ErrorContext, *, truncated: bool | None, keys: int) -> str | None:
    """Return the token of the next page, None on the last one. Raises InvalidResponse if fields disagree.

    `truncated`: IsTruncated; None if the page has none that is valid: then its token decides. `keys`: number
    of entries; a page without any must say that it is the last one. No client follows the token of a last
    page. A listing that ends too early is continued by `range_lister`.
    """
    if truncated is None and not keys:
        raise invalid_listing("it has no valid IsTruncated", context)
    if truncated is False:
        return None
    if truncated and not token:
        raise InvalidResponse(
            "the listing does not advance (no continuation token); a server that has ListObjects version 1 "
            "alone, and not ListObjectsV2, cannot be listed: name the objects in a manifest",
            context,
        )
    return token or None


def _columns(root: Element, namespace: str, context: ErrorContext) -> Sequence[list[str]]:
    """Return keys, sizes and validators."""
    entries = root.findall(f"{namespace}Contents")
    if not entries:
        return [], [], []
    names = [f"{namespace}{name}" for name in ("Key", "Size", "ETag")]
    elements = list(root.iter())
    shape = [element.tag for element in entries[0].iter()]
    begin, step = elements.index(entries[0]), len(shape)
    elements = elements[begin : begin + step * len(entries)]
    alike = [element.tag for element in elements] == shape * len(entries)
    alike = alike and len(list(entries[-1].iter())) == step
    if alike and all(shape.count(name) == len(entries[0].findall(name)) == 1 for name in names):
        keys, sizes, sent = [
            [each.text or "" for each in elements[shape.index(name) :: step]] for name in names
        ]
        etags = [validator_of(etag, None) for etag in sent]
        if all(etags):
            return keys, sizes, etags
    rows = []
    for entry in entries:
        fields = _fields(entry, namespace, {"Key", "Size", "ETag"}, context)
        if not validator_of(fields.get("ETag"), None):
            fields |= _fields(entry, namespace, {"LastModified"}, context)
        rows.append(entry_fields(fields, context))
    return [list(column) for column in zip(*rows, strict=True)]


def entry_fields(fields: Mapping[str, Any], context: ErrorContext) -> tuple[str, Any, str]:
    """Return key, size and validator of an entry. Raises InvalidResponse if one is missing."""
    etag = validator_of(fields.get("ETag"), fields.get("LastModified"))
    missing = {"Key", "Size"} - fields.keys() | (set() if etag else {"ETag"})
    if missing:
        time = fields.get("LastModified")
        reason = f", and its LastModified {quoted(time)!r} is invalid" if time and not etag else ""
        raise InvalidResponse(
            f"the listing has an entry without {', '.join(sorted(missing))}{reason}", context
        )
    return fields["Key"], fields["Size"], etag


def _fields(
    elements: Element | list[Element], namespace: str, names: set[str], context: ErrorContext
) -> dict[str, str]:
    """Return the texts of the named elements. Raises InvalidResponse for an element that comes twice."""
    fields = [
        (name, element.text or "")
        for element in elements
        if (name := element.tag.removeprefix(namespace)) in names
    ]
    if len(found := dict(fields)) < len(fields):
        name, count = Counter(name for name, _ in fields).most_common(1)[0]
        raise invalid_listing(f"<{name}> comes {count} times where S3 sends it once", context)
    return found


def _size(text: str, context: ErrorContext) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise invalid_listing(f"an object has the size {text[:40]!r}", context)
    if len(text) > _LONGEST_SIZE:
        raise InvalidResponse("the endpoint sent an invalid object size: over 2^60 bytes", context)
    return int(text)


def _has_escape(text: bytes) -> bool:
    return b"%" in text or b"+" in text


def _decoded(key: bytes) -> bytes:
    """Decode a key of a listing with `encoding-type=url`."""
    decoded = unquote_to_bytes(key.replace(b"+", b" "))
    try:
        decoded.decode()
    except UnicodeDecodeError:
        return unquote_plus(key.decode()).encode()
    return decoded
