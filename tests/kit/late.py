"""Imports of a test module that happen before its first test and not when the module is collected.

Every process of `make test` collects all tests. The import of TensorFlow and PyTorch takes as much CPU time
as the rest of the collection, and 600 MB. So a module that needs one of them says:

    from tests.kit.late import LATE

    if LATE:
        import tensorflow as tf

The block is not executed when the module is imported. A fixture executes it before the module's first test.
What is evaluated at import, such as a decorator or a default, cannot use the names of the block.

The modules of one framework are run by few processes (`group_of`).
"""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

LATE = False
"""Guards a block of late imports. Type checkers read the block."""

# TensorFlow's C++ log: errors only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

_IMPORT = re.compile(
    r"^ +(?:import|from) (?:streamer\.readers\.)?(tensorflow|torch|webdataset)\b"
    r"|importorskip\(\"(tensorflow|torch)\"\)",
    re.MULTILINE,
)
"""A late import of a framework: in a block of `LATE`, or in a test."""


@pytest.fixture(scope="module", autouse=True)
def late_imports(request: pytest.FixtureRequest) -> None:
    """Execute the module's late imports. `tests.kit.absent` leaves out tests without what they need."""
    load(request.module)


def load(module: ModuleType) -> None:
    """Execute the late imports of `module`. Raises ModuleNotFoundError for what is not installed."""
    if module.__file__ is None or "LATE" not in vars(module):
        return
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "LATE":
            code = compile(ast.Module(body=node.body, type_ignores=[]), module.__file__, "exec")
            exec(code, vars(module))


@functools.cache
def framework_of(path: Path) -> str | None:
    """Return the framework that the tests of a file import, TensorFlow if both; None if neither."""
    found = {name for match in _IMPORT.finditer(path.read_text(encoding="utf-8")) for name in match.groups()}
    if "tensorflow" in found:
        return "tensorflow"
    return "torch" if found else None  # webdataset imports it


@functools.cache
def group_of(path: Path) -> str | None:
    """Return the name of the group that a file is in; None if it is in none. One process runs a group.

    TensorFlow's files are two groups: in one process they take 4.5 minutes, half of the time of `make test`.
    The files whose programs use a framework are a third: each process would start `tests.kit.warm_python`.
    """
    framework = framework_of(path)
    if framework == "tensorflow" and not path.stem.startswith("test_tensorflow"):
        return "tensorflow and others"
    if framework is None and "tests.kit.warm_python" in path.read_text(encoding="utf-8"):
        return "programs with a framework"
    return framework
