"""Fixtures of the reader tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.readers.feeder import Feeder


@pytest.fixture
def feeder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Feeder]:
    """A base directory with one Pipe channel `train` and one `validation`, found by default arguments."""
    feeder = Feeder(tmp_path / "ml", ("train", "validation"), plain="File")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", feeder.base)
    yield feeder
    feeder.close()


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Feeder]:
    """A host with four channels, train0 to train3."""
    feeder = Feeder(tmp_path / "four", [f"train{number}" for number in range(4)])
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", feeder.base)
    yield feeder
    feeder.close()


@pytest.fixture
def workers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader's workers, on a host with one process: soon there, and soon missed."""

    # From a process that has imported PyTorch and runs no threads.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "tests.readers.decoders", "streamer.readers.table_dataset"]
    )
    # Seconds that PyTorch waits for each worker after an error, and until it notices that one is dead.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
