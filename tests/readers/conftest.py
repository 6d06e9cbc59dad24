"""Fixtures of the reader tests."""

from __future__ import annotations

import pytest

from tests.readers.feeder import Feeder


@pytest.fixture
def feeder(tmp_path, monkeypatch):
    """A base directory with one Pipe channel `train` and one `validation`, found by default arguments."""
    feeder = Feeder(tmp_path / "ml", ("train", "validation"), plain="File")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", feeder.base)
    yield feeder
    feeder.close()
