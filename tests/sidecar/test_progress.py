"""What a long plan logs, answers and shows while it is being made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar.process.progress import ERASE
from tests.kit import stub as kit
from tests.kit.processes import job, penstock_with, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.terminal import terminal


@pytest.fixture
def slow(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> S3Stub:
    """A stub with three objects, whose listing has a page for each; the second waits for `release`."""
    stub.objects |= {f"b/train/{number}": b"abc" for number in range(3)}
    monkeypatch.setattr(kit, "PAGE", 1)
    answer = kit.S3Stub.answer_listing

    async def held(self: Any, request: web.Request, bucket: str) -> web.Response:
        if request.query.get("continuation-token"):
            await self.released.wait()
        return await answer(self, request, bucket)

    monkeypatch.setattr(kit.S3Stub, "answer_listing", held)
    return stub


def shuffled(stub: S3Stub, tmp_path: Path) -> str:
    """A job whose channel is planned as a whole before it streams."""
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0]["ShuffleConfig"] = {"Seed": 1}
    return write_job(tmp_path / "job.yaml", document)


OFTEN = penstock_with("sidecar.job.planning_log.PROGRESS_EVERY = 0.01")
"""Put before a command, it logs the progress of plans a hundred times a second."""
AT_ONCE = penstock_with("sidecar.process.progress.FIRST_AFTER = 0")
"""`penstock` whose progress line does not wait for its second."""


def test_a_listing_whose_page_does_not_come_is_logged_all_the_same(slow: S3Stub, tmp_path: Path) -> None:
    with sidecar(shuffled(slow, tmp_path), prefix=OFTEN) as running:
        running.wait_for("planning", times=3, channel="train", doing="listing", entries=1)
        code, body = running.get("/readyz")
        assert code == 503
        assert "train: listing the objects, 1 entry so far" in body
        slow.release()
        running.wait_for("ready")
        logged = [event["event"] for event in running.events]
        assert "planning" not in logged[logged.index("planned") :]
        assert running.end() == 0


def test_a_listing_that_goes_on_under_an_epoch_is_logged(slow: S3Stub, tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.yaml", job(slow.url, tmp_path / "ml", "b/train/"))
    with sidecar(path, prefix=OFTEN) as running:
        running.wait_for("ready")
        running.wait_for("planning", times=3, channel="train", entries=1)
        slow.release()
        running.wait_for("planned", objects=3)
        assert running.end() == 0


def test_plan_shows_the_listing_in_a_terminal(slow: S3Stub, tmp_path: Path) -> None:
    command = [*AT_ONCE, "plan", "-c", shuffled(slow, tmp_path)]
    with terminal(command, columns=99, rows=20) as window:
        window.wait_for(lambda screen: screen.lines[0] == "train: listing the objects, 1 entry so far")
        slow.release()
        assert window.end() == 0
        assert window.screen.lines[0].startswith("transport ")
    with terminal([*command, "--quiet"], columns=99, rows=20) as window:
        assert window.end() == 0
        assert ERASE not in window.screen.written
