"""The source distribution: it has every file of the repository, and the tests run from it.

Whoever packages Penstock for a system builds from the source distribution and runs the tests there.
"""

from __future__ import annotations

import email
import glob
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import hatchling.build
import pytest

ROOT = Path(__file__).parent.parent
SAMPLE = "(test_formats.py or test_distributions.py or test_stream.py) and not loads"
"""Tests of the library, of the tree's files and of a reader; none that starts the sidecar."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the source distribution, built from this tree and unpacked."""
    place = tmp_path_factory.mktemp("sdist")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        name = hatchling.build.build_sdist(str(place))
    finally:
        os.chdir(before)
    with tarfile.open(place / name) as archive:
        # Python before 3.11.4 has no filters, and no method of it has the argument.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(place)
    root = place / name.removesuffix(".tar.gz")
    lend_bytecode(root)
    return root


def lend_bytecode(unpacked: Path) -> None:
    """Copy the bytecode of this tree beside equal sources, which then need not be compiled again."""
    for source in unpacked.rglob("*.py"):
        ours = ROOT / source.relative_to(unpacked)
        if source.read_bytes() != ours.read_bytes():
            continue
        shutil.copystat(ours, source)  # bytecode names the time and the size of its source
        for compiled in (ours.parent / "__pycache__").glob(f"{glob.escape(ours.stem)}.*.pyc"):
            kept = source.parent / "__pycache__" / compiled.name
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(compiled, kept)


@pytest.mark.parametrize("directory", [".", "streamer"])
def test_the_long_description_has_no_link_that_breaks(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package index renders it far from the repository: only links with an address work there."""
    monkeypatch.chdir(ROOT / directory)
    with zipfile.ZipFile(tmp_path / hatchling.build.build_wheel(str(tmp_path))) as wheel:
        (metadata,) = (wheel.read(name) for name in wheel.namelist() if name.endswith("/METADATA"))
    message = email.message_from_bytes(metadata)
    payload = message.get_payload(decode=True)
    assert isinstance(payload, bytes)
    text = payload.decode()
    assert message["Description-Content-Type"].startswith("text/markdown")
    assert len(text) > 500
    targets = re.findall(r"\]\(([^)]*)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert [target for target in targets if not target.startswith("https://")] == []


def run(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    command += ["--basetemp", str(unpacked.parent / "temporary")]
    # Without the variables of the pytest that runs this test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the repository is not here to compare with")
def test_the_source_distribution_has_every_tracked_file(unpacked: Path) -> None:
    command = ["git", "ls-files", "-z"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = [path for path in filter(None, tracked.split("\0")) if not (unpacked / path).is_file()]
    assert not missing
    executable = [path for path in filter(None, tracked.split("\0")) if os.access(ROOT / path, os.X_OK)]
    assert executable
    assert all(os.access(unpacked / path, os.X_OK) for path in executable)


@pytest.mark.timeout(300)
def test_all_tests_are_collected_and_a_sample_passes_in_the_source_distribution(unpacked: Path) -> None:
    # Frameworks are hidden: no file may need one when it is collected (tests/kit/late.py).
    absent = ["-p", "tests.kit.absent", "--hide=jax,pandas,tensorflow,torch,torchdata"]
    done = run(unpacked, *absent, "-k", SAMPLE, "tests")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"[1-9]\d\d passed, .*\d{4} deselected", done.stdout)
    assert "Skipped: without" not in done.stdout
