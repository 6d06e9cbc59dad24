"""Commands that cannot load a module of their own, because the machine refuses a system call."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LACKING = """
import errno, sys
what, module, *arguments = sys.argv[1:]

class Lacking:
    def find_spec(self, name, *_):
        if name == module:
            lacks = {"descriptor": OSError(errno.EMFILE, ""), "memory": MemoryError()}
            raise lacks.get(what, ImportError(f"cannot import {name}"))

sys.meta_path.insert(0, Lacking())
sys.argv[1:] = arguments
from sidecar.cli import main
main()
"""
"""`penstock` in a process that cannot open the file of a module, or has no descriptor for it."""


@pytest.mark.parametrize(
    ("what", "module", "arguments"),
    [
        ("module", "sidecar.commands.run", ("run", "-c", "job.yaml", "--json")),
        ("descriptor", "sidecar.commands.execute", ("exec", "-c", "job.yaml", "--json", "true")),
        ("descriptor", "sidecar.process.runner", ("doctor", "-c", "job.yaml")),
        ("module", "sidecar.process.runner", ("cat", "s3://b/train/")),
        ("memory", "sidecar.commands.run", ("run", "-c", "job.yaml", "--json")),
        ("memory", "sidecar.process.runner", ("doctor", "-c", "job.yaml")),
    ],
)
def test_a_command_that_cannot_load_a_module_ends_as_a_local_error(
    what: str, module: str, arguments: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", LACKING, what, module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
    assert ("memory ran out" if what == "memory" else "check the limits of open files") in done.stderr
    if "--json" in arguments:
        assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["ended"]
