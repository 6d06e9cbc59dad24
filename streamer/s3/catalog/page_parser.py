"""Parses the pages of ListObjectsV2.

The C parser of the standard library builds the tree of a page. On most pages every object has the same
fields in the same order, so the keys are every n-th element of the tree: parsing such a page takes a seventh
of the time of botocore's parser. A page with objects of several shapes is read object by object.

The parser refuses pages that S3 never sends: with another root, with a field twice where S3 sends it once,
with an entry without key, size or ETag, or without a valid IsTruncated. `documents.checked_document` has
already refused document types and documents that are too long.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from streamer.errors import BadAnswer, ErrorContext
from streamer.secrets import quoted

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_ROOT = "ListBucketResult"
_LONGEST_SIZE = 20
"""Most digits of a size; a longer one is too large for any object."""


@dataclass(slots=True)
class Page:
    """One page of a listing."""

    objects: list[tuple[str, int, str]] = field(default_factory=list)
    """Key, size in bytes, and ETag as the server sent it."""
    folders: list[str] = field(default_factory=list)
    """Common prefixes."""
    token: str | None = None
    """The token of the next page; None on the last page."""


def parse_page(document: bytes, context: ErrorContext) -> Page:
    """Parse the XML of one page. `context`: bucket and prefix. Raises BadAnswer."""
    try:
        root = ET.fromstring(document)  # noqa: S314 - see `documents.checked_document`
    except ET.ParseError as error:
        raise _refusal(str(error), context) from error
    namespace, _, name = root.tag.rpartition("}")
    if name != _ROOT:
        raise _refusal(f"its root is <{name[:40]}>", context)
    namespace += "}" if namespace else ""
    objects, folders = f"{namespace}Contents", f"{namespace}CommonPrefixes"
    rest = [child for child in root if child.tag not in (objects, folders)]
    top = _fields(rest, namespace, {"IsTruncated", "NextContinuationToken", "EncodingType"}, context)
    page = Page(_objects(root, namespace, context), [], _token(top, context))
    for entry in root.iterfind(folders):
        prefix = _fields(entry, namespace, {"Prefix"}, context).get("Prefix")
        if prefix is None:
            raise BadAnswer("the listing has an entry without Prefix", context)
        page.folders.append(prefix)
    if top.get("EncodingType") == "url":
        page.objects = [(_decoded(key), size, etag) for key, size, etag in page.objects]
        page.folders = [_decoded(name) for name in page.folders]
    return page


def _token(top: dict[str, str], context: ErrorContext) -> str | None:
    truncated = top.get("IsTruncated")
    token = top.get("NextContinuationToken")
    if truncated not in ("true", "false"):
        raise _refusal("it has no valid IsTruncated", context)
    if token and truncated == "false":
        raise _refusal("its last page has a continuation token", context)
    if not token and truncated == "true":
        raise BadAnswer("the listing does not advance (no continuation token)", context)
    return token


def _objects(root: Element, namespace: str, context: ErrorContext) -> list[tuple[str, int, str]]:
    entries = root.findall(f"{namespace}Contents")
    if not entries:
        return []
    names = [f"{namespace}{name}" for name in ("Key", "Size", "ETag")]
    elements = list(root.iter())
    shape = [element.tag for element in entries[0].iter()]
    begin, step = elements.index(entries[0]), len(shape)
    elements = elements[begin : begin + step * len(entries)]
    alike = [element.tag for element in elements] == shape * len(entries)
    alike = alike and len(list(entries[-1].iter())) == step
    if alike and all(shape.count(name) == 1 for name in names):
        columns = [[each.text or "" for each in elements[shape.index(name) :: step]] for name in names]
        keys, sizes, etags = columns
        return list(zip(keys, [_size(size, context) for size in sizes], etags, strict=True))
    rows = []
    for entry in entries:
        fields = _fields(entry, namespace, {"Key", "Size", "ETag"}, context)
        if len(fields) < len(names):
            missing = ", ".join(sorted({"Key", "Size", "ETag"} - fields.keys()))
            raise BadAnswer(f"the listing has an entry without {missing}", context)
        rows.append((fields["Key"], _size(fields["Size"], context), fields["ETag"]))
    return rows


def _fields(
    elements: Element | list[Element], namespace: str, names: set[str], context: ErrorContext
) -> dict[str, str]:
    """Return the texts of the named elements. Raises BadAnswer for an element that comes twice."""
    fields = [
        (name, element.text or "")
        for element in elements
        if (name := element.tag.removeprefix(namespace)) in names
    ]
    if len(found := dict(fields)) < len(fields):
        name, count = Counter(name for name, _ in fields).most_common(1)[0]
        raise _refusal(f"<{name}> comes {count} times where S3 sends it once", context)
    return found


def _size(text: str, context: ErrorContext) -> int:
    if not text.removeprefix("-").isdecimal():
        raise _refusal(f"an object has the size {text[:40]!r}", context)
    if len(text) > _LONGEST_SIZE:
        raise BadAnswer("the endpoint sent an invalid object size: over 2^60 bytes", context)
    return int(text)


def _decoded(name: str) -> str:
    """Decode a name of a listing with `encoding-type=url`."""
    return unquote_plus(name) if "%" in name or "+" in name else name


def _refusal(reason: str, context: ErrorContext) -> BadAnswer:
    return BadAnswer(f"the listing is invalid ({quoted(reason)})", context)
