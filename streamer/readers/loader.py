"""`ResumableLoader`: a DataLoader of a `PipeIterableDataset` that saves what the trainer has received.

    worker     (element, origin) -> collate -> queue ─┐
    worker     (element, origin) -> collate -> queue ─┴─> add the origins, return the element -> trainer

Workers read ahead, so the loader makes the state from the origins of the elements that it has returned
(`streamer.readers.torch.progress`), from all workers together. So a loader with another number of workers can
resume from it. The state does not include anything that `decode` or `collate_fn` keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from streamer.readers.torch import BATCHED_TWICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from streamer.readers.torch import PipeIterableDataset
    from streamer.readers.torch.progress import ElementOrigin, Progress

__all__ = ["ResumableLoader"]


class ResumableLoader(DataLoader[Any]):  # type: ignore[misc] # torch is not followed by the checker
    """A DataLoader whose `state_dict()` has the elements of the epoch that it has returned.

    Takes the arguments of DataLoader; `batch_size` is None by default, since the dataset makes batches. Only
    one loop may run at a time. Records that `drop_last` leaves out count as received when the loop ends.
    Raises ValueError if it would make batches of batches.
    """

    def __init__(
        self,
        dataset: PipeIterableDataset,
        *,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        if dataset.batch_size is not None and batch_size is not None and collate_fn is None:
            raise ValueError(BATCHED_TWICE.format(dataset.batch_size))
        collate = collate_fn or (default_convert if batch_size is None else default_collate)
        super().__init__(
            _WithOrigins(dataset),
            batch_size=batch_size,
            collate_fn=_CollateElements(collate, batch_size),
            **options,
        )
        self._pipe = dataset
        self._progress: Progress | None = None

    def __iter__(self) -> Iterator[Any]:
        # Before the workers start, because they take the epochs and get copies of the dataset's starts.
        self._progress = progress = self._no_progress()
        elements = super().__iter__()
        self._pipe.take_starts()
        return _count(progress, elements)

    def state_dict(self) -> dict[str, Any]:
        """Return what the trainer has received, for `load_state_dict` and `penstock run --resume`."""
        return (self._progress or self._no_progress()).state()

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Begin the next loop at the position `state`, with the rest of that epoch.

        The number of workers may differ. Raises ValueError if `state` is no state of this dataset's channels,
        or if persistent workers have already started. The loop raises ChannelError if the plan has changed
        since, unless `anyway`.
        """
        if self._iterator is not None:
            raise ValueError("persistent workers have already started; load the state before the first loop")
        self._pipe.load_state_dict(state, anyway=anyway)
        self._progress = None

    def _no_progress(self) -> Progress:
        channels = self._pipe.channels
        shared = self.num_workers > len(channels)
        return self._pipe.progress(self._pipe.starts, channels, shared=shared)


def _count(progress: Progress, elements: Iterator[tuple[Any, list[ElementOrigin]]]) -> Iterator[Any]:
    for element, origins in elements:
        for origin in origins:
            progress.add(origin)
        yield element
    progress.end_epochs()


class _WithOrigins(IterableDataset):  # type: ignore[misc] # as above
    """The elements of a dataset with their origins."""

    def __init__(self, dataset: PipeIterableDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[Any, ElementOrigin]]:
        return self._dataset.with_origins()

    def __len__(self) -> int:
        return len(self._dataset)

    def __bool__(self) -> bool:
        return True


class _CollateElements:
    """Collates elements and passes their origins on."""

    def __init__(self, collate: Callable[[Any], Any], batch_size: int | None) -> None:
        self._collate = collate
        self._single = batch_size is None

    def __call__(self, batch: Any) -> tuple[Any, list[ElementOrigin]]:
        if self._single:
            element, origin = batch
            return self._collate(element), [origin]
        elements, origins = zip(*batch, strict=True)
        return self._collate(list(elements)), list(origins)
