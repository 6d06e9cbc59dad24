"""Child processes of a test. Standard library only: the tests of readers run where no other is installed."""

from __future__ import annotations

import subprocess
from typing import IO


def output_of(process: subprocess.Popen[str]) -> IO[str]:
    """Return the standard output of a process that was started with a pipe for it."""
    assert process.stdout is not None
    return process.stdout
