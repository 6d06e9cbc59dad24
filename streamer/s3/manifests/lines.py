"""Parses an `AugmentedManifestFile` piece by piece, without I/O: JSON Lines.

    line ─┬─ one call of the JSON decoder in C ──────────────────────────────┬─ the listed attributes
          └─ name by name: values needed as the line writes them, and errors ┘

The scanner keeps at most one line, of bounded size. Every error is a ConfigError that names the manifest,
line and attribute, counted from 1.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from streamer.errors import ConfigError
from streamer.plan import parse_object_uri
from streamer.s3.manifests.text import skip_space
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_LINE = 16 * MIB
"""Bytes of one line of an augmented manifest; Ground Truth's own limit is 100,000 characters."""


def _keep(token: str) -> str:
    return token


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is no JSON")


class _Number(str):
    """A number as the line has it."""

    __slots__ = ()


_LINE_DECODER = json.JSONDecoder(
    parse_int=_Number, parse_float=_Number, parse_constant=_no_constant, object_pairs_hook=tuple
)
"""Parses a line by one call in C. An object becomes the tuple of its pairs, since a name may come twice."""
_PLAIN_URI = re.compile(r"s3://(?!\.\.?/)[A-Za-z0-9._-]{1,255}/[^?\ud800-\udfff]+")
"""A URI that needs no closer look: it has a plain bucket and a key, and no version id."""
_CONSTANTS = {True: b"true", False: b"false", None: b"null"}
_DECODER = json.JSONDecoder(parse_int=_keep, parse_float=_keep, parse_constant=_no_constant)
"""Leaves numbers as text: their values are not needed, and a long one would take time or fail."""


class RowScanner:
    """JSON Lines: the listed attributes of each line, in the list's order (contract §4.2).

    The value of an attribute `…-ref` is the URI of an object, yielded as `str`. Any other value is yielded as
    the bytes to stream: the text of a string, or the token as the line has it.
    """

    def __init__(self, name: str, attributes: Sequence[str]) -> None:
        self._name = name
        self._attributes = tuple(attributes)
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._line = 0
        self._first_blank = 0
        """Number of the first blank line after the last object; blank lines are allowed only at the end."""

    def _refuse(self, why: str, attribute: str | None = None) -> NoReturn:
        context = f"{self._name}: line {self._line}"
        raise ConfigError(
            f"{context}: {why}" if attribute is None else f"{context}: attribute {attribute!r} {why}"
        )

    def row_name(self, row: int) -> str:
        """Return manifest and line of a row, for errors. `row`: from 0; only the last lines may be blank."""
        return f"{self._name}: line {row + 1}"

    def feed(self, data: bytes, *, last: bool) -> Iterator[list[bytes | str]]:
        """Yield the attributes of every line that `data` completes. Raises ConfigError."""
        lines = data.split(b"\n")
        lines[0] = b"".join((*self._rest, lines[0])) if len(lines) > 1 or last else lines[0]
        if len(lines) > 1 or last:
            self._rest.clear()
            self._rest_bytes = 0
        whole_lines = lines if last else lines[:-1]
        if whole_lines and not self._line:
            whole_lines[0] = whole_lines[0].removeprefix(codecs.BOM_UTF8)
        for line in whole_lines:
            self._line += 1
            if len(line) > MAX_LINE:
                self._refuse(f"longer than {MAX_LINE} bytes; is this a JSON Lines file?")
            if not line.strip(b" \t\r"):
                self._first_blank = self._first_blank or self._line
                continue
            if self._first_blank:
                self._line = self._first_blank
                self._refuse("the line is blank, and others follow; remove it")
            yield self._values(line)
        if not last and lines[-1]:
            self._rest.append(lines[-1])
            self._rest_bytes += len(lines[-1])
            if self._rest_bytes > MAX_LINE:
                self._line += 1
                self._refuse(f"longer than {MAX_LINE} bytes; is this a JSON Lines file?")

    def _values(self, line: bytes) -> list[bytes | str]:
        try:
            values = self._quick_values(line)
        except (ValueError, RecursionError):
            values = None
        return self._exact_values(line) if values is None else values

    def _quick_values(self, line: bytes) -> list[bytes | str] | None:
        """Return the same as `_exact_values`; None if an attribute's value is needed as the line writes it.

        None also for what `_exact_values` refuses, unless it raises ValueError.
        """
        pairs = _LINE_DECODER.decode(line.decode())
        attributes = dict(pairs) if type(pairs) is tuple else {}
        if not attributes or len(attributes) != len(pairs):
            return None
        values: list[bytes | str] = []
        for name in self._attributes:
            value = attributes.get(name, ())
            if name.endswith("-ref"):
                if type(value) is not str or not _PLAIN_URI.fullmatch(value):
                    return None
                values.append(value)
            elif isinstance(value, str):
                values.append(value.encode())
            elif value is None or isinstance(value, bool):
                values.append(_CONSTANTS[value])
            else:
                return None
        return values

    def _exact_values(self, line: bytes) -> list[bytes | str]:
        tokens = self._tokens(line)
        values: list[bytes | str] = []
        for name in self._attributes:
            if name not in tokens:
                self._refuse("is missing; every line needs all of AttributeNames", name)
            value, token = tokens[name]
            if name.endswith("-ref"):
                if not isinstance(value, str) or not token.startswith('"'):
                    self._refuse("must be the URI of an object, in quotes", name)
                try:
                    parse_object_uri(value)
                except ConfigError as error:
                    self._refuse(f"is wrong: {error}", name)
                values.append(value)
                continue
            try:
                values.append((value if token.startswith('"') else token).encode())
            except UnicodeEncodeError:
                self._refuse("holds half a surrogate pair, which is no text", name)
        return values

    def _tokens(self, line: bytes) -> dict[str, tuple[Any, str]]:
        """Return, by attribute, the value and the token from which it was parsed."""
        try:
            text = line.decode()
            position = skip_space(text, 0)
            if text[position : position + 1] != "{":
                self._refuse("the line is not a JSON object; each line must be one")
            tokens: dict[str, tuple[Any, str]] = {}
            position = skip_space(text, position + 1)
            more = text[position : position + 1] != "}"
            while more:
                name, position = _DECODER.raw_decode(text, position)
                # Numbers are decoded as text too, so the token's last character decides.
                if not isinstance(name, str) or text[position - 1] != '"':
                    self._refuse("not JSON: the name of an attribute must be a string")
                position = _expect(text, position, ":")
                value, end = _DECODER.raw_decode(text, position)
                if name in tokens:
                    self._refuse("comes twice in this line", name)
                tokens[name] = value, text[position:end]
                position = skip_space(text, end)
                more = text[position : position + 1] == ","
                if more:
                    position = skip_space(text, position + 1)
            position = _expect(text, position, "}")
        except UnicodeDecodeError as error:
            self._refuse(f"not UTF-8 ({error.reason} at byte {error.start})")
        except (ValueError, RecursionError) as error:
            self._refuse(f"not JSON ({error})")
        if position != len(text):
            self._refuse("not JSON: there is text after the object")
        return tokens


def _expect(text: str, position: int, delimiter: str) -> int:
    """Skip `delimiter` and the space around it; return the position. Raises ValueError if it is missing."""
    position = skip_space(text, position)
    if text[position : position + 1] != delimiter:
        raise ValueError(f"expected {delimiter!r} at character {position + 1}")
    return skip_space(text, position + 1)
