"""Parses a `ManifestFile` piece by piece, without I/O.

    Gunzip        inflates data that begins with gzip's magic and passes other data through
    ArrayScanner  one JSON array, a prefix and suffixes; a row is one object's URI

A scanner yields lists of items, each the items of one or more whole rows. It keeps at most one token, of
bounded size. Every error is a ConfigError that names the manifest and the entry of the array, from 1.
`manifest_lines` parses an `AugmentedManifestFile`.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, NoReturn

from streamer.errors import ConfigError
from streamer.inflate import GZIP_MAGIC, Inflater
from streamer.plan import parse_object_uri
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PIECE = 1 * MIB
"""Bytes inflated at a time."""
MAX_TOKEN = 1 * MIB
"""Characters of one entry of a manifest; a key has at most 1,024 bytes."""


class Gunzip:
    """Inflates a manifest that begins with gzip's magic (RFC 1952 §2.3.1); any other passes as it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = b""
        """The first bytes, until there are enough to compare with the magic."""
        self._plain = False
        self._inflater: Inflater | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the text of `data` in bounded pieces. Raises ConfigError for damaged gzip."""
        if self._inflater is None and not self._plain:
            data, self._start = self._start + data, b""
            if len(data) < len(GZIP_MAGIC):
                self._start = data
                return
            if data.startswith(GZIP_MAGIC):
                self._inflater = Inflater(self._damaged)
            else:
                self._plain = True
        if self._inflater is None:
            yield data
            return
        self._inflater.feed(data)
        while pieces := self._inflater.pieces(MAX_PIECE):
            yield from pieces

    def finish(self) -> bytes:
        """Return the bytes that are left at the end. Raises ConfigError if a gzip member is not whole."""
        if self._inflater is not None:
            self._inflater.finish()
        return self._start

    def _damaged(self, what: str, offset: int) -> ConfigError:
        return ConfigError(f"{self._name} {what}, at byte {offset}; upload it again")


_SPACE = re.compile(r"[ \t\r\n]*")
# `(?>…)++`, not `(?:…)++`: before Python 3.11.5 that keeps the characters of its last try, which failed.
_STRING = r'"(?>[^"\\\x00-\x1f]++|\\.)*+"'
_TOKEN = re.compile(rf'(\{{(?>[^"{{}}]++|{_STRING})*+\}}|{_STRING})[ \t\r\n]*+([,\]])')
_PLAIN = r'"[^"\\\x00-\x1f]++"[ \t\r\n]*+,[ \t\r\n]*+'
_RUN = re.compile(rf"(?>{_PLAIN})++")
"""Entries without an escape, not empty, and followed by another: one parser call reads them all."""
_BUCKET = re.compile(r"s3://[^/]+/.*", re.DOTALL)


class ArrayScanner:
    """`[{"prefix": "s3://bucket/…"}, "suffix", …]`: each object's URI is prefix + suffix (contract §4.1)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self.prefix: str | None = None
        """The URI before every suffix; None until its entry has been read."""
        self._entry = 0
        """Number of entries read; 0 before the opening bracket too."""
        self._opened = self._closed = False

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self._name}: entry {self._entry + 1}: {why}")

    def row_name(self, row: int) -> str:
        """Return manifest and entry of a row, for errors. `row`: from 0."""
        return f"{self._name}: entry {row + 2}"

    def feed(self, data: bytes, *, last: bool) -> Iterator[list[bytes | str]]:
        """Yield the URIs of the entries that `data` completes. Raises ConfigError."""
        try:
            text = self._text + self._decoder.decode(data, final=last)
        except UnicodeDecodeError as error:
            self._refuse(f"not UTF-8 ({error.reason})")
        position = skip_space(text, 0)
        if not self._opened and position < len(text):
            if text[position] != "[":
                self._refuse('a manifest is a JSON array: [{"prefix": "s3://BUCKET/…"}, "KEY", …]')
            self._opened, position = True, skip_space(text, position + 1)
        while self._opened and not self._closed:
            if self.prefix is not None and (run := _RUN.match(text, position)):
                yield self._take_run(self.prefix, run[0])
                position = run.end()
            if (match := _TOKEN.match(text, position)) is None:
                break
            token, delimiter = match.groups()
            uri = self._take(token)
            self._entry += 1
            position = skip_space(text, match.end())
            self._closed = delimiter == "]"
            if uri is not None:
                yield [uri]
        self._text = text[position:]
        if self._closed and self._text:
            raise ConfigError(f"{self._name}: there is text after the array's closing bracket")
        if last and not self._opened and not self._text:
            self._refuse("the manifest is empty")
        if len(self._text) > MAX_TOKEN or (last and not self._closed):
            self._refuse("expected an entry in quotes, then a comma or the closing bracket")
        if last and self._entry < 2:
            self._refuse("the manifest names no object: add one or more strings after the prefix")

    def _take_run(self, prefix: str, text: str) -> list[bytes | str]:
        """Return the URIs of a run of entries, each with a comma after it."""
        suffixes = json.loads(f"[{text[: text.rindex(',')]}]")
        uris: list[bytes | str] = [prefix + suffix for suffix in suffixes]
        # All are of one bucket and not empty, so the first decides, unless there may be version ids.
        first = self._entry
        for self._entry, uri in enumerate(uris if "?" in prefix + text else uris[:1], first):
            self._check(str(uri))
        self._entry = first + len(uris)
        return uris

    def _take(self, token: str) -> str | None:
        """Return the URI of an entry with a suffix; None for the entry with the prefix."""
        try:
            value = json.loads(token)
        except (ValueError, RecursionError) as error:
            self._refuse(f"not JSON ({error})")
        if self.prefix is None:
            prefix = value.get("prefix") if isinstance(value, dict) else None
            if not isinstance(prefix, str) or len(value) != 1 or not _BUCKET.fullmatch(prefix):
                self._refuse(
                    'the first entry must be {"prefix": "s3://BUCKET/…"}, with the slash after BUCKET'
                )
            self.prefix = prefix
            return None
        if not isinstance(value, str):
            self._refuse("only the first entry may be an object; write the rest of the key as a string")
        self._check(self.prefix + value)
        return self.prefix + value

    def _check(self, uri: str) -> None:
        """Raise ConfigError, with the entry, unless the URI is of an object."""
        try:
            parse_object_uri(uri)
        except ConfigError as error:
            self._refuse(str(error))


def skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is no space of JSON."""
    match = _SPACE.match(text, position)
    return match.end() if match else position
