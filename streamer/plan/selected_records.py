"""The records that a split or a limit has selected: the input of a record order. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    from streamer.plan.split import Split


class SelectedRecords:
    """The selected records of a channel."""

    def __init__(
        self, counts: Sequence[int], bounds: Sequence[int], blocks: array[int] | None, split: Split | None
    ) -> None:
        self._counts = counts
        self.bounds = bounds
        """Of each object, the number of the first record from which on none is selected."""
        self.blocks = blocks
        """Numbers of the selected blocks of all objects, ascending; None: all that the bounds allow."""
        self._split = split

    @property
    def arranged(self) -> dict[str, Any]:
        """The inputs of the order's digest that a split adds."""
        if self._split is None:
            return {}
        split = self._split
        take = [[folds.start, folds.stop - 1] for folds in split.take]
        return {"split": {"of": split.of, "take": take, "seed": split.seed}}

    def lines(self) -> Iterable[bytes]:
        """Yield the lines of the order's digest: the records of each object, and those up to its bound."""
        for records, bound in zip(self._counts, self.bounds, strict=True):
            if records:
                yield b"%d\n" % records if bound == records else b"%d %d\n" % (records, bound)
