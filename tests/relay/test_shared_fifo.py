"""One FIFO of a shared stream, with real pipes."""

from __future__ import annotations

import asyncio
import os

import pytest

from streamer.errors import ReaderGone
from streamer.plan import START, ObjectRef, Plan
from streamer.relay.deliver.shared_fifo import SharedFifo, SharedGroup
from streamer.sink.outlet import PipeOutlet


async def test_a_reader_that_left_before_the_stream_began_is_noticed() -> None:
    """Its outlet reports the end once, before the FIFO waits for the other FIFOs."""
    read_end, write_end = os.pipe()
    gone = asyncio.Event()
    outlet = PipeOutlet(write_end, on_gone=gone.set)
    group = SharedGroup([], 0)
    fifo = SharedFifo("train-0", Plan.of([ObjectRef("b", "k", 10, "e")]), START, group)
    group.ranks = [[fifo]]
    os.close(read_end)
    await gone.wait()
    with pytest.raises(ReaderGone):
        await fifo.deliver(0, outlet)
    assert not fifo.takes(0)
    outlet.close()
