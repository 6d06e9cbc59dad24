"""The text of manifests: pure scanners that take it piece by piece.

    Gunzip        inflates what begins with gzip's magic and passes anything else through
    ArrayScanner  `ManifestFile`: one JSON array, a prefix and suffixes; gives each object's URI
    LineScanner   `AugmentedManifestFile`: a JSON object a line; gives each line's listed attributes

Each holds one token or line at most, and that has a bound. Every error is a ConfigError that names the
manifest and the place: the entry of an array, the line and attribute of JSON Lines, counted from 1.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

from streamer.errors import ConfigError
from streamer.plan import parse_object_uri
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_LINE = 16 * MIB
"""Bytes of one line of an augmented manifest; Ground Truth's own limit is 100,000 characters."""
MAX_PIECE = 1 * MIB
"""Bytes inflated at a time."""
MAX_TOKEN = 1 * MIB
"""Characters of one entry of a manifest; a key has at most 1,024 bytes."""
_GZIP = b"\x1f\x8b"


class Gunzip:
    """Inflates gzip, members one after the other; recognised by its magic (RFC 1952 §2.3.1)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = b""
        self._plain: bool | None = None
        self._member: Any = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` inflates to, in bounded pieces. Raises ConfigError if it is not gzip after all."""
        if self._plain is None:
            data, self._start = self._start + data, b""
            if len(data) < len(_GZIP):
                self._start = data
                return
            self._plain = not data.startswith(_GZIP)
        if self._plain:
            yield data
            return
        more = False
        try:
            while data or more:
                if self._member is None:
                    self._member = zlib.decompressobj(wbits=31)
                found = self._member.decompress(data, MAX_PIECE)
                if self._member.eof:
                    data, more, self._member = self._member.unused_data, False, None
                else:
                    data, more = self._member.unconsumed_tail, len(found) == MAX_PIECE
                yield found
        except zlib.error as error:
            raise ConfigError(
                f"{self._name} begins as gzip but is damaged ({error}); upload it again"
            ) from error

    def finish(self) -> bytes:
        """What is left at the end. Raises ConfigError if a gzip member is not whole."""
        if self._member is not None:
            raise ConfigError(f"{self._name} is gzip that ends too early; upload it again")
        return self._start


