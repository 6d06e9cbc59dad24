"""The folder of temporary files: TMPDIR, or else /tmp, /var/tmp, the working directory.

A container with a read-only root file system may have none.
"""

from __future__ import annotations

import tempfile

from streamer.errors import SinkError


def scratch_directory(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, which its context manager removes. Raises SinkError."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise SinkError(
            f"cannot make a temporary directory: {error.strerror}; let TMPDIR name a directory that this "
            "user may write, with free space"
        ) from error


def scratch_folder() -> str:
    """Return the folder of temporary files, for an error's text; `TMPDIR` if there is none."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return "TMPDIR"
