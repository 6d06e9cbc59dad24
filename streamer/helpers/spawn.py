"""Starts a helper process in a minimal interpreter: standard library only, no inherited environment.

A helper is a package with a `__main__` module, which is run by path in an interpreter that loads no
site-packages and makes no more importable than it needs. The sidecar's environment is not passed on, because
it may hold credentials.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def command(package: ModuleType, *arguments: str) -> list[str]:
    """Return the command line that runs `package` with these arguments."""
    return [sys.executable, "-I", "-S", os.path.join(package.__path__[0], "__main__.py"), *arguments]


def environment() -> dict[str, str]:
    """Return the few variables of our environment that the interpreter needs."""
    return {name: value for name, value in os.environ.items() if name in ("LD_LIBRARY_PATH", "LANG")}