_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = r'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_TOKEN = re.compile(rf'(\{{(?:[^"{{}}]++|{_STRING})*+\}}|{_STRING})[ \t\r\n]*+([,\]])')
_BUCKET = re.compile(r"s3://[^/]+/.*", re.DOTALL)


class ArrayScanner:
    """`[{"prefix": "s3://bucket/…"}, "suffix", …]`: each object's URI is prefix + suffix (contract §4.1)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self.prefix: str | None = None
        """The URI that all suffixes are appended to, once it has been read."""
        self._entry = 0
        """Entries read; 0 before the opening bracket too."""
        self._opened = self._closed = False

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self._name}: entry {self._entry + 1}: {why}")

    def feed(self, data: bytes, *, last: bool) -> Iterator[tuple[str, str]]:
        """The place and URI of every entry that is whole now. Raises ConfigError."""
        try:
            text = self._text + self._decoder.decode(data, final=last)
        except UnicodeDecodeError as error:
            self._refuse(f"not UTF-8 ({error.reason})")
        place = _past_space(text, 0)
        if not self._opened and place < len(text):
            if text[place] != "[":
                self._refuse('a manifest is a JSON array: [{"prefix": "s3://BUCKET/…"}, "KEY", …]')
            self._opened, place = True, _past_space(text, place + 1)
        while self._opened and not self._closed and (match := _TOKEN.match(text, place)):
            token, follows = match.groups()
            uri = self._take(token)
            self._entry += 1
            place = _past_space(text, match.end())
            self._closed = follows == "]"
            if uri is not None:
                yield f"{self._name}: entry {self._entry}", uri
        self._text = text[place:]
        if self._closed and self._text:
            raise ConfigError(f"{self._name}: there is text behind the array's closing bracket")
        if len(self._text) > MAX_TOKEN or (last and not self._closed):
            self._refuse("expected an entry in quotes, then a comma or the closing bracket")
        if last and self._entry < 2:
            self._refuse("the manifest names no object: add one or more strings behind the prefix")

    def _take(self, token: str) -> str | None:
        """The URI of a suffix; None for the prefix."""
        try:
            value = json.loads(token)
        except (ValueError, RecursionError) as error:
            self._refuse(f"not JSON ({error})")
        if self.prefix is None:
            prefix = value.get("prefix") if isinstance(value, dict) else None
            if not isinstance(prefix, str) or len(value) != 1 or not _BUCKET.fullmatch(prefix):
                self._refuse(
                    'the first entry must be {"prefix": "s3://BUCKET/…"}, with the slash behind BUCKET'
                )
            self.prefix = prefix
            return None
        if not isinstance(value, str):
            self._refuse("only the first entry is an object; write a string, the rest of the key")
        try:
            parse_object_uri(self.prefix + value)
        except ConfigError as error:
            self._refuse(str(error))
        return self.prefix + value


def _past_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _keep(token: str) -> str:
    return token


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is no JSON")


_DECODER = json.JSONDecoder(parse_int=_keep, parse_float=_keep, parse_constant=_no_constant)
"""Numbers stay text: their values do not matter, and a long one would cost time or fail."""


class LineScanner:
    """JSON Lines: of each line the listed attributes, in the list's order (contract §4.2).

    The value of an attribute `…-ref` is the URI of an object, given as `str`. Any other is given as the
    bytes to stream: a string's own text, and of everything else the line's token as it is written.
    """

    def __init__(self, name: str, attributes: Sequence[str]) -> None:
        self._name = name
        self._attributes = tuple(attributes)
        self._rest: list[bytes] = []
        self._held = 0
        self._line = 0
        self._blank = 0
        """Number of the first blank line behind the last object; they are allowed at the end alone."""

    def _refuse(self, why: str, attribute: str | None = None) -> NoReturn:
        place = f"{self._name}: line {self._line}"
        raise ConfigError(
            f"{place}: {why}" if attribute is None else f"{place}: attribute {attribute!r} {why}"
        )

    def feed(self, data: bytes, *, last: bool) -> Iterator[tuple[str, list[bytes | str]]]:
        """The place and attributes of every line that is whole now. Raises ConfigError."""
        lines = data.split(b"\n")
        lines[0] = b"".join((*self._rest, lines[0])) if len(lines) > 1 or last else lines[0]
        if len(lines) > 1 or last:
            self._rest.clear()
            self._held = 0
        ends = lines if last else lines[:-1]
        for line in ends:
            self._line += 1
            if len(line) > MAX_LINE:
                self._refuse(f"longer than {MAX_LINE} bytes; is this a JSON Lines file?")
            if not line.strip(b" \t\r"):
                self._blank = self._blank or self._line
                continue
            if self._blank:
                self._line = self._blank
                self._refuse("blank, with lines behind it; remove it")
            yield f"{self._name}: line {self._line}", self._values(line)
        if not last and lines[-1]:
            self._rest.append(lines[-1])
            self._held += len(lines[-1])
            if self._held > MAX_LINE:
                self._line += 1
                self._refuse(f"longer than {MAX_LINE} bytes; is this a JSON Lines file?")

    def _values(self, line: bytes) -> list[bytes | str]:
        found = self._tokens(line)
        values: list[bytes | str] = []
        for name in self._attributes:
            if name not in found:
                self._refuse("is missing; every line needs all of AttributeNames", name)
            value, token = found[name]
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
        """By attribute, the value and the text that it is written with."""
        try:
            text = line.decode()
            place = _past_space(text, 0)
            if text[place : place + 1] != "{":
                self._refuse("not a JSON object; each line must be one")
            found: dict[str, tuple[Any, str]] = {}
            place = _past_space(text, place + 1)
            more = text[place : place + 1] != "}"
            while more:
                name, place = _DECODER.raw_decode(text, place)
                # Numbers decode as text too, so the token's own first character must tell.
                if not isinstance(name, str) or text[place - 1] != '"':
                    self._refuse("not JSON: the name of an attribute must be a string")
                place = _expect(text, place, ":")
                value, end = _DECODER.raw_decode(text, place)
                if name in found:
                    self._refuse("comes twice in this line", name)
                found[name] = value, text[place:end]
                place = _past_space(text, end)
                more = text[place : place + 1] == ","
                if more:
                    place = _past_space(text, place + 1)
            place = _expect(text, place, "}")
        except UnicodeDecodeError as error:
            self._refuse(f"not UTF-8 ({error.reason} at byte {error.start})")
        except (ValueError, RecursionError) as error:
            self._refuse(f"not JSON ({error})")
        if place != len(text):
            self._refuse("not JSON: there is text behind the object")
        return found


def _expect(text: str, place: int, mark: str) -> int:
    """The place behind `mark` and the space around it. Raises ValueError if it is not there."""
    place = _past_space(text, place)
    if text[place : place + 1] != mark:
        raise ValueError(f"expected {mark!r} at character {place + 1}")
    return _past_space(text, place + 1)
