"""The tests on other versions: which are run, and which files are left out there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import versions
from tests.operate.promql import ROOT


def test_the_oldest_version_named_is_the_oldest_allowed() -> None:
    for directory in (".", "streamer"):
        oldest = versions.supported(directory)[0]
        assert versions.project(directory)["requires-python"] == f">={versions.dotted(oldest)}"
    assert versions.oldest_tensorflow() == "tensorflow==2.16.*"


def test_an_interpreter_is_found_by_its_version() -> None:
    own = sys.version_info[:2]
    found = versions.interpreter(own)
    assert found is not None
    code = "import sys; print(*sys.version_info[:2])"
    assert subprocess.check_output([found, "-c", code], text=True).split() == [str(each) for each in own]
    assert versions.interpreter((3, 99)) is None


def test_a_machine_without_other_pythons_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "interpreter", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["versions"])
    assert versions.main() == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "3.10" in first
    assert "nothing to run" in second


ABSENT = ["import absent_framework", "from absent_framework.inner import thing", "import wave"]
OTHER = ["import absent_dependency", "raise RuntimeError('no')"]


@pytest.mark.parametrize(("texts", "left_out"), [(ABSENT, 6), (OTHER, 0)])
def test_only_files_that_need_an_absent_framework_are_left_out(
    tmp_path: Path, texts: list[str], left_out: int
) -> None:
    """A file, and the file that imports it."""
    for number, text in enumerate(texts):
        name = f"test_other{number}"
        (tmp_path / f"{name}.py").write_text(f"FIRST = 1\n{text}\nLAST = 2\ndef test_other(): pass\n")
        (tmp_path / f"test_user{number}.py").write_text(
            f"from {name} import LAST\ndef test_user(): assert LAST\n"
        )
    output = check(tmp_path, status=0 if left_out else 2, left_out=left_out)
    assert left_out or f"{2 * len(texts)} errors" in output


@pytest.mark.parametrize(("texts", "left_out"), [(ABSENT, 6), (OTHER, 0)])
def test_only_tests_that_need_an_absent_framework_are_left_out(
    tmp_path: Path, texts: list[str], left_out: int
) -> None:
    """A test, and the test whose fixture needs it."""
    for number, text in enumerate(texts):
        for place in ("test", "fixture"):
            bodies = {"test": "pass", "fixture": "pass", place: text}
            (tmp_path / f"test_{place}{number}.py").write_text(
                "import pytest\n@pytest.fixture(scope='module')\n"
                f"def made():\n    {bodies['fixture']}\ndef test_other(made):\n    {bodies['test']}\n"
            )
    output = check(tmp_path, status=0 if left_out else 1, left_out=left_out)
    assert left_out or f"{len(texts)} failed, 1 passed, {len(texts)} errors" in output


def check(directory: Path, *, status: int, left_out: int) -> str:
    """Run the tests of a directory and one that passes; return what pytest has printed."""
    (directory / "test_here.py").write_text("def test_here(): pass\n")
    options = ["-p", "tests.kit.absent", "-p", "no:cacheprovider", f"--rootdir={directory}"]
    options += [
        f"--basetemp={directory / 'base'}",
        "--without=absent_framework",
        "--hide=wave",
        str(directory),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "--import-mode=importlib", *options],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert len(re.findall("without (absent_framework|wave)", done.stdout)) == left_out
    if left_out:
        assert f"1 passed, {left_out} skipped" in done.stdout
    return done.stdout
