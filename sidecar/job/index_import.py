"""Rows from index files that other programs wrote: DALI's tfrecord2idx, RecordIO's im2rec.

    <folder>/<path of the object below the prefix>.idx, or with .idx in place of its suffix

A file that does not fit its object is an error by name. The rows of files that fit are compared with the
objects' bytes (`sidecar.job.index_check`) before they are added to the index.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sidecar.job.download_paths import relative_path
from sidecar.job.stored_index import read_file
from streamer.errors import ConfigError, CorruptObject, ErrorContext, SinkError
from streamer.formats.borders import BadRecord
from streamer.formats.foreign_index import read_dali, read_recordio
from streamer.formats.record_index import IndexedObject

if TYPE_CHECKING:
    from sidecar.job.index_objects import ChannelObjects, IndexedRef
    from streamer.formats.record_index import RecordIndex

SUFFIX = ".idx"
_READERS = {"TFRecord": read_dali, "RecordIO": read_recordio}


def import_rows(
    folder: str, objects: ChannelObjects, index: RecordIndex
) -> list[tuple[IndexedRef, IndexedObject]]:
    """Return a row for each of the objects that has an index file below `folder`, and none in the index.

    Raises ConfigError, SinkError, and CorruptObject for a file that does not fit its object.
    """
    record_format = index.format
    read = _READERS.get(record_format.kind)
    if read is None:
        raise ConfigError(
            f"--import takes index files of TFRecord and RecordIO objects, and the format is "
            f"{record_format}; leave --import out"
        )
    if not os.path.isdir(folder):
        raise ConfigError(f"--import {folder} is no directory of index files")
    rows = []
    for number in objects.without_row(index):
        each = objects[number]
        ref = each.ref
        text = _index_file(folder, ref.key, objects.prefix)
        if text is None:
            continue
        try:
            offsets = read(text, ref.size)
        except BadRecord as error:
            raise CorruptObject(
                f"the index file of the object does not fit it: {error}; remove the file from --import",
                ErrorContext(ref.bucket, ref.key, error.offset),
            ) from error
        indexed = offsets[:: index.stride]
        rows.append((each, IndexedObject(each.name, each.version, ref.size, len(offsets), ref.size, indexed)))
    return rows


def _index_file(folder: str, key: str, prefix: str) -> bytes | None:
    """Return the text of the index file of an object; None if there is none. Raises SinkError."""
    try:
        path = os.path.join(folder, relative_path(key, prefix))
    except ConfigError:  # the key cannot be the path of a file
        return None
    for name in (path + SUFFIX, os.path.splitext(path)[0] + SUFFIX):
        try:
            text = read_file(name)
        except OSError as error:
            raise SinkError(f"cannot read the index file {name}: {error.strerror}") from error
        if text is not None:
            return text
    return None
