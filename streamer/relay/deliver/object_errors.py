"""Errors of an object whose content cannot be delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.errors import CorruptObject, ErrorContext, SinkError
from streamer.scratch import scratch_folder

if TYPE_CHECKING:
    from streamer.formats.join import NotJoinable
    from streamer.plan import ObjectRef


def not_inflatable(ref: ObjectRef, what: str, offset: int) -> CorruptObject:
    """Return the error of an object that cannot be inflated. `offset`: byte of the object."""
    return CorruptObject(f"the object {what}", ErrorContext(ref.bucket, ref.key, offset))


def not_joinable(ref: ObjectRef, error: NotJoinable, *, inflated: bool) -> CorruptObject:
    """Return the error of an object that cannot be joined. `inflated`: its offset is one of content."""
    if inflated:
        return CorruptObject(
            f"{error}; at byte {error.offset} of what it inflates to", ErrorContext(ref.bucket, ref.key)
        )
    return CorruptObject(str(error), ErrorContext(ref.bucket, ref.key, error.offset))


def too_long(ref: ObjectRef, most: int) -> CorruptObject:
    """Return the error of a wrapped object of more than `most` bytes of content, which no record holds."""
    return CorruptObject(
        f"the object inflates to more than the {most} bytes that a RecordIO record holds; "
        "split it, or set RecordWrapperType: None",
        ErrorContext(ref.bucket, ref.key),
    )


def no_space(ref: ObjectRef, error: OSError) -> SinkError:
    """Return the error of an object that cannot be spooled."""
    return SinkError(
        f"cannot spool s3://{ref.bucket}/{ref.key} in {scratch_folder()}: {error.strerror}; an object "
        "that is inflated and wrapped is spooled whole: let TMPDIR name a directory with space for it"
    )
