"""Start positions of channels: epoch 0, the position in a keeper, or the position of `--resume`.

The keeper's position comes first, because a reader is in the middle of the FIFO that the keeper holds. The
position of `--resume` is that of a saved `state_dict()`; it applies to a channel that no reader has opened.
A state of steps (`streamer.step_state`) is of all FIFOs of its channel, at any number of ranks.
Each position belongs to a plan. If the digest of the present plan differs, the bytes before and after the
position are of different data. Then a channel of the keeper fails with its FIFO held open, and `--resume` is
refused, unless `anyway` is set.

A sidecar or reader that ended while objects were being listed leaves a partial digest (`Plan.covers`), over
the entries that were known then. The position is continued if the present plan begins with the same entries,
and the position lies in them. The latest partial digest of a held FIFO is in its trailer.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ConfigError, SourceChanged
from streamer.plan import Position, parse_partial
from streamer.plan.folds import offset_of, records_before
from streamer.plan.record_plan import RecordPlan
from streamer.relay.channel_spec import StartPosition
from streamer.step_state import StepState, is_step_state, order_difference, why_not_begin
from streamer.trailer import read_trailer
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from streamer.helpers.keeper_client import Held
    from streamer.plan import Plan

KEYS = {"format", "channel", "epoch", "offset", "skip", "records", "digest"}
SEVERAL = {"channels", "ahead"}
OPTIONAL = {"number", "shuffle"}
FORMAT = 1
FAR = 1 << 31
"""An epoch that no job reaches."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Position of a reader in its `state_dict()`."""

    epoch: int
    offset: int
    """Offset in the epoch of the next record, or of the block that contains it."""
    digest: str


