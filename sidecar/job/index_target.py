"""Where a build or a learner writes the index of a channel: a local file, or a copy that is stored in S3."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sidecar.config.index_place import index_path, index_uri
from sidecar.job.index_file import open_index
from sidecar.job.index_object import IndexUpload, fetch_index
from sidecar.job.stored_index import open_stored
from streamer.aio import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.job.index_file import IndexFile
    from sidecar.job.index_objects import Access
    from streamer.formats.record_format import RecordFormat
    from streamer.plan import S3Uri


@dataclass(frozen=True, slots=True)
class IndexTarget:
    """The index of a channel that is written; made by `index_target`."""

    path: str
    uri: S3Uri | None
    """The index in S3, of which `path` is a copy; None if it is a local file."""
    etag: str | None
    """ETag of the object that was copied; None if there was none."""
    access: Access

    @property
    def name(self) -> str:
        """Path or URI, for texts."""
        return self.path if self.uri is None else str(self.uri)

    def kind(self) -> tuple[RecordFormat, int] | None:
        """Return record format and stride of the index there is; None if there is none. Raises SinkError."""
        stored = open_stored(self.path, name=self.name)
        return None if stored is None or not stored.size else stored.kind()

    def upload(self, file: IndexFile) -> IndexUpload | None:
        """Return what stores the file in S3, if it is a copy."""
        return None if self.uri is None else IndexUpload(self.uri, self.etag, file, self.access)

    @contextlib.asynccontextmanager
    async def open(
        self, record_format: RecordFormat, stride: int
    ) -> AsyncIterator[tuple[IndexFile, IndexUpload | None]]:
        """Open the file for writing; what stores it in S3, if it is a copy.

        Raises what `open_index` and, at the end of the block, `IndexUpload.finish` raise.
        """
        with open_index(self.path, record_format, stride, name=self.name) as file:
            if (upload := self.upload(file)) is None:
                yield file, None
                return
            async with upload.at_end():
                yield file, upload


async def index_target(place: str, channel: str, copies: str, access: Access) -> IndexTarget:
    """Return where the index of a channel is written.

    `place`: folder, or prefix of S3. `copies`: a folder into which an index in S3 is copied now. Raises
    SourceError, SinkError, ConfigError.
    """
    if (uri := index_uri(place, channel)) is None:
        return IndexTarget(index_path(place, channel), None, None, access)
    path = index_path(copies, channel)
    with await in_thread(partial(open, path, "xb", buffering=0)) as file:
        return IndexTarget(path, uri, await fetch_index(uri, access, file.fileno()), access)
