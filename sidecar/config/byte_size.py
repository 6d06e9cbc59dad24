"""The type of a size in job files and options: `200MB`, `1.5GiB`, or a number of bytes.

pydantic's `ByteSize` reads a prefix of the text: `1,5 GB` is 1 byte there. This type takes the whole text.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter
from pydantic_core import PydanticCustomError

LARGEST = 2**60
"""The largest size, 1 EiB. Figures of every size fit a float, as metrics and waits need them."""

_FORM = re.compile(r"\s*(?:[0-9]+|[0-9]*\.[0-9]+)\s*[A-Za-z]*\s*")


def _whole(value: Any) -> Any:
    if isinstance(value, str) and _FORM.fullmatch(value) is None:
        kind = "byte_rate" if _FORM.fullmatch(value.removesuffix("/s")) else "byte_size"
        raise PydanticCustomError(kind, "the text is not a size")
    return value


Size = Annotated[ByteSize, BeforeValidator(_whole), Field(le=LARGEST)]


def parse_size(value: Any) -> int:
    """Return a number of bytes. Raises pydantic's ValidationError, which is a ValueError."""
    return int(TypeAdapter(Size).validate_python(value))
