"""Where a build writes the index of a channel: a local file, or a copy that is stored in S3."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sidecar.config.index_place import index_path, index_uri
from sidecar.job.index_file import open_index
from sidecar.job.index_object import IndexObject, kept_in_s3
from sidecar.job.stored_index import kind_of_index
from streamer.aio import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.job.index_file import IndexFile
    from sidecar.job.index_object import IndexUpload
    from sidecar.job.index_objects import Access
    from streamer.formats.record_format import RecordFormat


@dataclass(frozen=True, slots=True)
class IndexTarget:
    """The index of a channel that a build writes; made by `index_target`."""

    name: str
    """Path or URI, for texts."""
    path: str
    object: IndexObject | None
    """The index in S3, of which `path` is a copy; None if it is a local file."""

    def kind(self) -> tuple[RecordFormat, int] | None:
        """Return record format and stride of the index there is; None if there is none. Raises SinkError."""
        return kind_of_index(self.path, self.name)

    @contextlib.asynccontextmanager
    async def open(
        self, record_format: RecordFormat, stride: int
    ) -> AsyncIterator[tuple[IndexFile, IndexUpload | None]]:
        """Open the file for writing; what stores it in S3, if it is a copy.

        Raises what `open_index` and, at the end of the block, `IndexObject.store` raise.
        """
        with open_index(self.path, record_format, stride, name=self.name) as file:
            if self.object is None:
                yield file, None
                return
            async with kept_in_s3(self.object, file) as upload:
                yield file, upload


async def index_target(place: str, channel: str, copies: str, access: Access) -> IndexTarget:
    """Return where the index of a channel is written.

    `place`: folder, or prefix of S3. `copies`: a folder into which an index in S3 is copied now. Raises
    SourceError, SinkError, ConfigError.
    """
    if (uri := index_uri(place, channel)) is None:
        path = index_path(place, channel)
        return IndexTarget(path, path, None)
    path, stored = index_path(copies, channel), IndexObject(uri, access)
    with await in_thread(partial(open, path, "xb", buffering=0)) as file:
        await stored.fetch(file.fileno())
    return IndexTarget(str(uri), path, stored)
