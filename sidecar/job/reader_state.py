"""The directory in which the readers count the epochs of each channel (contract §6.2)."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from streamer.directory import Directory
from streamer.errors import SinkError
from streamer.linux import descriptor_path
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.job.layout import Layout

_STATES = "pipe_state"
"""The directory, below the base directory."""


def set_reader_state(layout: Layout, epochs: Mapping[str, int], *, fifo_mode: int = 0o640) -> None:
    """Set the epoch that the readers of each channel open next. Raises SinkError.

    A counter of an earlier job would make readers wait for a FIFO that never exists. Epoch 0 needs none. The
    directory is made for all who may read the FIFOs. One that another user has made, such as a trainer that
    was root, gets another name if this user may not write there.
    """
    try:
        with Directory.at(layout.root) as root:
            if root.status(_STATES) is None:
                with contextlib.suppress(OSError):  # needed at an epoch after 0 alone; `mkdir` says why there
                    _make_states(root, fifo_mode)
            try:
                _write_states(root, epochs)
            except PermissionError:
                root.move(_STATES, root, f".{_STATES}.{time.time_ns()}")
                _make_states(root, fifo_mode)
                _write_states(root, epochs)
    except OSError as error:
        raise SinkError(f"cannot reset {error.filename}: {error.strerror}") from error


def _make_states(root: Directory, fifo_mode: int) -> None:
    root.mkdir(_STATES)
    readers = fifo_mode & 0o044
    with root.enter(_STATES) as states:
        os.chmod(descriptor_path(states.fd), 0o700 | readers | readers >> 1 | readers >> 2)


def _write_states(root: Directory, epochs: Mapping[str, int]) -> None:
    for channel, epoch in epochs.items():
        name = f".{channel}-pipe_mode-state"
        if epoch:
            root.mkdir(_STATES)
        with contextlib.suppress(FileNotFoundError), root.enter(_STATES) as states, states.errors(name):
            states.remove(f".{channel}-pipe_mode-lock")  # a trainer of another user could not open it
            if epoch:
                replace_file(name, b"%d" % epoch, dir_fd=states.fd)
            else:
                states.remove(name)
