"""Weights of mixed prefixes, which may change while a job runs.

    GET /weights     returns, for each channel with a `Mix`, weights, changes, and the next step of this host
    PATCH /weights   changes the weights of one channel from a step on; needs the admin token

    request ─▶ step: as given, or the first that no rank of this host has come to
    order of records + (step, weights) ─▶ new order, and the bytes of its epochs     in a thread
    a lock: no rank has come to the step ─▶ trailers with the new digest ─▶ walks go on in the new order

Trailers have the changes before the first byte that depends on them, so readers save them with their states,
and a sidecar that resumes takes them from there (`sidecar.job.resume`). The job file stays as it is.
Each host changes its own ranks. So with several hosts the step must be given, and be ahead of all of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from sidecar.config.mistakes import explain
from sidecar.config.mixing import Weight
from sidecar.config.model import Model
from sidecar.process.logs import log
from streamer.aio import in_thread
from streamer.errors import ConfigError, SinkError
from streamer.plan.mix import MOST_CHANGES, MixChange, changed, lowest_terms
from streamer.plan.mixed_order import MixedOrder

if TYPE_CHECKING:
    from sidecar.observe.state import JobState
    from streamer.plan.host_ranks import HostRanks

Number = Annotated[int, Field(ge=0, lt=1 << 62)]


class Change(Model):
    """Body of `PATCH /weights`."""

    model_config = ConfigDict(alias_generator=None)

    channel: str
    weights: Annotated[tuple[Weight, ...], Field(min_length=2)]
    """Of each prefix, in any unit."""
    epoch: Number | None = None
    step: Number | None = None
    """The first step with these weights. Unset: the first that no rank of this host has come to."""


class WeightChanger:
    """Changes the weights of one job, one change at a time."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._changing = asyncio.Lock()

    def current(self) -> dict[str, Any]:
        """Return the weights and changes of each channel with a `Mix`."""
        return {name: _described(ranks) for name, ranks in _mixed(self._state).items()}

    async def change(self, document: object) -> dict[str, Any]:
        """Change the weights of a channel; return its weights and changes, and the step of this one.

        Raises ConfigError, and SinkError if the machine refuses; the weights stay as they were then.
        """
        try:
            wanted = Change.model_validate(document)
        except ValidationError as error:
            raise ConfigError(f"weights: {explain(error, Change)}") from None
        if not self._state.started:
            raise ConfigError("the job has not started yet; try again when it is ready")
        ranks = _mixed(self._state).get(wanted.channel)
        if ranks is None:
            raise ConfigError(f"no Pipe channel with a Mix is called {wanted.channel!r}")
        weights = lowest_terms(wanted.weights)
        async with self._changing:
            change = await self._apply(wanted, ranks, weights)
        return {"epoch": change.epoch, "step": change.step} | _described(ranks)

    async def _apply(self, wanted: Change, ranks: HostRanks, weights: tuple[int, ...]) -> MixChange:
        order, name, given = ranks.order, wanted.channel, _given_step(wanted, ranks)
        assert isinstance(order, MixedOrder)  # noqa: S101 - of `_mixed`
        if len(weights) != len(order.sources):
            raise ConfigError(f"channel {name!r} mixes {len(order.sources)} prefixes; give a weight for each")
        ahead = 0
        while True:
            first = given or _steps_after(ranks, ahead)
            change = MixChange(*first, weights)
            changes = changed(order.mix.weights, order.changes, change)
            if changes == order.changes:  # these weights hold already
                return changes[-1] if changes else MixChange(0, 0, weights)
            if len(changes) > MOST_CHANGES:
                raise ConfigError(
                    f"channel {name!r} has {MOST_CHANGES} changes of its weights, which is the most; write "
                    "the weights into the job file, and begin a new job from the trainer's checkpoint"
                )
            if first >= ranks.following:
                new = await in_thread(_prepared, ranks, order, changes, first)
                if self._changed(ranks, new, first, name):
                    log.info(
                        "weights changed",
                        channel=name,
                        epoch=change.epoch,
                        step=change.step,
                        weights=list(weights),
                        order=ranks.order_digest[:16],
                    )
                    return change
            if given is not None:
                epoch, step = ranks.following
                raise ConfigError(
                    f"channel {name!r} has come past step {first[1]} of epoch {first[0]} on this host; the "
                    f"first that may change is step {step} of epoch {epoch}: give all hosts a later one"
                )
            ahead = 2 * ahead + 1

    def _changed(self, ranks: HostRanks, new: MixedOrder, first: tuple[int, int], channel: str) -> bool:
        """Change the order, unless a rank has come to the step. Raises SinkError."""
        try:
            return ranks.change(new, first, lambda: self._publish(channel))
        except SinkError:
            try:
                self._publish(channel)  # without the change
            except SinkError as error:
                raise SinkError(
                    f"{error}; some trailers of channel {channel} have weights that do not hold: make "
                    "room, and restart sidecar and trainer"
                ) from error
            raise

    def _publish(self, channel: str) -> None:
        """Publish the order in the trailers of the channel's FIFOs. Raises SinkError."""
        channels = [
            self._state.channels[fifo]
            for config in self._state.job.channels("Pipe")
            if config.channel_name == channel
            for fifo in self._state.job.fifos(config)
        ]
        for each in channels:
            each.publish_order()


