"""Every example as a user runs it: an S3 server, `penstock exec`, the program, and what it learns."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from examples.data import EXAMPLES
from examples.demo.processes import ROOT
from tests.kit.warm_python import warm_module

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_example_learns_what_its_data_hold(name: str) -> None:
    program = (Path(ROOT) / "examples" / f"{name}.py").read_text()
    framework: Literal["tensorflow", "torch"] = "tensorflow" if "import tensorflow" in program else "torch"
    command = [*warm_module("examples.run", framework), name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^accuracy (\S+)$", done.stdout, re.MULTILINE)
    assert len(found) == 1, done.stdout
    assert float(found[0]) > 0.95


def test_every_example_is_described() -> None:
    page = (Path(ROOT) / "examples" / "README.md").read_text()
    programs = {path.stem for path in (Path(ROOT) / "examples").glob("*.py")} - {"__init__", "data", "run"}
    assert programs == set(EXAMPLES)
    assert [name for name in EXAMPLES if f"`{name}.py`" not in page] == []
