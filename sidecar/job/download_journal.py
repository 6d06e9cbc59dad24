"""The journal of a download: how many bytes of each file are proven, for a start that continues it.

    penstock download 1 <boot id>      the machine's boot that the lines belong to
    <object's identity> <bytes>        the file has so many bytes of that object, from its first one on

The identity is a hash of bucket, key, version id, size, ETag and path, so a line proves nothing about another
version of the object. A line is appended after its bytes are written. Of several lines for one object the
largest counts; a line that is cut off counts for nothing.

Nothing is flushed to the disk during a download. After the sidecar is killed the kernel still has every byte,
but after the machine has crashed a file may have its size and not its bytes. So a journal of another boot
proves nothing, and the download begins anew.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from typing import TYPE_CHECKING

from streamer.errors import SinkError
from streamer.trailer import replace_file
from streamer.units import MIB

if TYPE_CHECKING:
    from streamer.plan import ObjectRef
    from streamer.relay.files.pieces import TargetFile

PROVE_EVERY = 64 * MIB
"""Bytes of a file after which its progress is noted, so that a large object is not fetched anew."""
_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9]{1,19})\n")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def identity(ref: ObjectRef, path: str) -> str:
    """Return the hash that stands for one version of an object at a path of its channel's directory."""
    fields = (ref.bucket, ref.key, ref.version or "", str(ref.size), ref.etag, path)
    return blake2b("\n".join(fields).encode(), digest_size=16).hexdigest()


def _heading() -> bytes | None:
    """Return the first line of a journal of this boot; None if the kernel does not name the boot."""
    try:
        with open(_BOOT_ID, "rb") as file:
            return b"penstock download 1 " + file.read().strip() + b"\n"
    except OSError:
        return None


def read_journal(path: str) -> dict[str, int]:
    """Return proven bytes by identity; nothing if there is no journal of this boot. Raises SinkError."""
    proven: dict[str, int] = {}
    heading = _heading()
    try:
        with open(path, "rb") as file:
            if file.readline() != heading:
                return proven
            for line in file:
                if match := _LINE.fullmatch(line):
                    name, count = match[1].decode(), int(match[2])
                    proven[name] = max(count, proven.get(name, 0))
    except FileNotFoundError:
        return proven
    except OSError as error:
        raise SinkError(f"cannot read {path}: {error.strerror}") from error
    return proven


class DownloadJournal:
    """A `streamer.relay.files.outlet.Journal` in a file."""

    def __init__(self, path: str, proofs: bytes) -> None:
        """Replace the journal at `path` by one with the lines `proofs`. Raises OSError."""
        self._path = path
        self._file: TargetFile | None = None
        self._proven = 0
        """Noted bytes of the file that is being written."""
        self._lines: list[bytes] = []
        replace_file(path, (_heading() or b"penstock download 1\n") + proofs)

    def note(self, file: TargetFile, end: int) -> None:
        """As `Journal.note`; notes whole files, and others every `PROVE_EVERY` bytes."""
        if file is not self._file:
            self._file, self._proven = file, file.first
        if end == file.size or end - self._proven >= PROVE_EVERY:
            self._proven = end
            self._lines.append(proof(file.note, end))

    def take(self) -> bytes:
        if not self._lines:
            return b""
        text = b"".join(self._lines)
        self._lines.clear()
        return text

    def append(self, text: bytes) -> None:
        if not text:
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(fd, text)  # a line that is cut off by a full disk counts for nothing
            finally:
                os.close(fd)
        except OSError as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from error


def proof(name: str, count: int) -> bytes:
    """Return the line that the first `count` bytes of an object are written."""
    return f"{name} {count}\n".encode()
