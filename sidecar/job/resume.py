"""Where channels begin: at epoch 0, where a keeper says that an earlier sidecar came to, or where told.

A keeper's word goes first, for a reader is in the middle of what it holds. What `--resume` says is where a
trainer's own state was saved; it holds for a channel that no reader has opened since. Either is of a plan,
and if the digest of today's is another, the bytes before and behind that place would be of different data.
Then a channel that a keeper holds fails (its reader is told, and its FIFO stays open), and `--resume` is
refused, unless `anyway` says that whoever runs the job knows better.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import ConfigError, SourceChanged
from streamer.plan import NOWHERE, Position
from streamer.relay.channel_spec import StartPosition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.helpers.keeper_client import Held
    from streamer.plan import Plan

KEYS = {"format", "channel", "epoch", "offset", "skip", "records", "digest"}
SEVERAL = {"channels", "ahead"}
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a trainer's reader was, by its `state_dict()`."""

    epoch: int
    offset: int
    """Bytes of the epoch before the record that it wants next, or a block of records that holds it."""
    digest: str


def parse_saved(text: str) -> dict[str, Saved]:
    """Positions by channel, of one state or a list of them, in JSON. Raises ConfigError.

    PyTorch's readers have states of several channels, which count as a list; see
    `streamer.readers.torch.progress`.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--resume is not JSON: {error}; save what state_dict() returns") from error
    saved: dict[str, Saved] = {}
    for state in found if isinstance(found, list) else [found]:
        several = isinstance(state, dict) and state.keys() >= SEVERAL
        for place in state["channels"] if several else [state]:
            channel, position = _saved(place)
            if channel in saved:
                raise ConfigError(f"--resume has two states of channel {channel}; leave one")
            saved[channel] = position
    return saved


def _saved(state: Any) -> tuple[str, Saved]:
    if not isinstance(state, dict) or state.keys() != KEYS or state["format"] != FORMAT:
        raise ConfigError(
            f"--resume takes what a reader's state_dict() returns, or a list of it, not {state!r}"
        )
    epoch, offset = state["epoch"], state["offset"]
    if not all(isinstance(number, int) and number >= 0 for number in (epoch, offset)):
        raise ConfigError(
            f"--resume: epoch and offset must be integers from 0 on, not {epoch!r} and {offset!r}"
        )
    return str(state["channel"]), Saved(epoch, offset, str(state["digest"]))


def load_saved(value: str) -> dict[str, Saved]:
    """As `parse_saved`, of a file unless `value` is JSON itself. Raises ConfigError."""
    if value.lstrip().startswith(("{", "[")):
        return parse_saved(value)
    try:
        with open(value, encoding="utf-8") as file:
            return parse_saved(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --resume {value}: {error}") from error


def begins(
    plans: Mapping[str, Plan], held: Mapping[str, Held], saved: Mapping[str, Saved], *, anyway: bool
) -> dict[str, StartPosition]:
    """Where every channel of `plans` begins. Raises ConfigError."""
    for source, names in (("the keeper holds", held), ("--resume has", saved)):
        if strangers := sorted(names.keys() - plans.keys()):
            raise ConfigError(
                f"{source} channel {strangers[0]}, and the job has no such Pipe channel; correct the job, "
                "or end what names it"
            )
    found: dict[str, StartPosition] = {}
    for name, plan in plans.items():
        kept, told = held.get(name), saved.get(name)
        if kept is not None and not kept.untouched:
            found[name] = _kept(plan, kept, anyway=anyway)
        elif told is not None:
            found[name] = _told(name, plan, told, anyway=anyway)
        else:
            found[name] = StartPosition()
    return found


def _kept(plan: Plan, held: Held, *, anyway: bool) -> StartPosition:
    position = held.position
    refused = None
    if held.digest != plan.digest and not anyway:
        refused = SourceChanged(
            f"the plan has changed since epoch {position.epoch} began (digest {held.digest[:16]}, now "
            f"{plan.digest[:16]}), so it cannot go on at byte {position.offset}; restore the objects and "
            "restart the sidecar, restart sidecar and trainer, or run with --resume-anyway"
        )
    elif position.mark.fetched == NOWHERE:
        refused = SourceChanged(
            f"objects of epoch {position.epoch} were refetched or skipped, so which of their bytes the "
            "reader has is not known; restart sidecar and trainer"
        )
    elif too_far := _beyond(plan, position):
        refused = SourceChanged(too_far)
    return StartPosition(position, held=True, refused=refused)


def _told(name: str, plan: Plan, saved: Saved, *, anyway: bool) -> StartPosition:
    if saved.digest != plan.digest and not anyway:
        raise ConfigError(
            f"--resume: channel {name} was saved under plan {saved.digest[:16]}, and now it is "
            f"{plan.digest[:16]}: other objects, or another order; restore them, begin anew, or add "
            "--resume-anyway"
        )
    position = Position(saved.epoch, saved.offset, skipped=saved.offset)
    if too_far := _beyond(plan, position):
        raise ConfigError(f"--resume: channel {name}: {too_far}")
    return StartPosition(position)


def _beyond(plan: Plan, position: Position) -> str | None:
    """What is wrong with a position after the epoch's end; where objects are rewritten that shows later."""
    total = plan.total_bytes(position.epoch)
    if plan.rewrites or position.offset <= total:
        return None
    return f"epoch {position.epoch} has {total} bytes, and byte {position.offset} is due"
