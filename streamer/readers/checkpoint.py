"""`CheckpointedLoader`: the state of a loader in a checkpoint of `torch.distributed.checkpoint`.

Such a checkpoint has one value of each name, whichever rank saved it, and is loaded into values that are
already there. So the state is one string, and it must be that of the whole job: the ranks must share the
channel by record. Any number of ranks may load it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from streamer.readers.core.state_file import job_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.readers.loader import ResumableLoader

__all__ = ["CheckpointedLoader"]


class CheckpointedLoader:
    """A loader as a `Stateful` of `torch.distributed.checkpoint`.

    `state_dict()`, which loading a checkpoint calls too, waits until the sidecar offers the first epoch. It
    raises ChannelError if ranks do not share the loader's channel by record.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the job after the global batches that the loader has returned."""
        return {"state": json.dumps(job_state(self._loader))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the loader's next loop at the state. Raises ValueError as `ResumableLoader` does."""
        self._loader.load_state_dict(json.loads(state_dict["state"]))
