"""What a request has made goes with its last reference, not with the next garbage collection.

A cycle keeps the stage and the response of every part for thousands of requests, and collections then cost a
tenth of the CPU time where objects are small.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.harness import RunChannel, fill
from tests.kit.pipes import off_loop, read_all
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

BOTOCORE_OWN = "streamer.s3.client.botocore_session._StrictParser"
"""botocore makes a parser for every request, which refers to itself."""


@pytest.fixture
def unreachable() -> Iterator[Callable[[], Counter[str]]]:
    """Returns the types of our objects that became unreachable since the last call, by count."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def found() -> Counter[str]:
        known = len(gc.garbage)
        gc.collect()
        types = [f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage[known:]]
        return Counter(name for name in types if name.startswith("streamer.") and name != BOTOCORE_OWN)

    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("hedge", [0.0, 0.05])
async def test_a_delivered_part_leaves_no_cycle(
    run: RunChannel, stub: S3Stub, tmp_path: Path, unreachable: Callable[[], Counter[str]], hedge: float
) -> None:
    truth = fill(stub, [30_000] * 20)
    async with run(stub, tmp_path, part_size=10_000, hedge=hedge) as running:
        unreachable()  # what the clients left
        for epoch in range(2):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
            assert unreachable() == Counter()


async def test_a_part_of_our_own_client_leaves_no_cycle(
    run_own: RunChannel, server: S3Stub, unreachable: Callable[[], Counter[str]]
) -> None:
    truth = fill(server, [30_000] * 20)
    async with run_own(part_size=10_000) as running:
        unreachable()  # what the clients left
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert unreachable() == Counter()
