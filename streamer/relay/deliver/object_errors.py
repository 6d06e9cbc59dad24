"""Errors of an object whose content cannot be delivered."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from streamer.errors import CorruptObject, ErrorContext, SinkError
from streamer.formats.transform import BadContent
from streamer.scratch import scratch_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import ObjectRef


def not_inflatable(ref: ObjectRef, what: str, offset: int) -> CorruptObject:
    """Return the error of an object that cannot be inflated. `offset`: byte of the object."""
    return CorruptObject(f"the object {what}", ErrorContext(ref.bucket, ref.key, offset))


@contextlib.contextmanager
def transforming(ref: ObjectRef, *, inflated: bool) -> Iterator[None]:
    """Raise the error of a transform as one of the object `ref`: CorruptObject, or SinkError for its spool.

    `inflated`: the transform has the object's content, whose offsets are not those of the object.
    """
    try:
        yield
    except BadContent as error:
        offset, text = error.offset, str(error)
        if inflated and offset is not None:
            offset, text = None, f"{text}; at byte {offset} of what it inflates to"
        raise CorruptObject(text, ErrorContext(ref.bucket, ref.key, offset)) from error
    except OSError as error:
        raise SinkError(
            f"cannot spool s3://{ref.bucket}/{ref.key} in {scratch_folder()}: {error.strerror}; an object "
            "that is inflated and wrapped is spooled whole: let TMPDIR name a directory with space for it"
        ) from error
