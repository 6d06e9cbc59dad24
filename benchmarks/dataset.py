"""Makes the objects that an origin serves: files on a tmpfs, their listings, and their expected hashes.

Every chunk is a slice of one random pool at a different offset. So making gigabytes costs one copy, no two
chunks are equal, and a stream's hash reveals a chunk that is missing, doubled or out of place. The expected
hash is computed from the pool, not from the bytes that a server sent.

nginx makes a file's ETag of its time and size (`"<mtime>-<size>"`, both hexadecimal). The listing must have
the same ETags, because clients send them in `If-Match`. Every file has a different time, so a different ETag.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from isal import igzip

MIB = 1 << 20
_POOL = 32 * MIB
_CHUNK = MIB
_SHM = "/dev/shm"  # noqa: S108 - a tmpfs is what is wanted
_STRIDE = 1_000_003
"""Bytes between the offsets of two chunks; prime, so that no offset repeats before all have been used."""
_EMPTY = bytes.fromhex("1f8b08040000000000ff 0000 0300 0000000000000000")
"""A gzip member of no bytes, with an extra field of no bytes (RFC 1952 §2.3)."""
_MOST_EXTRA = 0xFFFF
_EPOCH = 1_750_000_000
"""Modification time of the first object in seconds; fixed, so that ETags are the same in every run."""


@contextlib.contextmanager
def directory_in_memory(prefix: str) -> Iterator[str]:
    """Make a directory, on a tmpfs if there is one, and remove it at the end of the block."""
    directory = tempfile.mkdtemp(prefix=prefix, dir=_SHM if os.path.isdir(_SHM) else None)
    os.chmod(directory, 0o755)  # noqa: S103 - nginx's workers may be another user; nothing here is secret
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """The objects of a scenario: `buckets` streams of `objects` objects of `size` bytes each."""

    name: str
    buckets: int
    objects: int
    size: int
    gzip: bool = False
    """Whether the objects are gzip files, which have `size` bytes of text when inflated."""

    @property
    def stored_size(self) -> int:
        """Bytes of each object as the origin has it."""
        return self.size * 7 // 20 if self.gzip else self.size

    @property
    def stream_bytes(self) -> int:
        return self.objects * self.size

    @property
    def total_bytes(self) -> int:
        return self.buckets * self.stream_bytes

    def bucket(self, index: int) -> str:
        """Return the name of a bucket: 3 to 63 characters, as S3 demands."""
        return f"{self.name}-{index:02d}"

    def key(self, index: int) -> str:
        return f"part-{index:05d}"

    def scaled(self, factor: float) -> Shape:
        """Return a shape of about `factor` times the bytes: smaller objects, or fewer if they are small."""
        if factor == 1:
            return self
        if self.size <= MIB:
            return replace(self, objects=max(1, round(self.objects * factor)))
        return replace(self, size=max(64 << 10, round(self.size * factor)))

    def describe(self) -> str:
        streams = "" if self.buckets == 1 else f"{self.buckets} streams of "
        size = f"{self.size / MIB:g} MiB" if self.size % MIB == 0 else f"{self.size / 1000:,.0f} kB"
        return f"{streams}{self.objects:,} × {size}{', compressed to 35 %' if self.gzip else ''}"


class DataSet:
    """A shape's objects under `root`: `objects/<bucket>/<key>` and `lists/<bucket>.xml`."""

    def __init__(self, shape: Shape, root: str) -> None:
        self.shape = shape
        self.root = root
        self._pool = _text() if shape.gzip else random.Random(0).randbytes(_POOL)  # noqa: S311 - not secret
        self._whole: dict[int, str] = {}

    def create(self) -> None:
        """Write all files. Raises OSError, such as no space left on the tmpfs."""
        os.makedirs(os.path.join(self.root, "lists"))
        number = 0
        for bucket in range(self.shape.buckets):
            directory = os.path.join(self.root, "objects", self.shape.bucket(bucket))
            os.makedirs(directory)
            entries = []
            for index in range(self.shape.objects):
                key, time = self.shape.key(index), _EPOCH + number
                path = os.path.join(directory, key)
                with open(path, "wb", buffering=0) as file:
                    pieces = self.pieces(bucket, index)
                    file.writelines(_members(pieces, self.shape.stored_size) if self.shape.gzip else pieces)
                os.utime(path, (time, time))
                entries.append((key, self.shape.stored_size, nginx_etag(time, self.shape.stored_size)))
                number += 1
            self.write_listing(self.shape.bucket(bucket), entries)

    def write_listing(self, bucket: str, entries: list[tuple[str, int, str]]) -> None:
        """Write the origin's listing of a bucket: (key, size, ETag) entries."""
        with open(os.path.join(self.root, "lists", f"{bucket}.xml"), "w", encoding="utf-8") as file:
            file.write(listing(bucket, entries))

    def remove(self) -> None:
        """Remove all files, which frees their memory."""
        shutil.rmtree(self.root)

    def expected_sha256(self, bucket: int, length: int) -> str:
        """Return the SHA-256, in hex, of a stream's first `length` bytes."""
        if length == self.shape.stream_bytes and bucket in self._whole:
            return self._whole[bucket]
        digest, left = hashlib.sha256(), length
        for index in range(self.shape.objects):
            if left <= 0:
                break
            for piece in self.pieces(bucket, index):
                digest.update(piece[:left])
                left -= min(left, len(piece))
        if length == self.shape.stream_bytes:
            self._whole[bucket] = digest.hexdigest()
        return digest.hexdigest()

    def pieces(self, bucket: int, index: int) -> Iterator[memoryview]:
        chunks = -(-self.shape.size // _CHUNK)
        first = (bucket * self.shape.objects + index) * chunks
        view, left = memoryview(self._pool), self.shape.size
        for number in range(first, first + chunks):
            offset = number * _STRIDE % (_POOL - _CHUNK)
            yield view[offset : offset + min(left, _CHUNK)]
            left -= _CHUNK


def _text() -> bytes:
    """Return a pool of words, which gzip compresses to about a third."""
    draw = random.Random(0)  # noqa: S311 - not secret
    words = [draw.randbytes(draw.randint(2, 6)).hex().encode() for _ in range(2000)]
    return b" ".join(draw.choices(words, k=_POOL // 8))[:_POOL].ljust(_POOL, b".")


def _members(pieces: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """Yield gzip members of the pieces, and empty ones after them up to `size` bytes in all."""
    left = size
    for piece in pieces:
        member = igzip.compress(piece, 2)
        left -= len(member)
        yield member
    if left < len(_EMPTY):
        raise ValueError(f"the objects' text takes {-left} bytes more than planned")
    while left:
        extra = min(left - len(_EMPTY), _MOST_EXTRA)
        if 0 < left - len(_EMPTY) - extra < len(_EMPTY):
            extra -= len(_EMPTY)
        left -= len(_EMPTY) + extra
        yield _EMPTY[:10] + extra.to_bytes(2, "little") + bytes(extra) + _EMPTY[12:]


def nginx_etag(mtime: int, size: int) -> str:
    """Return nginx's ETag of a static file, without quotes."""
    return f"{mtime:x}-{size:x}"


def listing(bucket: str, entries: list[tuple[str, int, str]], *, token: str = "") -> str:
    """Return a ListObjectsV2 response for (key, size, ETag) entries. `token`: of a next page."""
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2025-06-15T15:06:40.000Z</LastModified>"
        f"<ETag>&quot;{escape(etag)}&quot;</ETag><Size>{size}</Size>"
        "<ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType>"
        "<StorageClass>STANDARD</StorageClass></Contents>\n"
        for key, size, etag in entries
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket)}</Name><Prefix></Prefix><KeyCount>{len(entries)}</KeyCount>"
        f"<MaxKeys>{max(1000, len(entries))}</MaxKeys><IsTruncated>{str(bool(token)).lower()}</IsTruncated>\n"
        f"{more}{contents}</ListBucketResult>\n"
    )