def _mixed(state: JobState) -> dict[str, HostRanks]:
    """Return the ranks of each channel whose prefixes are mixed, once the FIFOs are offered."""
    return {name: ranks for name, ranks in state.host_ranks().items() if ranks.may_change}


def _given_step(wanted: Change, ranks: HostRanks) -> tuple[int, int] | None:
    """Return epoch and step of a change, if it names them. Raises ConfigError."""
    deal = ranks.deal
    if (wanted.epoch is None) != (wanted.step is None):
        raise ConfigError("give both epoch and step, or neither")
    if wanted.epoch is None or wanted.step is None:
        if deal.end - deal.first < deal.ranks:
            epoch, step = ranks.following
            raise ConfigError(
                f"channel {wanted.channel!r} has ranks on several hosts, which must change at one step: "
                f"give every host the same --at EPOCH:STEP; the first that this host can change is "
                f"step {step} of epoch {epoch}"
            )
        return None
    steps = deal.steps(ranks.order.records)
    if wanted.step >= steps:
        raise ConfigError(
            f"an epoch of channel {wanted.channel!r} has {steps} steps, and the step is {wanted.step}; "
            "give a step of the epoch, or step 0 of the next one"
        )
    return wanted.epoch, wanted.step


def _steps_after(ranks: HostRanks, ahead: int) -> tuple[int, int]:
    """Return epoch and number of the step so many after the first that no rank has come to."""
    epoch, step = ranks.following
    further, step = divmod(step + ahead, ranks.deal.steps(ranks.order.records))
    return epoch + further, step


def _prepared(
    ranks: HostRanks, order: MixedOrder, changes: tuple[MixChange, ...], first: tuple[int, int]
) -> MixedOrder:
    """Return the new order, once the bytes of those of its epochs are known that have begun or come next."""
    new = order.changed(changes)
    last = ranks.following[0] + 1
    for epoch in range(min(first[0], last), last + 1):
        ranks.sums_of(new, epoch)
    _ = ranks.described_order
    return new


def _described(ranks: HostRanks) -> dict[str, Any]:
    epoch, step = ranks.following
    order = ranks.order
    assert isinstance(order, MixedOrder)  # noqa: S101 - of `_mixed`
    return {
        "weights": list(order.weights(epoch, step)),
        "next": {"epoch": epoch, "step": step},
        "changes": [dict(zip(("epoch", "step", "weights"), each, strict=True)) for each in ranks.changes],
        "order": ranks.order_digest,
    }
