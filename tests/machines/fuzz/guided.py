"""One target under libFuzzer, as a process: its name, a directory of inputs, and options of libFuzzer."""

from __future__ import annotations

import sys

import atheris

if __name__ == "__main__":
    with atheris.instrument_imports(include=["streamer", "sidecar"]):
        from tests.machines.fuzz.targets import TARGETS
    atheris.Setup(["fuzz", *sys.argv[2:]], TARGETS[sys.argv[1]].run)
    atheris.Fuzz()
