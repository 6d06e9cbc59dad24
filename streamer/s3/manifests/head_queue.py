"""Sends the HEADs that blocks of rows need, those of the first rows first, at most `HEADS` at a time.

A task sends one HEAD after the other and ends when no HEAD is due, so there is no task while pages of
listings find all objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.aio import TaskGroup
from streamer.errors import SourceError
from streamer.s3.pages.object_info import HEADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from streamer.plan import ObjectRef
    from streamer.s3.manifests.row_block import RowBlock
    from streamer.s3.manifests.wanted_ranges import NumberedItem
    from streamer.s3.pages.object_info import ObjectInspector


class HeadQueue:
    """The HEADs of one manifest's objects."""

    def __init__(
        self,
        inspector: ObjectInspector,
        blocks: Iterable[RowBlock],
        row_name: Callable[[int], str],
        *,
        tasks: TaskGroup,
        on_found: Callable[[int], None],
    ) -> None:
        """`blocks`: those with rows that wait, in order; they change. `row_name`: names a row in errors.

        `on_found` is called after each answer, with the number of items that it describes.
        """
        self._inspector = inspector
        self._blocks = blocks
        self._row_name = row_name
        self._tasks = tasks
        self._on_found = on_found
        self._running = 0
        self._same: dict[NumberedItem, Sequence[NumberedItem]] = {}
        """By object whose HEAD is due, the items of other rows that name the same object."""

    def leave(self, same: Sequence[NumberedItem]) -> None:
        """Note that these items, of which all name one object, need its HEAD. `start` sends it."""
        (block, item), *others = same
        if others:
            self._same[block, item] = others
        block.leave_to_head((item,))

    def start(self) -> None:
        """Start tasks for the HEADs that are due."""
        due = min(HEADS - self._running, sum(block.heads_due for block in self._blocks))
        for _ in range(due):
            self._running += 1
            self._tasks.create_task(self._send_due())

    async def _send_due(self) -> None:
        try:
            while (due := self._next_due()) is not None:
                await self.send((due, *self._same.pop(due, ())))
        finally:
            self._running -= 1

    def _next_due(self) -> tuple[RowBlock, int] | None:
        for block in self._blocks:
            if (item := block.next_head()) is not None:
                return block, item
        return None

    async def send(self, same: Sequence[NumberedItem]) -> None:
        """Find the object of these items by a HEAD. Raises SourceError with the row's name."""
        ref = await self.stat(*same[0])
        for block, item in same:
            block.answer(item, ref.size, ref.etag.encode())
        self._on_found(len(same))

    async def stat(self, block: RowBlock, item: int) -> ObjectRef:
        """Return what a HEAD says of one object. Raises SourceError with the row's name."""
        wanted = block.wanted(item)
        try:
            return await self._inspector.stat(wanted.bucket, wanted.key, wanted.version)
        except SourceError as error:
            row = self._row_name(block.row_of(item))
            raise type(error)(f"{row}: {error.message}", error.context) from error
