"""The file with a job's state that `penstock run --resume` reads: written whole, and read back.

A trainer saves its checkpoint first and this file after it. If it is killed between the two, the sidecar
begins before the readers, and they drop records that they have had. In the other order the FIFO would begin
after the readers' position.

`joint_states` makes one state of those of several FIFOs that one process reads.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.step_state import FILE_NAME, is_step_state
from streamer.trailer import channel_of_rank, replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamer.readers.core.position import ReaderPosition


def state_file(path: str | os.PathLike[str]) -> str:
    """Return the file that `--resume PATH` reads: `path`, or a file in it if it is a directory.

    Raises ValueError for an address of S3.
    """
    path = os.fspath(path)
    if path.startswith("s3://"):
        raise ValueError(
            f"{path} is no path; save the state in a file, and copy it to S3 after the checkpoint"
        )
    return os.path.join(path, FILE_NAME) if path.endswith("/") or os.path.isdir(path) else path


def save_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Replace the file of `--resume PATH` by `state`, whole. Raises OSError."""
    data = (json.dumps(state) + "\n").encode()
    replace_file(state_file(path), data, sync=True)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the state that `save_state` wrote; None if there is none yet. Raises OSError, ValueError."""
    name = state_file(path)
    try:
        with open(name, encoding="utf-8") as file:
            state = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{name} has {type(state).__name__}, not one state")  # noqa: TRY004 - as bad JSON is
    return state


def job_state(loader: Any) -> dict[str, Any]:
    """Return the state of a loader, which is that of the whole job. Raises ChannelError if it is not.

    If the loader has read nothing yet, waits until the sidecar offers the first epoch.
    """
    state: dict[str, Any] = loader.state_dict()
    if not is_step_state(state):
        with contextlib.suppress(TypeError):  # the channel has no steps
            len(loader)
            state = loader.state_dict()
    if not is_step_state(state):
        raise ChannelError(
            "the loader has no state of steps: divide its channel by record (GlobalBatch in Ranks), "
            "and give each FIFO a worker of its own"
        )
    return state


def joint_states(positions: Sequence[ReaderPosition]) -> list[dict[str, Any]]:
    """Return the states of channels, one for all rank FIFOs of a channel. Raises ChannelError.

    Several FIFOs of a channel with `Ranks.Workers` are all those of one rank.
    """
    by_record = {channel_of_rank(each.channel) for each in positions if each.rank or each.start}
    states: list[dict[str, Any]] = []
    ranks: dict[str, list[ReaderPosition]] = {}
    for position in positions:
        if (name := channel_of_rank(position.channel)) in by_record:
            ranks.setdefault(name, []).append(position)
        else:
            states.append(position.state())
    for name, read in ranks.items():
        fifos = _with_ranks(read)
        least = min(fifos, key=lambda each: each.next_step())
        epoch, step = least.next_step()
        if (after := next((each for each in fifos if each.is_after(epoch, step)), None)) is not None:
            raise ChannelError(
                f"the rank FIFOs of {name} that this process reads are at different steps, {least.channel} "
                f"at epoch {epoch}, step {step} and {after.channel} after it, so there is no state; give "
                "each a reader, or a worker, of its own, and batches of a rank's records in a global batch"
            )
        state = least.state()
        states.append(state if len(fifos) == 1 else state | {"epoch": epoch, "step": step})
    return states


def _with_ranks(positions: list[ReaderPosition]) -> list[ReaderPosition]:
    """Return the positions in the order of their FIFOs, also with the ranks of those not read yet."""
    rank = next((each.rank for each in positions if each.rank is not None), None)
    if rank is None:
        return positions
    fifos = sorted(positions, key=lambda each: (len(each.channel), each.channel))  # -10 comes after -2
    return [
        each if each.rank else replace(each, rank=replace(rank, worker=number % rank.workers))
        for number, each in enumerate(fifos)
    ]
