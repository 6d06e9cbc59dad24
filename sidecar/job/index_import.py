"""Rows from index files that other programs wrote: DALI's tfrecord2idx, RecordIO's im2rec.

    <folder>/<path of the object below the prefix>.idx, or with .idx in place of its suffix

A file that does not fit its object is an error by name. The rows of files that fit are compared with the
objects' bytes (`sidecar.job.index_check`) before they are added to the index.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sidecar.job.download_paths import relative_path
from streamer.errors import ConfigError, CorruptObject, ErrorContext, SinkError
from streamer.formats.borders import BadRecord
from streamer.formats.foreign_index import read_dali, read_recordio
from streamer.formats.record_index import IndexedObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.job.index_objects import IndexedRef
    from streamer.formats.record_format import RecordFormat

SUFFIX = ".idx"
_READERS = {"TFRecord": read_dali, "RecordIO": read_recordio}


def import_rows(
    folder: str, objects: Sequence[IndexedRef], *, prefix: str, record_format: RecordFormat, stride: int
) -> list[IndexedObject]:
    """Return a row for each of the objects that has an index file below `folder`.

    `prefix`: that of the channel's keys. Raises ConfigError, SinkError, and CorruptObject for a file that
    does not fit its object.
    """
    read = _READERS.get(record_format.kind)
    if read is None:
        raise ConfigError(
            f"--import takes index files of TFRecord and RecordIO objects, and the format is "
            f"{record_format}; leave --import out"
        )
    if not os.path.isdir(folder):
        raise ConfigError(f"--import {folder} is no directory of index files")
    rows = []
    for each in objects:
        ref = each.ref
        path = os.path.join(folder, relative_path(ref.key, prefix))
        text = _text(path + SUFFIX)
        if text is None:
            text = _text(os.path.splitext(path)[0] + SUFFIX)
        if text is None:
            continue
        try:
            offsets = read(text, ref.size)
        except BadRecord as error:
            raise CorruptObject(
                f"the index file of the object does not fit it: {error}; remove the file from --import",
                ErrorContext(ref.bucket, ref.key, error.offset),
            ) from error
        rows.append(
            IndexedObject(each.name, each.version, ref.size, len(offsets), ref.size, offsets[::stride])
        )
    return rows


def _text(path: str) -> bytes | None:
    """Return the text of an index file; None if there is none. Raises SinkError."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise SinkError(f"cannot read the index file {path}: {error.strerror}") from error
