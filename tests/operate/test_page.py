"""The status page in Chromium, beside sidecars that start, wait, stream, fail and end.

Each condition is made, not pretended: a reader that reads little, a server that sends little, a server that
fails every other request. The page must name it, in text and graphics with the contrast that WCAG demands.
With PENSTOCK_PICTURES=DIRECTORY the pages are kept there.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.kit.browser import browser
from tests.kit.harness import fill
from tests.kit.late import LATE
from tests.kit.processes import Sidecar, job, sidecar, write_job
from tests.kit.raw import answer, raw_server
from tests.kit.stub import Answer, Fault, S3Stub, fails
from tests.operate.contrast import measure

if LATE:
    from playwright.sync_api import expect

SIZE = 90_000_000
PICTURES = os.environ.get("PENSTOCK_PICTURES")
SECONDS = 120_000
"""Milliseconds for a outcome to be right."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]


def slowly(gate: asyncio.Semaphore) -> Callable[[Answer], Coroutine[Any, Any, web.StreamResponse]]:
    """A fault for every GET: the body in small pieces, all of them together at some MB/s."""

    async def fault(answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(answer.body)
        await response.prepare(answer.request)
        for start in range(0, len(answer.body), 65536):
            async with gate:
                await asyncio.sleep(0.008)
            await response.write(answer.body[start : start + 65536])
        return response

    return fault


class Forever(deque[Fault]):
    """Faults without end, as `S3Stub.faults` takes them: `every`-th is the fault, the others are right."""

    def __init__(self, fault: Any, every: int = 1) -> None:
        super().__init__([fault])
        self._every = every
        self._count = 0

    def popleft(self) -> Callable[[Answer], Awaitable[web.StreamResponse]]:
        self._count += 1
        return self[0] if self._count % self._every == 0 else right


async def right(answer: Answer) -> web.Response:
    return web.Response(status=206, body=answer.body, headers=answer.headers)


@contextmanager
def reading(path: Path, *, pause: float = 0.0, piece: int = 1 << 20) -> Iterator[None]:
    """A reader of epoch after epoch, until the end of the block; `pause` seconds after each piece."""
    over = threading.Event()

    def read() -> None:
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
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@contextmanager
def page_of(chromium: Any, running: Sidecar) -> Iterator[Any]:
    """The status page of a sidecar. The browser must report nothing but a sidecar that has gone."""
    page = chromium.new_page(viewport={"width": 1120, "height": 700})
    page.set_default_timeout(SECONDS)
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(running.url)
    yield page
    assert [
        each for each in complaints if "ERR_CONNECTION" not in each and "ERR_INCOMPLETE" not in each
    ] == []
    page.close()


EVENTS = """(count) => new Promise((resolve) => {
    let [at, seen] = [last?.at, 0];
    const look = () => {
        if (last?.at !== at) [at, seen] = [last.at, seen + 1];
        if (seen < count) requestAnimationFrame(look); else resolve();
    };
    look();
})"""
"""Waits for the next `count` events."""
GRAPHICS = {
    ".bar": "borderTopColor", ".bar > div": "backgroundColor", ".key i": "backgroundColor",
    ".bottleneck": "borderLeftColor", ".chart .line": "stroke", ".chart .base": "stroke",
    ".tone": "backgroundColor", "input": "borderTopColor",
    ".chart .failure": "fill", ".chart .dot": "fill", ".chart .cross": "stroke",
}  # fmt: skip
"""What must be seen, and the property of its colour. Grid lines are not in it: the axis has numbers."""


def check_contrast(page: Any, *, least: int) -> None:
    """All texts and graphics, `least` or more of them, in light and dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        measured = measure(page, GRAPHICS)
        assert len(measured) >= least
        assert [each for each in measured if each.ratio < each.needed] == []
    page.emulate_media(color_scheme="light")


def check_small(page: Any) -> None:
    """A small screen keeps the padding, and nothing is wider than it."""
    page.set_viewport_size({"width": 400, "height": 700})
    for place in ("header", "main", "footer"):
        box = page.locator(place)
        assert box.evaluate("(node) => parseFloat(getComputedStyle(node).paddingLeft)") >= 14
    for place, side in (("header", "paddingTop"), ("header", "paddingBottom"), ("footer", "paddingBottom")):
        padding = page.locator(place).evaluate(f"(node) => parseFloat(getComputedStyle(node).{side})")
        assert padding >= 14, (place, side)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.set_viewport_size({"width": 1120, "height": 700})


def check_labels(page: Any) -> None:
    """Every graphic has a label, and no two have the same."""
    labels = page.locator("[role=progressbar], [role=meter], [role=img], [role=slider]").evaluate_all(
        "(nodes) => nodes.map((node) => node.getAttribute('aria-label'))"
    )
    assert labels
    assert all(labels)
    assert len(set(labels)) == len(labels)


def check_times(page: Any) -> None:
    """After the last event the axis has times of day: "60 s ago" would be wrong a minute later."""
    texts = page.locator("[data-chart]:visible text:not(.tick)").all_text_contents()
    assert len(texts) == 5
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", text) for text in texts)


def check_chart(page: Any) -> None:
    """The axis has numbers that reach above the highest rate; hover and arrow keys tell one second's rate."""
    ticks = page.locator(".tick").all_text_contents()
    assert all(re.fullmatch(r"[\d.]+ [kMG]?B/s", tick) for tick in ticks)
    values = [float(tick.partition(" ")[0]) for tick in ticks]
    assert values == sorted(values)
    assert (values[0], len(values) >= 2) == (0, True)
    assert len({tick.partition(" ")[2] for tick in ticks}) == 1, "one unit for the axis"
    assert page.evaluate("(([card]) => scale(Math.max(1, ...card.channel.rates)).at(-1) >= "
                         "Math.max(...card.channel.rates))([...cards.values()])")  # fmt: skip
    chart, tip = page.locator("[data-chart]"), page.locator(".tip")
    assert not tip.is_visible()
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] - 12, "y": 60})
    assert re.fullmatch(r"[\d.]+ [kMG]?B/snow, \d\d:\d\d:\d\d(, \d failures?)?", tip.text_content())
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    page.evaluate(EVENTS, 3)
    chart.focus()
    chart.press("ArrowLeft")
    chart.press("ArrowLeft")
    shown, expected = page.evaluate(
        "(([{tip, chart, channel: {rates}}]) => [tip.textContent + chart.getAttribute('aria-valuetext'), "
        "bytes(rates.at(-3)) + '/s'])([...cards.values()])"
    )
    assert shown.startswith(f"{expected}2 s ago, ")
    assert shown.endswith(f"{expected} 2 s ago")
    chart.press("Escape")
    assert not tip.is_visible()


