"""A scrape is written in slices, between which the event loop has its other turns."""

from __future__ import annotations

import asyncio
import re
import socket

import aiohttp

from sidecar.admin.server import Admin
from sidecar.config.hosts import Hosts
from sidecar.config.job import Job
from sidecar.observe.collector import SLICE, exposition
from sidecar.observe.state import JobState

CHANNELS = 1000


def state_of(channels: int) -> JobState:
    """The state of a job with `channels` File channels, before anything is downloaded."""
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/train/"}}
    document = {
        "InputDataConfig": [
            {"ChannelName": f"c{number}", "InputMode": "File", "DataSource": source}
            for number in range(channels)
        ],
        "Penstock": {"BaseDirectory": "/nonexistent"},
    }
    return JobState(Job.model_validate(document), Hosts(0, ("algo-1",)))


def value(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found is not None, series
    return float(found[1])


async def test_the_event_loop_runs_between_the_slices_of_a_scrape() -> None:
    """A figure that is written before the channels, and one after them, tell how often it did."""
    state, ended = state_of(CHANNELS), asyncio.Event()

    async def turn() -> None:
        while not ended.is_set():
            state.control_requests["HeadObject"] += 1
            state.history.lag.add(0.0)
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with Admin(state, None).serving([listening], backlog=8), aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
            async with client.get(url) as answer:
                text = await answer.text()
    ended.set()
    await turning
    first = value(text, 'penstock_control_requests_total{operation="HeadObject"}')
    assert value(text, "penstock_loop_lag_seconds_count") - first >= text.count("\n") // SLICE - 1 > 10


def test_a_job_that_goes_on_between_two_slices_breaks_none() -> None:
    state = state_of(1)
    state.learnt = {f"c{number}": {} for number in range(SLICE)}
    slices = []
    for number, lines in enumerate(exposition(state)):
        slices.append(lines)
        state.learnt[f"new{number}"] = {}
    assert len(slices) > 2
    assert b"".join(slices).count(b'penstock_index_objects_total{channel="c') == 2 * SLICE
