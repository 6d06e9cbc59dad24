"""Sidecar, trainer and keeper stopped in the middle of an epoch; `tests.kit.stops` does so for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.stops import run


@pytest.mark.parametrize("restart", [False, True])
def test_a_stopped_process_is_a_pause(tmp_path: Path, restart: bool) -> None:
    assert run(tmp_path, 4, 0.0, transport="buffered", restart=restart) == []
