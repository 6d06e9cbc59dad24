"""How a process of our own is run that outlives the sidecar or stands beside it: with as little as can be.

It is one file of the standard library alone, run by path in an interpreter that loads no site-packages, and
it carries none of our environment, which may hold credentials.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def command(program: ModuleType, *told: str) -> list[str]:
    """What runs `program`, a module, with these arguments."""
    return [sys.executable, "-I", "-S", str(program.__file__), *told]


def environment() -> dict[str, str]:
    """What such an interpreter needs of ours."""
    return {name: value for name, value in os.environ.items() if name in ("LD_LIBRARY_PATH", "LANG")}
