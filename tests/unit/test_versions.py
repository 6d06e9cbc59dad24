"""botocore of another version than aiobotocore's: the error names both, and the pin."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sidecar.process.exits import Exit
from streamer.s3.client.versions import moved_botocore
from tests.kit.processes import PENSTOCK


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """A folder for the module search path, in which botocore has been upgraded."""
    information = tmp_path / "botocore-1.99.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: botocore\nVersion: 1.99.0\n")
    return tmp_path


def test_the_installed_versions_fit() -> None:
    assert not moved_botocore()


def test_a_moved_botocore_is_named_with_the_pin(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(moved), *sys.path])
    text = moved_botocore()
    assert text.startswith(
        f"botocore 1.99.0 is installed, and aiobotocore {version('aiobotocore')} needs botocore"
    )
    assert "<1." in text


@pytest.mark.usefixtures("credentials")
def test_a_module_that_it_lacks_is_not_an_unparsable_response(moved: Path) -> None:
    """aiobotocore is imported by the first request that needs it."""
    (moved / "aiobotocore").mkdir()
    (moved / "aiobotocore" / "__init__.py").touch()
    path = os.pathsep.join(filter(None, [str(moved), os.environ.get("PYTHONPATH")]))
    cat = [*PENSTOCK, "cat", "s3://b/k", "--endpoint-url", "http://127.0.0.1:1", "--transport", "aiobotocore"]
    ended = subprocess.run(
        cat, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == Exit.CONFIG, ended.stderr
    assert "botocore 1.99.0 is installed" in ended.stderr
