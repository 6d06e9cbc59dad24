"""Stages of a channel some of whose bytes are seen as delivery takes them.

    part whose bytes are wanted ─▶ BufferStage ─▶ outlet     the observer sees each piece, in stream order
    any other part ──────────────▶ the channel's own stages   spliced, where the transport can

The observer sees the buffers that the bytes arrived in, so nothing is copied for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import ObjectRef, Part, Segment
    from streamer.relay.staging.buffers import BufferStages
    from streamer.relay.staging.stage import Stage, Stages
    from streamer.relay.statistics import ChannelCounters
    from streamer.schedule.budget import ChannelQuota


class Observer(Protocol):
    """What sees the bytes of objects. Its methods are called on the event loop and must return at once."""

    def wants(self, ref: ObjectRef) -> bool:
        """Return whether the bytes of this object are to be seen."""

    def see(self, each: Segment, data: memoryview) -> None:
        """See the next bytes of a range; the memory is valid during the call."""


class ObservedStages:
    """`Stages` that keep the parts that `observer` wants in user memory, and all others in `others`."""

    def __init__(self, others: Stages, read: BufferStages, observer: Observer) -> None:
        """`read`: of the same quota as `others`, or the same stages."""
        self._others = others
        self._read = read
        self._observer = observer

    @property
    def quota(self) -> ChannelQuota:
        return self._others.quota

    def part_size(self) -> int:
        return min(self._others.part_size(), self._read.part_size())

    def reserved_bytes(self, part: Part) -> int:
        return (self._read if self._wanted(part) else self._others).reserved_bytes(part)

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        if not self._wanted(part):
            return self._others.make(part, on_change=on_change, counters=counters)
        stage = self._read.make(part, on_change=on_change, counters=counters)
        stage.observe(self._observer.see)
        return stage

    def _wanted(self, part: Part) -> bool:
        return any(not isinstance(item, bytes) and self._observer.wants(item.object) for item in part.items)
