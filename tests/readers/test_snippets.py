"""The Python examples of the readers' pages run as they stand."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

from tests.kit.warm_python import warm_python
from tests.readers import snippets

ROOT = Path(__file__).parent.parent.parent
NAMES = (
    "readers",
    "pytorch",
    "arrays-and-tables",
    "shuffling",
    "bad-records",
    "formats",
    "python",
    "tensorflow",
)
PAGES = [str(ROOT / f"docs/how-to/{name}.md") for name in NAMES]


@pytest.mark.timeout(300)  # imports of five frameworks
@pytest.mark.parametrize("framework", ["tensorflow", "jax", None])
def test_the_examples_of_the_pages_run(framework: Literal["tensorflow", "jax"] | None) -> None:
    pytest.importorskip("tensorflow")
    if any(find_spec(name) is None for name in ("torch", "pandas", "pyarrow")):
        pytest.skip("a library of the pages is not installed")
    python = sys.executable if framework == "jax" else warm_python(framework or "torch")
    script = f"from tests.readers.snippets import main; main({PAGES!r}, {framework!r})"
    ran = subprocess.run([python, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = [block for page in PAGES for block in snippets.blocks(page, framework)]
    assert ran.stdout.count("example ") == len(found) > 0, ran.stdout
