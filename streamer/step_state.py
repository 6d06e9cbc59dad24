"""State of a job whose ranks share a channel by record: an epoch, and its global batches that are done.

    {"format": 1, "channel": "train", "epoch": 2, "step": 1250,
     "order": {"digest": "793bbfff…", "objects": "a1b2…", "format": "TFRecord", "global_batch": 4096,
               "remainder": "drop", "seed": 7, "block": 1048576}}

The state is of the whole job: every rank writes the same document after the same step, and any number of
ranks that divides the global batch can begin there. The global batches from `step` on have not been taken.

`order.digest` is the digest of the order (docs/explanation/record-order.md). The other keys of `order` are
inputs of that digest; an error names those that differ. Trailers have the same object as `order`.

Readers that shuffle records in windows (`streamer.readers.core.shuffle`) add a key if the state is inside a
window: `shuffle`, with the window's `records` and `seed`, its first step (`begin`), and the records of a rank
in a step (`batch`). A job goes on there from step `begin` on, because the window is read again.

Both sidecar and readers use this module, so it imports nothing of either.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1
FILE_NAME = "penstock-state.json"
"""Name of a state's file in a directory."""
KEYS = frozenset({"format", "channel", "epoch", "step", "order"})
_SHUFFLE = "shuffle"
_SHUFFLE_KEYS = {"records", "seed", "begin", "batch"}

_INPUTS = {
    "objects": "the objects or their versions",
    "format": "the record format",
    "global_batch": "GlobalBatch",
    "remainder": "Remainder",
    "seed": "Seed",
    "block": "Block",
    "split": "Split",
    "mix": "Mix",
}
"""Name of each input of an order's digest."""


@dataclass(frozen=True, slots=True)
class StepState:
    """The global batches of a channel that a job has taken: those of earlier epochs, and some of `epoch`."""

    channel: str
    epoch: int
    step: int
    """Number of the next global batch of the epoch, from 0 on."""
    order: Mapping[str, Any]
    """Digest of the order, and its inputs."""
    shuffle: Mapping[str, int] | None = None
    """Window of shuffled records that the state is inside of; None if it is not inside one."""

    @property
    def begin(self) -> int:
        """Step from which on a reader needs the records."""
        return self.step if self.shuffle is None else self.shuffle["begin"]

    def document(self) -> dict[str, Any]:
        """Return the state as a dict for JSON or pickle."""
        document = {
            "format": FORMAT,
            "channel": self.channel,
            "epoch": self.epoch,
            "step": self.step,
            "order": dict(self.order),
        }
        return document if self.shuffle is None else document | {_SHUFFLE: dict(self.shuffle)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> StepState:
        """Parse a document with the keys of a state. Raises ValueError if a value is wrong."""
        channel, epoch, step, order = (document[key] for key in ("channel", "epoch", "step", "order"))
        shuffle = document.get(_SHUFFLE)
        if (
            document["format"] != FORMAT
            or not isinstance(channel, str)
            or not all(type(number) is int and number >= 0 for number in (epoch, step))
            or not is_order(order)
            or not (shuffle is None or _is_window(shuffle, step))
        ):
            raise ValueError(f"the state of the steps of a job is invalid: {dict(document)!r}"[:500])
        return cls(channel, epoch, step, order, shuffle)


def is_step_state(document: object) -> bool:
    """Return whether a parsed JSON document has the keys of a `StepState`."""
    return isinstance(document, dict) and document.keys() - {_SHUFFLE} == KEYS


def _is_window(value: object, step: int) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _SHUFFLE_KEYS
        and all(type(number) is int for number in value.values())
        and 0 <= value["begin"] < step
        and value["records"] > 0
        and value["batch"] > 0
    )


def is_order(value: object) -> bool:
    """Return whether `value` is the object `order` of a state or trailer."""
    return isinstance(value, dict) and isinstance(value.get("digest"), str)


def why_not_begin(
    saved: StepState, order: Mapping[str, Any] | None, steps: int, *, anyway: bool
) -> str | None:
    """Return why a job cannot begin at a state, and what to do; None if it can.

    `order`, `steps`: those of the present epoch; None if ranks do not share the channel by record. `anyway`:
    whether the order may be another one.
    """
    state = f"the state of channel {saved.channel}"
    if order is None:
        return (
            f"{state} has steps, and its ranks do not share it by record; set GlobalBatch of Ranks "
            "as when it was saved, or begin without the state"
        )
    if not anyway and (difference := order_difference(saved.order, order)) is not None:
        return (
            f"{state} was saved under another order of records: {difference}; restore what has changed, "
            "begin without the state, or begin anyway: --resume-anyway, and load_state_dict with anyway=True"
        )
    if saved.step >= steps:
        return (
            f"{state} is at step {saved.step}, and epoch {saved.epoch} has {counted(steps, 'step')}; begin "
            "without the state, or with one of this order"
        )
    return None


def order_difference(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Return how the order of a state differs from the present one; None if its batches are the same."""
    if saved["digest"] == present["digest"]:
        return None
    found = []
    for key, name in _INPUTS.items():
        was, now = json.dumps(saved.get(key)), json.dumps(present.get(key))
        if was == now:
            continue
        if key == "objects":
            found.append(f"{name} have changed")
        else:
            found.append(f"{name} was {_shown(was)} and is {_shown(now)}")
    return ", ".join(found) or "other records of the objects, by the record index or by Limit"


def _shown(text: str) -> str:
    return "not set" if text == "null" else text.strip('"')[:100]
