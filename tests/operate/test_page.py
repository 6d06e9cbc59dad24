"""The status page in a browser, beside sidecars that really are slow, waited for, or ill-served.

Each condition is made, not pretended: a reader that reads little, a server that sends little, a server that
fails every other request. The page must name it. With PENSTOCK_PICTURES=DIRECTORY the pages are kept there.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.kit.browser import browser
from tests.kit.harness import fill
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import Fault, fails

SIZE = 90_000_000
PICTURES = os.environ.get("PENSTOCK_PICTURES")
SECONDS = 120_000
"""Milliseconds for a outcome to be right."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]


def slowly(gate):
    """A fault for every GET: the body in small pieces, all of them together at some MB/s."""

    async def fault(answer):
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(answer.body)
        await response.prepare(answer.request)
        for start in range(0, len(answer.body), 65536):
            async with gate:
                await asyncio.sleep(0.008)
            await response.write(answer.body[start : start + 65536])
        return response

    return fault


class Forever(list[Fault]):
    """Faults without end, as `S3Stub.faults` takes them: `every`-th is the fault, the others are right."""

    def __init__(self, fault, every=1):
        super().__init__([fault])
        self._every = every
        self._count = 0

    def popleft(self):
        self._count += 1
        return self[0] if self._count % self._every == 0 else right


async def right(answer):
    return web.Response(status=206, body=answer.body, headers=answer.headers)


@contextmanager
def reading(path, *, pause=0.0, piece=1 << 20):
    """A reader of epoch after epoch, until the end of the block; `pause` seconds after each piece."""
    over = threading.Event()

    def read():
        epoch = 0
        while not over.is_set():
            with open(f"{path}_{epoch}", "rb", buffering=0) as fifo:
                while not over.is_set() and fifo.read(piece):
                    over.wait(pause)
            epoch += 1

    thread = threading.Thread(target=read, name="reader")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


CONDITIONS = {
    "trainer": (
        {"pause": 0.02, "piece": 1 << 18},
        None,
        "the trainer is the bottleneck: the sidecar waited for it",
    ),
    "storage": ({}, lambda: slowly(asyncio.Semaphore(1)), "storage is the bottleneck: the trainer waited"),
    "faults": ({}, lambda: fails(503, "SlowDown"), "of requests and asks for fewer"),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_page_says_who_is_slow(stub, tmp_path, chromium, condition):
    reader, fault, words = CONDITIONS[condition]
    fill(stub, [SIZE // 3] * 3, prefix="b/train/")
    if fault is not None:
        stub.faults[""] = Forever(fault(), every=2 if condition == "faults" else 1)
    document = job(stub.url, tmp_path / "ml", "b/train/", MemoryBudget="64MiB", RequestsInFlight=8)
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        page = chromium.new_page(viewport={"width": 1120, "height": 700})
        complaints = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        with reading(tmp_path / "ml/input/data/train", **reader):
            page.goto(running.url)
            kind = page.locator("[data-bottleneck]")
            page.wait_for_selector(f'[data-bottleneck][data-kind="{condition}"]', timeout=SECONDS)
            if PICTURES:
                page.wait_for_timeout(35_000)
            assert words in kind.text_content()
            assert page.locator("h2").text_content() == "train"
            page.wait_for_selector("polyline", state="attached")
            assert page.locator("#ready").text_content() == "ready"
            assert page.locator("[data-errors]").is_visible() == (condition == "faults")
            if PICTURES:
                if condition == "faults":
                    page.locator("summary").click()
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    page.screenshot(path=Path(PICTURES) / f"status-{condition}-{scheme}.png")
        assert running.end() == 0
        page.wait_for_selector("body.gone")
        # When the sidecar is gone the browser says so, and nothing else.
        assert [
            each for each in complaints if "ERR_CONNECTION" not in each and "ERR_INCOMPLETE" not in each
        ] == []
        page.close()