CONDITIONS: dict[str, tuple[dict[str, Any], Callable[[], Fault] | None, str, str]] = {
    "trainer": (
        {"pause": 0.02, "piece": 1 << 18},
        None,
        "the trainer is the bottleneck: the sidecar waited for it",
        "trainer is slower",
    ),
    "stuck": ({"pause": 3600.0}, None, "the trainer has taken no byte for", "trainer takes nothing"),
    "storage": (
        {},
        lambda: slowly(asyncio.Semaphore(1)),
        "storage is the bottleneck: the trainer waited",
        "storage is slow",
    ),
    "faults": (
        {},
        lambda: fails(503, "SlowDown"),
        "of requests and asks for fewer",
        "S3 fails requests",
    ),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_page_says_who_is_slow(stub: S3Stub, tmp_path: Path, chromium: Any, condition: str) -> None:
    reader, fault, words, title = CONDITIONS[condition]
    fill(stub, [SIZE // 3] * 3, prefix="b/train/")
    if fault is not None:
        stub.faults[""] = Forever(fault(), every=2 if condition == "faults" else 1)
    document = job(stub.url, tmp_path / "ml", "b/train/", MemoryBudget="64MiB", RequestsInFlight=8)
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        with page_of(chromium, running) as page:
            with reading(tmp_path / "ml/input/data/train", **reader):
                kind = page.locator("[data-bottleneck]")
                page.wait_for_selector(f'[data-bottleneck][data-kind="{condition}"]')
                if PICTURES:
                    page.wait_for_timeout(35_000)
                expect(kind).to_contain_text(words, timeout=SECONDS)
                assert page.locator("h2[data-name]").text_content() == "train"
                page.wait_for_selector("polyline", state="attached")
                assert page.locator("#phase").text_content() == "ready"
                expect(page).to_have_title(re.compile(title), timeout=SECONDS)
                assert re.search(r"updated \d\d:\d\d:\d\d", page.locator("#updated").text_content())
                expect(page.locator("[data-errors]")).to_be_visible(
                    visible=condition == "faults", timeout=SECONDS
                )
                if condition == "faults":
                    page.locator("[data-errors] summary").click()
                    page.wait_for_selector(".failure", state="attached")
                    texts = page.locator("[data-errors] li").all_text_contents()
                    assert all(re.match(r"\d\d:\d\d:\d\d \(\d+ s ago\) ", text) for text in texts)
                if PICTURES:
                    for scheme in ("light", "dark"):
                        page.emulate_media(color_scheme=scheme)
                        picture = Path(PICTURES) / f"status-{condition}-{scheme}.png"
                        page.screenshot(path=picture, full_page=True)
                check_chart(page)
                check_contrast(page, least=40)
                check_labels(page)
                check_small(page)
            assert running.end() == 0
            page.wait_for_selector("body.ended")


def test_a_line_about_uploads(stub: S3Stub, tmp_path: Path, chromium: Any) -> None:
    fill(stub, [1000], prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/") | {"CheckpointConfig": {"S3Uri": "s3://b/run"}}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        with page_of(chromium, running) as page:
            uploads = page.locator("#uploads")
            weights = tmp_path / "ml/checkpoints/weights"
            weights.write_bytes(bytes(1000))
            expect(uploads).to_have_text(
                re.compile(r"uploads: 1 file uploaded, newest checkpoint \d+ s old"), timeout=SECONDS
            )
            stub.puts.refused.extend([(403, "AccessDenied")] * 1000)
            weights.write_bytes(bytes(1_200_000))
            expect(uploads).to_have_text(
                re.compile(
                    r"uploads: 1 file waiting 1\.2 MB, \d+ failed attempts?, newest checkpoint \d+ s old"
                ),
                timeout=SECONDS,
            )
            check_contrast(page, least=20)
            check_small(page)


def test_a_start_that_waits_for_storage(credentials: None, tmp_path: Path, chromium: Any) -> None:
    with raw_server(lambda _: answer(503)) as storage:
        path = write_job(tmp_path / "job.yaml", job(storage.url, tmp_path / "ml", "b/train/"))
        with sidecar(path) as running:
            running.wait_for("waiting for storage")
            with page_of(chromium, running) as page:
                expect(page.locator("#start b")).to_contain_text("503", timeout=SECONDS)
                transform = "(node) => getComputedStyle(node, '::first-letter').textTransform"
                assert page.locator("#start b").evaluate(transform) == "none", "a name is no sentence"
                assert page.locator("#start li").all_text_contents() == ["train: s3://b/train/"]
                assert page.title() == "Starting · Penstock"
                assert not re.search("undefined|NaN|null", page.locator("body").inner_text())
                check_contrast(page, least=10)
                check_small(page)
                running.end()


def test_without_a_reader_the_page_names_the_fifo_and_then_says_how_the_job_ended(
    stub: S3Stub, tmp_path: Path, chromium: Any
) -> None:
    """A screen reader is told of a new bottleneck, not of every second's figures."""
    fill(stub, [SIZE // 3], prefix="b/train/")
    fill(stub, [10_000], prefix="b/eval/")
    with sidecar(
        write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/", "b/eval/"))
    ) as running:
        running.wait_for("ready")
        with page_of(chromium, running) as page:
            fifo = tmp_path / "ml/input/data/train_0"
            expect(page.locator("[data-remedy]").first).to_contain_text(f"Open {fifo} ", timeout=SECONDS)
            assert page.title() == "no reader · Penstock"
            assert page.locator("#uploads").is_hidden()
            assert page.locator("[data-chart]").first.is_hidden()
            live = page.locator("#live")
            assert (live.get_attribute("aria-live"), live.text_content()) == ("polite", "")
            page.evaluate(EVENTS, 3)
            assert live.text_content() == ""
            check_contrast(page, least=20)
            check_labels(page)
            check_small(page)
            for name in ("Metrics for Prometheus", "Status as JSON", "Limits", "Readiness"):
                address = page.get_by_role("link", name=name).evaluate("(link) => link.href")
                assert running.get(address.removeprefix(running.url))[0] == 200
            page.locator("#help summary").click()
            check_contrast(page, least=30)
            with open(fifo, "rb") as reader:
                expect(live).to_contain_text("train: the trainer is the bottleneck", timeout=SECONDS)
                assert reader.read() == stub.objects["b/train/0000"]
            running.wait_for("epoch complete")
            assert running.end() == 0
            page.wait_for_selector("body.ended")
            assert re.match(r"The sidecar ended at \d\d:\d\d:\d\d\.", page.locator("#banner").text_content())
            assert page.title() == "Ended · Penstock"
            assert "State of the job: ended." in live.text_content()
            check_times(page)
            assert page.locator("[data-bottleneck]").first.text_content() == "stopped; epochs: 1 complete"
            check_contrast(page, least=20)


def test_many_channels_have_a_table_and_the_worst_have_cards(
    stub: S3Stub, tmp_path: Path, chromium: Any
) -> None:
    names = [f"shard-{number}" for number in range(14)]
    for name in names:
        fill(stub, [1000], prefix=f"b/{name}/")
    stub.faults["b/shard-9/0000"] = Forever(fails(403, "AccessDenied"))
    document = job(stub.url, tmp_path / "ml", *(f"b/{name}/" for name in names), MemoryBudget="64MiB")
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        reader = os.open(tmp_path / "ml/input/data/shard-9_0", os.O_RDONLY | os.O_NONBLOCK)
        running.wait_for("epoch failed", channel="shard-9")
        with page_of(chromium, running) as page:
            expect(page.locator("h2[data-name]").first).to_have_text("shard-9", timeout=SECONDS)
            assert page.locator("h2[data-name]").count() == 4
            rows = page.locator("#all tbody tr")
            assert rows.count() == 14
            assert rows.first.locator("td").first.text_content() == "failed"
            assert "Failed: shard-9" in page.title()
            expect(page.locator("#counts")).to_have_text("14 channels: failed 1, no reader 13")
            page.get_by_role("button", name="shard-13").click()
            cards = page.locator("h2[data-name]")
            assert cards.count() == 5
            times = page.evaluate(
                "() => { channels(); "
                "return [...document.querySelectorAll('time')].map((time) => time.textContent); }"
            )
            assert times
            assert all(times), "a click draws the times too"
            assert cards.last.text_content() == "shard-13"
            page.evaluate(EVENTS, 2)
            assert cards.count() == 5
            page.get_by_label("Filter channels").fill("SHARD-1")
            assert cards.all_text_contents() == [f"shard-{number}" for number in (1, 10, 11, 12, 13)]
            assert rows.count() == 5
            check_contrast(page, least=40)
            check_labels(page)
            check_small(page)
            page.get_by_label("Filter channels").fill("")
            page.get_by_role("button", name="shard-13").click()
            assert cards.count() == 4
            if PICTURES:
                page.screenshot(path=Path(PICTURES) / "status-many-light.png", full_page=True)
            os.close(reader)
            running.end()


def test_a_failed_channel_and_a_sidecar_that_is_killed(stub: S3Stub, tmp_path: Path, chromium: Any) -> None:
    fill(stub, [SIZE // 3], prefix="b/train/")
    stub.faults["b/train/0000"] = Forever(fails(403, "AccessDenied"))
    with sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))) as running:
        running.wait_for("ready")
        with page_of(chromium, running) as page:
            fifo = open(tmp_path / "ml/input/data/train_0", "rb", buffering=0)  # noqa: SIM115 - closed below
            page.wait_for_selector('[data-bottleneck][data-kind="failed"]')
            expect(page).to_have_title("Failed: train · Penstock", timeout=SECONDS)
            assert re.search(
                r"Failed at \d\d:\d\d:\d\d \(\d+ s ago\)", page.locator("[data-remedy]").text_content()
            )
            assert page.locator("#why").text_content() == "1 channel has failed for good: train"
            assert "train: failed for good" in page.locator("#live").text_content()
            check_contrast(page, least=20)
            check_small(page)
            running.end(signal.SIGKILL)
            page.wait_for_selector("body.gone")
            assert "has not answered since" in page.locator("#banner").text_content()
            check_times(page)
            assert page.title() == "No answer · Penstock"
            check_contrast(page, least=20)
            fifo.close()
