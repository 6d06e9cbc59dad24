"""Mixes the records of several channels by weights.

    channel "web"  ─ epoch after epoch ─┐
    channel "code" ─ epoch after epoch ─┴─ pick, record by record ─> one stream without an end

`streamer.shares` picks the channel of each record, so the share of every channel is right to within one
record at any time, and the same weights always give the same order. The order does not depend on timing,
because the mix waits for the channel that is next.

A channel whose epoch ends goes on with its next epoch, so no channel's records are left out. The stream ends
where the caller stops. That ends the epochs of all channels, as for `PipeReader`.
"""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.epochs import TIMEOUT
from streamer.readers.core.joint_states import load_all
from streamer.readers.core.plain import PipeReader
from streamer.shares import in_lowest_terms, next_source
from streamer.step_state import is_step_state
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from streamer.readers.core.skipping import SkipCounts, SkipPolicy

FORMAT = 1
_KEYS = {"format", "weights", "returned", "channels", "ahead"}


class MixedReader:
    """The records of several channels in the ratio of their weights, epoch after epoch, without an end.

    `weights`: by channel, a number above 0, taken exactly as it is written in decimal. Other arguments: as
    for `PipeReader`; `skip` is the budget of each channel, and `shuffle` is of each for itself. Each `iter()`
    begins the next epoch of every channel, and counts shares from there on.

    Raises ValueError for a weight that is no number above 0, and what `PipeReader` raises. Iterating raises
    what `PipeReader` raises, and ChannelError for an epoch without records.
    """

    def __init__(  # noqa: PLR0913 - public; options with defaults
        self,
        weights: Mapping[str, float],
        record_format: str = "RecordIO",
        *,
        epoch: int | None = None,
        pipe_dir: str | None = None,
        state_dir: str | None = None,
        config_dir: str | None = None,
        timeout: float = TIMEOUT,
        skip: SkipPolicy | None = None,
        key: bool = False,
        shuffle: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._weights = {name: _weight(name, weight) for name, weight in weights.items()}
        if not self._weights:
            raise ValueError("no channel to mix: give a weight by channel")
        self._readers = [
            PipeReader(
                name,
                record_format,
                epoch=epoch,
                pipe_dir=pipe_dir,
                state_dir=state_dir,
                config_dir=config_dir,
                timeout=timeout,
                skip=skip,
                key=key,
                shuffle=shuffle,
                seed=seed,
            )
            for name in self._weights
        ]
        self._returned = [0] * len(self._readers)
        """Records of each channel that the iteration has returned."""
        self._loaded = False
        """Whether the next iteration goes on with `_returned`."""

    def __iter__(self) -> Generator[Any, None, None]:
        resumed, self._loaded = self._loaded, False
        if not resumed:
            self._returned = [0] * len(self._readers)
        returned, weights = self._returned, in_lowest_terms(list(self._weights.values()))
        ones, whole = [1] * len(weights), sum(weights)
        with contextlib.ExitStack() as stack:
            records = [
                stack.enter_context(contextlib.closing(_endless(each, resumed=resumed)))
                for each in self._readers
            ]
            while True:
                channel = next_source(returned, ones, weights, whole)
                record = next(records[channel])
                returned[channel] += 1
                yield record

    @property
    def skipped(self) -> dict[str, SkipCounts]:
        """By channel, what `skip` has left out so far."""
        return {reader.channel: reader.skipped for reader in self._readers}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last record that was returned, for JSON and checkpoints.

        It has the state of each channel, so `penstock run --resume` takes it. Raises ChannelError if ranks
        share a channel by record, because the state of that channel is between two steps.
        """
        states = [reader.state_dict() for reader in self._readers]
        for reader, state in zip(self._readers, states, strict=True):
            if is_step_state(state):
                raise ChannelError(
                    f"a mix with {reader.channel} has no state, because ranks share that channel by record "
                    "and its state counts steps; let the sidecar deal it by object (Ranks without a batch)"
                )
        return {
            "format": FORMAT,
            "weights": self._weight_texts(),
            "returned": dict(zip(self._weights, self._returned, strict=True)),
            "channels": states,
            "ahead": {},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Begin the next iteration after the record of `state`.

        Raises ValueError if `state` is no state of these channels and weights. Iterating raises ChannelError
        if a channel's plan has changed since, unless `anyway`.
        """
        if (
            state.keys() != _KEYS
            or state["format"] != FORMAT
            or not isinstance(state["returned"], dict)
            or not isinstance(state["channels"], list)
            or not all(isinstance(each, dict) for each in state["channels"])
        ):
            raise ValueError(f"the state is not what MixedReader.state_dict() returns: {dict(state)!r}")
        weights, returned = self._weight_texts(), state["returned"]
        if state["weights"] != weights:
            raise ValueError(f"the state is of the weights {state['weights']}, and this reader has {weights}")
        saved = {each.get("channel"): each for each in state["channels"]}
        if not returned.keys() == saved.keys() == weights.keys():
            raise ValueError(f"the state lacks channels: it has {list(returned)} and {list(saved)}")
        if not all(type(count) is int and count >= 0 for count in returned.values()):
            raise ValueError(f"the state's records by channel are invalid: {returned!r}")
        load_all(self._readers, saved, anyway=anyway)
        self._returned, self._loaded = [returned[name] for name in weights], True

    def _weight_texts(self) -> dict[str, str]:
        return {name: str(weight) for name, weight in self._weights.items()}


def _weight(channel: str, weight: object) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ValueError(f"the weight of channel {channel} is {weight!r}: give a number above 0")
    return Fraction(str(weight))


def _endless(reader: PipeReader, *, resumed: bool) -> Generator[Any, None, None]:
    """Yield the records of one epoch after the other. `resumed`: the first one may have none left."""
    while True:
        empty = not resumed
        resumed = False
        for record in reader:
            empty = False
            yield record
        if empty and (reader.skipped.records or reader.skipped.objects):
            raise ChannelError(
                f"an epoch of channel {reader.channel} has no good record, so it cannot be mixed (skipped: "
                f"{counted(reader.skipped.records, 'corrupt record')} and "
                f"{counted(reader.skipped.objects, 'object')}); mend the objects, or leave the channel out "
                "of the weights"
            )
        if empty:
            raise ChannelError(
                f"an epoch of channel {reader.channel} has no record, so it cannot be mixed; give the "
                "channel objects, or leave it out of the weights"
            )
