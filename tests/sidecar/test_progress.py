"""What a long plan logs while it is being made."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from sidecar.job import planning


@pytest.mark.parametrize(
    ("every", "due"),
    [(0.0, [{"event": "planning", "log_level": "info", "channel": "train", "entries": 7}]), (3600.0, [])],
)
def test_a_plan_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, every: float, due: list[dict[str, object]]
) -> None:
    monkeypatch.setattr(planning, "PROGRESS_EVERY", every)
    # A logger that was used before keeps the processors of then, for ever.
    monkeypatch.setattr(planning, "log", structlog.get_logger())
    progress = planning._Progress("train")
    with capture_logs() as logs:
        progress(7)
    assert logs == due
