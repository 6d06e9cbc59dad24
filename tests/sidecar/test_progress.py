"""What a long plan logs while it is being made."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sidecar.config.hosts import Hosts
from sidecar.config.job import load_job
from sidecar.job import planning_log
from sidecar.job.planning_log import PlanningLog
from sidecar.observe.state import JobState
from tests.kit.processes import job, write_job


@pytest.mark.parametrize(
    ("every", "due"),
    [(0.0, [("planning", "INFO", {"channel": "train", "entries": 7})]), (3600.0, [])],
)
def test_a_plan_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    *,
    every: float,
    due: list[object],
) -> None:
    monkeypatch.setattr(planning_log, "PROGRESS_EVERY", every)
    parsed = load_job(write_job(tmp_path / "job.yaml", job("http://s3", None, "b/train/")))
    notes = PlanningLog(JobState(parsed, Hosts(0, ("algo-1",))), parsed.input_data_config[0])
    with caplog.at_level(logging.INFO, "penstock"):
        notes.progress(7)
    events = [(each.getMessage(), each.levelname, vars(each)["fields"]) for each in caplog.records]
    assert events == due
