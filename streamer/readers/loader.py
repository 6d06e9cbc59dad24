"""`ResumableLoader`: a DataLoader of a `PipeIterableDataset` whose state is what the trainer has had.

    worker     (element, mark) -> collate -> queue ─┐
    worker     (element, mark) -> collate -> queue ─┴─> note the marks, return the element -> trainer

Workers fetch ahead, so what they have read says nothing; what counts is what has come out of this loader. The
marks of that (`streamer.readers.torch.progress`) are its state, of all workers together, so any other number
of them may go on with it. If `decode` or `collate_fn` remember anything, that is not part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from streamer.readers.torch import PipeIterableDataset
    from streamer.readers.torch.progress import Mark, Progress

__all__ = ["ResumableLoader"]


class ResumableLoader(DataLoader[Any]):  # type: ignore[misc] # torch is not followed by the checker
    """A DataLoader with `state_dict()`: what of the epoch has come out of it, whatever its workers hold.

    Takes what DataLoader takes; `batch_size` is None by default, for the dataset makes batches. One loop at a
    time. With `drop_last` records that the loader leaves out count as had when the loop ends, not before.
    """

    def __init__(
        self,
        dataset: PipeIterableDataset,
        *,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        collate = collate_fn or (default_convert if batch_size is None else default_collate)
        super().__init__(
            _Marked(dataset), batch_size=batch_size, collate_fn=_Apart(collate, batch_size), **options
        )
        self._pipe = dataset
        self._progress: Progress | None = None

    def __iter__(self) -> Iterator[Any]:
        # Before the workers begin, who take the epochs; they get copies of where it is to begin.
        self._progress = progress = self._begun()
        elements = super().__iter__()
        self._pipe.take_starts()
        return _noting(progress, elements)

    def state_dict(self) -> dict[str, Any]:
        """What the trainer has had of the epoch, for `load_state_dict` and `penstock run --resume`."""
        return (self._progress or self._begun()).state()

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Have the next loop begin where `state` was taken, with the rest of that epoch.

        The number of workers may be another. Raises ValueError if it is no state of this dataset's channels,
        or if workers that stay have begun without it. The loop raises ChannelError if the plan has changed
        since, unless `anyway`.
        """
        if self._iterator is not None:
            raise ValueError("the workers stay, and have begun already: load the state before the first loop")
        self._pipe.load_state_dict(state, anyway=anyway)
        self._progress = None

    def _begun(self) -> Progress:
        return self._pipe.progress(self._pipe.starts, self._pipe.channels)


def _noting(progress: Progress, elements: Iterator[tuple[Any, list[Mark]]]) -> Iterator[Any]:
    for element, marks in elements:
        for mark in marks:
            progress.note(mark)
        yield element
    progress.all_ended()


class _Marked(IterableDataset):  # type: ignore[misc] # as above
    """The elements of a dataset with their marks."""

    def __init__(self, dataset: PipeIterableDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[Any, Mark]]:
        return self._dataset.marked()


class _Apart:
    """Collates elements, and leaves their marks as they are."""

    def __init__(self, collate: Callable[[Any], Any], batch_size: int | None) -> None:
        self._collate = collate
        self._single = batch_size is None

    def __call__(self, found: Any) -> tuple[Any, list[Mark]]:
        if self._single:
            element, mark = found
            return self._collate(element), [mark]
        elements, marks = zip(*found, strict=True)
        return self._collate(list(elements)), list(marks)
