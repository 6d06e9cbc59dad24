"""Runs tests on other versions of Python and TensorFlow than those of `.venv`: `make test-versions`.

    core     oldest and newest Python of penstock-sidecar  unit tests and readers, without frameworks
    readers  oldest Python of penstock-readers             readers and formats, with the oldest TensorFlow
    newest   newest Python of penstock-readers             the same, with the newest TensorFlow (--all)

With --core only the first line runs, in a minute. The second line takes two minutes more, on two cores.

The classifiers of a pyproject.toml name the supported versions of Python. The script looks for them on the
PATH, in /usr and in pyenv's directory, prints the versions that it does not find, and continues without them.
`make test` has run all tests with the Python of `.venv` and the newest TensorFlow, so no run repeats that.

Each run has a virtual environment in build/versions, which stays for the next time. Two runs go on at once.
The script leaves out and prints a run for which pip has no distribution.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / "build" / "versions"
TESTERS = ["pytest>=9", "pytest-asyncio>=1.5", "pytest-timeout>=2.4", "hypothesis>=6.150", "numpy"]
CORE = ["--editable", "./streamer", "--editable", ".", "blockbuster", "trustme"]
FRAMEWORKS = "google,jax,pandas,pyarrow,tensorflow,torch,webdataset"
CORE_TESTS = ["tests/unit", "tests/readers", "tests/test_arrows.py", "--ignore=tests/unit/test_patience.py"]
READER_TESTS = [
    # Skips tests/conftest.py, which needs the sidecar's dependencies and Python 3.11.
    *("--confcutdir=tests/readers", "--hypothesis-profile=ci", "-p", "tests.kit.late"),
    "--without=aiohttp,google,jax,pandas,pyarrow,torch,webdataset,yaml",
    *("tests/readers", "tests/unit/test_bulk.py", "tests/unit/test_formats.py", "tests/unit/test_tar.py"),
]
INSTALL_S, TESTS_S = 600, 600
Version = tuple[int, int]


@dataclass(frozen=True)
class Run:
    name: str
    version: Version
    python: str
    requirements: tuple[str, ...]
    options: tuple[str, ...]
    """Options of pytest: the tests to run, and the modules to leave out."""


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def project(directory: str) -> dict[str, Any]:
    text = (ROOT / directory / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def supported(directory: str) -> list[Version]:
    """Return the versions of Python in a distribution's classifiers, the oldest first."""
    names = [
        each.removeprefix("Programming Language :: Python :: 3.")
        for each in project(directory)["classifiers"]
    ]
    return sorted((3, int(name)) for name in names if name.isdigit())


def oldest_tensorflow() -> str:
    """Return the requirement `tensorflow==X.Y.*` for the lower bound of penstock-readers."""
    wanted = project("streamer")["optional-dependencies"]["tensorflow"]
    bounds = next(each for each in wanted if each.startswith("tensorflow"))
    return f"{bounds.partition(',')[0].replace('>=', '==')}.*"


def interpreter(version: Version) -> str | None:
    """Return a Python of this version that can make virtual environments; None if there is none."""
    name = f"python{dotted(version)}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(name), f"/usr/bin/{name}", f"/usr/local/bin/{name}"]
    places += sorted(map(str, pyenv.glob(f"{dotted(version)}.*/bin/{name}")))
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        try:  # pyenv has a command for each version, which fails unless the version is chosen
            done = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == dotted(version):
            return place
    return None


def planned(*, core_only: bool = False, everything: bool = False) -> list[Run]:
    """Return the runs that this machine allows. Prints the versions that it lacks."""
    sidecar, readers = supported("."), supported("streamer")
    pythons = {version: interpreter(version) for version in sorted({*sidecar, *readers})}
    lacking = [dotted(version) for version, python in pythons.items() if python is None]
    if lacking:
        print(f"versions: no Python {', '.join(lacking)} here that can make environments", flush=True)

    def runs(name: str, versions: set[Version], requirements: list[str], options: list[str]) -> list[Run]:
        return [
            Run(name, version, python, (*requirements, *TESTERS), tuple(options))
            for version in sorted(versions)
            if (python := pythons[version]) is not None
        ]

    of_sidecar = [version for version in sidecar if pythons[version]]
    of_readers = [version for version in readers if pythons[version]]
    core = {*of_sidecar[:1], *of_sidecar[-1:]} - {sys.version_info[:2]}
    made = runs("core", core, CORE, [f"--without={FRAMEWORKS}", *CORE_TESTS])
    if core_only:
        return made
    oldest = ["--editable", "./streamer[tensorflow]", oldest_tensorflow()]
    made += runs("readers", {*of_readers[:1]}, oldest, READER_TESTS)
    if everything:
        newest = ["--editable", "./streamer[tensorflow]"]
        made += runs("newest", {*of_readers[-1:]}, newest, READER_TESTS)
    return made


def carry_out(run: Run) -> tuple[bool, str]:
    """Do a run; return whether the tests pass, and the last lines of the output."""
    environment = ENVIRONMENTS / f"{run.name}-{dotted(run.version)}"
    python = environment / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    clean["TF_CPP_MIN_LOG_LEVEL"] = "2"
    began = time.monotonic()
    install = [[run.python, "-m", "venv", str(environment)]] if not python.exists() else []
    install.append(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *run.requirements]
    )
    for command in install:
        done = run_within(command, clean, INSTALL_S)
        if done.returncode:
            absent = re.search(r"No matching distribution found for (.+)", done.stdout)
            return (
                (True, f"left out: the package index has no {absent[1]}") if absent else (False, done.stdout)
            )
    installed = time.monotonic()
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "--durations=5",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.kit.absent",
    ]
    done = run_within([*command, f"--basetemp={environment / 'temporary'}", *run.options], clean, TESTS_S)
    took = f"{installed - began:.0f} s to install, {time.monotonic() - installed:.0f} s of tests"
    return done.returncode == 0, f"{done.stdout}{took}"


def run_within(
    command: list[str], environment: dict[str, str], limit: float
) -> subprocess.CompletedProcess[str]:
    """Run a command; return exit status and output. It has failed if it runs longer than `limit` seconds."""
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout
        text = output.decode(errors="replace") if isinstance(output, bytes) else str(output)
        return subprocess.CompletedProcess(command, 1, f"{text}\nended after {limit:.0f} s\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.versions", description=__doc__.splitlines()[0])
    parser.add_argument("--core", action="store_true", help="nothing with TensorFlow")
    parser.add_argument("--all", action="store_true", help="also the newest TensorFlow on the newest Python")
    parser.add_argument("--list", action="store_true", help="print the runs, and run nothing")
    chosen = parser.parse_args()
    runs = planned(core_only=chosen.core, everything=chosen.all)
    if not runs:
        print("versions: nothing to run, for this machine has no other supported Python than that of .venv")
    if chosen.list:
        for run in runs:
            print(f"versions: {run.name} on Python {dotted(run.version)}, {run.python}")
        return 0
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    with ThreadPoolExecutor(2) as threads:
        for run, (passed, text) in zip(runs, threads.map(carry_out, runs), strict=True):
            lines = text.strip().splitlines()
            title = f"versions: {run.name} on Python {dotted(run.version)}"
            print("\n".join([title, *(lines[-12:] if passed else lines[-150:])]), flush=True)
            failed += not passed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
