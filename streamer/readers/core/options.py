"""`ReadOptions`: the keyword arguments that the readers of a channel share.

`streamer.readers.tensorflow` has the incumbent's arguments instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from streamer.readers.core.config import Directories, directories
from streamer.readers.core.epochs import TIMEOUT

if TYPE_CHECKING:
    from streamer.readers.core.skipping import SkipPolicy


class ReadOptions(TypedDict, total=False):
    """Keyword arguments of every reader of a channel."""

    pipe_dir: str | None
    """Directory of the FIFOs; None for `input/data` below `$SAGEMAKER_BASE_DIR` (default /opt/ml)."""
    state_dir: str | None
    """Directory of the state file; None for `pipe_state` there."""
    config_dir: str | None
    """Directory of inputdataconfig.json; None for `input/config` there."""
    timeout: float
    """Seconds to wait for a FIFO, and then for its writer."""
    skip: SkipPolicy | None
    """Corrupt records and objects that may be left out of each epoch; `skipped` of the reader counts them."""
    key: bool
    """Whether each record has the key of its object, its number there, and the bucket (`KeyedRecord`); errors
    name them too. The sidecar must keep key lists (`RecordKeys`).
    """


class ShuffledReadOptions(ReadOptions, total=False):
    """Keyword arguments of a reader that can shuffle records."""

    shuffle: int | None
    """Records of a window, which are permuted in memory; None for the order of the FIFO. If ranks share the
    channel by record, a window has whole steps. States have the place in a window.
    """
    seed: int | None
    """Seed of the shuffle: equal seeds make equal orders. None for 0."""


DEFAULTS: ShuffledReadOptions = {
    "pipe_dir": None,
    "state_dir": None,
    "config_dir": None,
    "timeout": TIMEOUT,
    "skip": None,
    "key": False,
    "shuffle": None,
    "seed": None,
}


def with_defaults(given: ReadOptions, kind: Any = ReadOptions) -> ShuffledReadOptions:
    """Return options of `kind`, and the defaults of those not given.

    Raises TypeError for an option that `kind` does not have, as Python does for an unknown argument.
    """
    for name in given.keys() - kind.__optional_keys__:
        raise TypeError(f"a reader got an unexpected keyword argument '{name}'")
    return {**DEFAULTS, **given}


def paths_of(options: ReadOptions) -> Directories:
    """Return the directories that `with_defaults` has."""
    return directories(options["pipe_dir"], options["config_dir"], options["state_dir"])
