"""Other users of the machine, as tests play them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

NOBODY = 65534


@functools.cache
def why_not_two() -> str:
    """Why no program can run as another user here; empty if one can."""
    if os.geteuid():
        return "only root can be two users"
    try:
        subprocess.run(
            [sys.executable, "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return f"{sys.executable} lies where other users may not go"
    return ""


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
two_users = pytest.mark.skipif(bool(why_not_two()), reason=why_not_two() or "it can be done")
