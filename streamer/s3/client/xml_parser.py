"""Parses S3's XML responses and refuses repeated elements.

botocore's parser misreads an element that comes twice where S3 sends it once. Two `<IsTruncated>` become
"false", and the first page of a listing looks like all of it. This parser raises an error instead.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.parsers import AioResponseParserFactory, AioRestXMLParser
from botocore.parsers import ResponseParserError

REST_XML = "rest-xml"


class _StrictParser(AioRestXMLParser):  # type: ignore[misc]
    """Parser of S3's responses that refuses repeated elements."""

    def _parse_shape(self, shape: Any, node: Any) -> Any:
        if isinstance(node, list) and shape.type_name not in ("list", "map"):
            name = self._node_tag(node[0])
            raise ResponseParserError(f"<{name}> comes {len(node)} times where S3 sends it once")
        return super()._parse_shape(shape, node)


class StrictParserFactory(AioResponseParserFactory):  # type: ignore[misc]
    """Makes aiobotocore's parsers, and the strict one for S3's protocol."""

    def create_parser(self, protocol_name: str) -> Any:
        """Return the parser of a protocol's responses."""
        if protocol_name == REST_XML:
            return _StrictParser(**self._defaults)
        return super().create_parser(protocol_name)
