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


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import absent_framework", 0),
        ("from absent_framework.inner import thing", 0),
        ("import wave", 0),
        ("import absent_dependency", 2),
        ("raise RuntimeError('no')", 2),
    ],
)
def test_only_files_that_need_an_absent_framework_are_left_out(
    tmp_path: Path, text: str, status: int
) -> None:
    (tmp_path / "test_other.py").write_text(f"FIRST = 1\n{text}\nLAST = 2\ndef test_other(): pass\n")
    (tmp_path / "test_user.py").write_text("from test_other import LAST\ndef test_user(): assert LAST\n")
    check(tmp_path, status, files=2)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import absent_framework", 0),
        ("from absent_framework.inner import thing", 0),
        ("import wave", 0),
        ("import absent_dependency", 1),
        ("assert False", 1),
    ],
)
@pytest.mark.parametrize("place", ["test", "fixture"])
def test_only_tests_that_need_an_absent_framework_are_left_out(
    tmp_path: Path, text: str, status: int, place: str
) -> None:
    bodies = {"test": "pass", "fixture": "pass", place: text}
    (tmp_path / "test_other.py").write_text(
        "import pytest\n@pytest.fixture(scope='module')\n"
        f"def made():\n    {bodies['fixture']}\ndef test_other(made):\n    {bodies['test']}\n"
    )
    check(tmp_path, status, files=1)


def check(directory: Path, status: int, files: int) -> None:
    """Run the tests of a directory. If `status` is 0, one passed and one of each other file was left out."""
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
        [sys.executable, "-m", "pytest", "-q", "-rs", "--import-mode=importlib", *options, str(directory)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    left_out = re.findall("without (absent_framework|wave)", done.stdout)
    if status == 0:
        assert len(left_out) == files
        assert f"1 passed, {files} skipped" in done.stdout
    else:
        assert not left_out
