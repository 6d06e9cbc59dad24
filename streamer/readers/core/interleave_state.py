"""The state of a reader of several FIFOs: the position of each, and whose turn it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.joint_states import joint_states
from streamer.step_state import is_step_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamer.readers.core.position import ReaderPosition

FORMAT = 1


@dataclass(slots=True)
class Turn:
    """Whose turn it is."""

    fifo: int = 0
    """Index of the FIFO that is next."""
    returned: int = 0
    """Good records of its block that were returned."""

    def move(self, fifo: int, returned: int = 0) -> None:
        """Make it the turn of another FIFO."""
        self.fifo, self.returned = fifo, returned


def state_of(positions: Sequence[ReaderPosition], turn: Turn, block: int | None) -> dict[str, Any]:
    """Return the state at these positions of all FIFOs. Raises ChannelError (`InterleavedReader`)."""
    states = joint_states(positions)
    if any(map(is_step_state, states)):
        if len(states) > 1:
            raise ChannelError(
                "these channels together have no state, because ranks share one of them by record and "
                "its state counts steps; read each channel by a reader of its own"
            )
        batch = next((each.rank.records for each in positions if each.rank is not None), 0)
        if block and batch % block:
            raise ChannelError(
                f"{states[0]['channel']} has no state, because a rank has {batch} records of a step, "
                f"which is no multiple of block={block}; give a block that divides it"
            )
        return states[0]
    if block and turn.returned == block:
        turn = Turn((turn.fifo + 1) % len(positions))
    state = {"format": FORMAT, "channels": states, "ahead": {}, "block": block}
    return state | ({"turn": turn.fifo, "returned": turn.returned} if block else {})


def saved_states(
    state: Mapping[str, Any], channels: list[str], block: int | None
) -> tuple[dict[str, Mapping[str, Any]], Turn]:
    """Return the states of the FIFOs in a state, by channel, and the turn. Raises ValueError."""
    if is_step_state(state):
        return dict.fromkeys(channels, state), Turn()
    keys = {"format", "channels", "ahead", "block"} | ({"turn", "returned"} if block else set())
    if (
        state.get("format") != FORMAT
        or state.get("block") != block
        or state.keys() != keys
        or not isinstance(state["channels"], list)
        or not all(isinstance(each, dict) for each in state["channels"])
    ):
        raise ValueError(
            f"the state is not what InterleavedReader.state_dict() returns with block={block}: "
            f"{dict(state)!r}"
        )
    saved: dict[str, Mapping[str, Any]] = {each.get("channel"): each for each in state["channels"]}
    if saved.keys() != set(channels):
        raise ValueError(f"the state is of channels {list(saved)}, not {channels}")
    limits = {"turn": len(channels), "returned": block} if block else {}
    if not all(type(state[name]) is int and 0 <= state[name] < end for name, end in limits.items()):
        raise ValueError(f"the state has no turn of these FIFOs: {dict(state)!r}")
    return saved, Turn(state["turn"], state["returned"]) if block else Turn()