def parse_saved(text: str) -> dict[str, Saved | StepState]:
    """Parse one state or a list of states, in JSON. Raises ConfigError.

    Returns positions by FIFO, and states of steps by channel. A state of the PyTorch reader may have several
    channels (`streamer.readers.torch.progress`). Several ranks may have saved the same state of steps.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--resume is not JSON: {error}; save what state_dict() returns") from error
    saved: dict[str, Saved | StepState] = {}
    for entry in document if isinstance(document, list) else [document]:
        several = isinstance(entry, dict) and entry.keys() >= SEVERAL and isinstance(entry["channels"], list)
        for state in entry["channels"] if several else [entry]:
            channel, position = _parse_state(state)
            if position.epoch >= FAR:
                raise ConfigError(
                    f"--resume: channel {channel} has an epoch of {len(str(position.epoch))} digits, which "
                    "no job reaches; correct the state"
                )
            if channel in saved:
                position = _same(channel, saved[channel], position)
            saved[channel] = position
    return saved


def _same(channel: str, first: Saved | StepState, second: Saved | StepState) -> StepState:
    """Return the state of steps that two ranks have saved."""
    if isinstance(first, StepState) and isinstance(second, StepState):
        same_step = (first.epoch, first.step, first.shuffle) == (second.epoch, second.step, second.shuffle)
        if same_step and order_difference(first.order, second.order) is None:
            return first
    raise ConfigError(f"--resume has two states of channel {channel}; remove one")


def _parse_state(state: Any) -> tuple[str, Saved | StepState]:
    if is_step_state(state):
        try:
            steps = StepState.of(state)
        except ValueError as error:
            raise ConfigError(f"--resume: {error}; save what state_dict() returns") from error
        return steps.channel, steps
    if not isinstance(state, dict) or state.keys() - OPTIONAL != KEYS or state["format"] != FORMAT:
        raise ConfigError(
            f"--resume must be what a reader's state_dict() returns, or a list of such states, not {state!r}"
        )
    channel, epoch, offset, digest = (state[name] for name in ("channel", "epoch", "offset", "digest"))
    if not all(type(number) is int and number >= 0 for number in (epoch, offset)):
        raise ConfigError(
            f"--resume: epoch and offset must be integers from 0 on, not {epoch!r} and {offset!r}"
        )
    if not isinstance(channel, str) or not isinstance(digest, str):
        raise ConfigError(f"--resume: channel and digest must be texts, not {channel!r} and {digest!r}")
    return channel, Saved(epoch, offset, digest)


def saved_by_fifo(
    saved: Mapping[str, Saved | StepState],
    plans: Mapping[str, Mapping[str, Plan]],
    held: Mapping[str, Held],
    *,
    anyway: bool,
) -> dict[str, Saved]:
    """Return the position of every FIFO, with states of steps replaced by those of the channel's FIFOs.

    `plans`: of the FIFOs, by channel. If a reader has opened any FIFO of a channel that the keeper holds, the
    keeper has the positions of those that it holds, and the state is for the others alone: the earlier
    sidecar ended before it offered them. Raises ConfigError.
    """
    found: dict[str, Saved] = {}
    for name, state in saved.items():
        fifos = plans.get(name, {})
        if isinstance(state, Saved):
            if fifos and name not in fifos:
                raise ConfigError(
                    f"--resume: the state of channel {name} is of one FIFO, and the channel has Ranks now; "
                    "remove Ranks, or start without --resume"
                )
            found[name] = state
            continue
        begun = any(fifo in held and not held[fifo].untouched for fifo in fifos)
        for fifo, plan in fifos.items():
            if begun and fifo in held:
                continue
            if fifo in saved and fifo != name:
                raise ConfigError(f"--resume has states of channel {name} and of its FIFO {fifo}; remove one")
            found[fifo] = _at_step(plan, state, anyway=anyway)
        if not fifos:
            if any(name in of_channel for of_channel in plans.values()):
                raise ConfigError(
                    f"--resume: the state of channel {name} has steps, which are those of a whole channel, "
                    f"and {name} is one of several FIFOs; save what state_dict() returns"
                )
            found[name] = Saved(state.epoch, 0, "")  # refused by name: the job has no such channel
    return found


def _at_step(plan: Plan, state: StepState, *, anyway: bool) -> Saved:
    """Return the position of a step in one FIFO. Raises ConfigError."""
    why = why_not_begin(state, plan.record_order, plan.steps or 0, anyway=anyway)
    if why is not None or not isinstance(plan, RecordPlan):
        raise ConfigError(f"--resume: {why}")
    return Saved(state.epoch, offset_of(plan, state.epoch, state.begin), plan.digest)


def with_published_digests(held: Mapping[str, Held], directory: str) -> dict[str, Held]:
    """Return the keeper's FIFOs, with the digests in their trailers where the keeper's are partial."""
    found = {}
    for name, each in held.items():
        trailer = None
        if parse_partial(each.digest) is not None:
            with contextlib.suppress(OSError, ValueError):
                trailer = read_trailer(directory, name, each.epoch)
        found[name] = each if trailer is None else replace(each, digest=trailer.digest)
    return found


def over_before(plans: Mapping[str, Plan], held: Mapping[str, Held], directory: str) -> set[str]:
    """Return the channels whose last epoch the sidecar ended that left `held` to a keeper.

    Without `held` nothing shows that the trailers in `directory` are of this run of the job.
    """
    over = set()
    for name in plans.keys() - held.keys() if held else ():
        if (last := plans[name].epochs) is not None:
            with contextlib.suppress(OSError, ValueError):
                trailer = read_trailer(directory, name, last - 1)
                if trailer is not None and trailer.state in ("complete", "abandoned"):
                    over.add(name)
    return over


def start_positions(
    plans: Mapping[str, Plan],
    held: Mapping[str, Held],
    saved: Mapping[str, Saved],
    *,
    anyway: bool,
    over: Container[str] = (),
) -> dict[str, StartPosition]:
    """Return the start position of every channel of `plans`. Raises ConfigError.

    `over`: channels whose last epoch is over (`over_before`).
    """
    for source, names in (("the keeper holds", held), ("--resume has", saved)):
        if unknown := sorted(names.keys() - plans.keys()):
            raise ConfigError(
                f"{source} channel {unknown[0]}, and the job has no such Pipe channel; correct the job, "
                "the state, or end the keeper"
            )
    starts: dict[str, StartPosition] = {}
    for name, plan in plans.items():
        if name in over:
            starts[name] = StartPosition(Position(plan.epochs or 0))
            continue
        held_fifo, saved_position = held.get(name), saved.get(name)
        if held_fifo is not None and not held_fifo.untouched:
            starts[name] = _start_of_held(plan, held_fifo, anyway=anyway)
        elif saved_position is not None:
            starts[name] = _start_of_saved(name, plan, saved_position, anyway=anyway)
        else:
            starts[name] = StartPosition()
        position = starts[name].position
        if not plan.has_epoch(position.epoch):
            raise ConfigError(
                f"channel {name} would go on with epoch {position.epoch}, counted from 0, and the job has "
                f"Penstock.Epochs: {plan.epochs}; raise it if the training is not over"
            )
        if isinstance(plan, RecordPlan) and position.skipped and starts[name].refused is None:
            records = records_before(plan, position.epoch, position.skipped)
            starts[name] = replace(starts[name], records_skipped=records)
    return starts


def _start_of_held(plan: Plan, held: Held, *, anyway: bool) -> StartPosition:
    position = held.position
    refused = None
    covered = plan.covers(held.digest, position)
    if not anyway and not covered:
        was = _named(held.digest)
        refused = SourceChanged(
            f"the plan has changed since epoch {position.epoch} began ({was}, now "
            f"{plan.digest[:16]}), so the epoch cannot resume at byte {position.offset}; restore the objects "
            "and restart the sidecar, restart sidecar and trainer, or run with --resume-anyway"
        )
    elif problem := _beyond_end(plan, position):
        refused = SourceChanged(problem)
    return StartPosition(position, held=True, changed=not covered, refused=refused)


def _start_of_saved(name: str, plan: Plan, saved: Saved, *, anyway: bool) -> StartPosition:
    position = Position(saved.epoch, saved.offset, skipped=saved.offset)
    covered = plan.covers(saved.digest, position)
    if not covered and not anyway:
        raise ConfigError(
            f"--resume: channel {name} was saved under a plan with {_named(saved.digest)}, and the plan "
            f"is now {plan.digest[:16]}: the objects or their order have changed; restore them, start "
            "without --resume, or add --resume-anyway"
        )
    if problem := _beyond_end(plan, position):
        raise ConfigError(f"--resume: channel {name}: {problem}")
    partial = covered and parse_partial(saved.digest) is not None
    return StartPosition(position, digest=saved.digest if partial else "")


def _named(digest: str) -> str:
    """Return a digest for an error text."""
    partial = parse_partial(digest)
    if partial is None:
        return f"digest {digest[:16]}"
    count, first = partial
    return f"digest {first[:16]} over the {counted(count, 'object')} that were listed then"


def _beyond_end(plan: Plan, position: Position) -> str | None:
    """Return an error text if the position is after the epoch's end, else None.

    The length of a plan that rewrites objects is not known yet, so its error comes later.
    """
    total = plan.total_bytes(position.epoch)
    if plan.rewrites or position.offset <= total:
        return None
    return f"epoch {position.epoch} has {counted(total, 'byte')}, and the position is byte {position.offset}"
