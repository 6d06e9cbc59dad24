"""Objects that are inflated ahead in a second thread have the content and errors of inflating in order."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import os
import random
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import CorruptObject
from streamer.formats.transform import Transform
from streamer.inflate import Inflater
from streamer.plan import ObjectRef, Segment
from streamer.relay.deliver import lookahead, transform_runner
from streamer.relay.deliver.epoch_writer import EpochWriter
from streamer.relay.deliver.lookahead import STEP, not_inflatable
from streamer.relay.deliver.transform_runner import TransformRunner
from streamer.relay.statistics import StateTimer
from streamer.sink.outlet import PipeOutlet
from streamer.units import MIB


@pytest.fixture(autouse=True, scope="module")
def no_object_is_too_short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookahead, "LEAST_AHEAD", 0)
        yield


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def packed(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def stored(data: bytes) -> bytes:
    """A member that contains `data` as it is: what begins in it like a member begins none."""
    return gzip.compress(data, 0, mtime=0)


@st.composite
def compressed(draw: st.DrawFn) -> bytes:
    """An object of several members, some of which contain members, and perhaps damaged."""
    sizes = draw(st.lists(st.sampled_from([0, 300, 2000, 5000, 40_000]), min_size=1, max_size=8))
    pack = zstd.compress if draw(st.booleans()) else packed
    members = [pack(content(seed, size)) for seed, size in enumerate(sizes)]
    if draw(st.booleans()):
        members.insert(draw(st.integers(0, len(members))), stored(b"".join(members)))
    data = b"".join(members)
    match draw(st.sampled_from(["sound", "sound", "cut", "flipped", "followed"])):
        case "cut":
            data = data[: draw(st.integers(1, len(data)))]
        case "flipped":
            at = draw(st.integers(0, len(data) - 1))
            data = data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
        case "followed":
            data += b"no member"
    return data


def in_order(ref: ObjectRef, data: bytes) -> tuple[bytes, str]:
    """The content before the object's end or damage, and the text of the error."""
    inflater, found = Inflater(partial(not_inflatable, ref)), b""
    try:
        inflater.feed(data)
        while pieces := inflater.pieces(MIB):
            found += b"".join(pieces)
        inflater.finish()
    except CorruptObject as error:
        return found, str(error)
    return found, ""


class ReadPipe(PipeOutlet):
    """A pipe that is read when it is full."""

    def __init__(self, capacity: int) -> None:
        self.reader, writer = os.pipe2(os.O_NONBLOCK)
        super().__init__(writer, on_gone=lambda: None)
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, capacity)
        self.found = bytearray()

    async def writable(self) -> None:
        self.read()

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.found += os.read(self.reader, MIB)

    def close(self) -> None:
        super().close()
        os.close(self.reader)


class Objects:
    """Objects that are inflated one after the other into a pipe, with bytes of the next ones fed ahead."""

    def __init__(self, objects: list[bytes], most: int, capacity: int = MIB) -> None:
        self.objects = objects
        self.refs = [ObjectRef("b", f"k{i}", len(data), '"e"') for i, data in enumerate(objects)]
        self.pipe = ReadPipe(capacity)
        writer = EpochWriter(self.pipe, timer=StateTimer(), account=lambda _: None)
        self.runner = TransformRunner(writer, Transform(), inflate=True, ahead=most * 4 // 3)

    async def inflate(self, size: int, ahead: int, *, fed: int = 0) -> list[tuple[bytes, str]]:
        """Feed pieces of `size` bytes, each `ahead` pieces before its turn; return as `in_order`."""
        pieces = [
            (number, at, data[at : at + size])
            for number, data in enumerate(self.objects)
            for at in range(0, len(data), size)
        ]
        outcomes: list[tuple[bytes, str]] = []
        for turn, (number, at, data) in enumerate(pieces):
            while fed < len(pieces) and fed <= turn + ahead:
                self.feed(*pieces[fed])
                fed += 1
            if len(outcomes) > number:
                continue  # the object is damaged
            try:
                await self.runner.pass_on(self.range(number), at, data)
            except CorruptObject as error:
                problem = str(error)
            else:
                if at + len(data) < len(self.objects[number]):
                    continue
                problem = ""
            self.pipe.read()
            outcomes.append((bytes(self.pipe.found), problem))
            self.pipe.found.clear()
        await self.runner.aclose()
        self.pipe.close()
        return outcomes

    def range(self, number: int) -> Segment:
        return Segment(self.refs[number], 0, len(self.objects[number]))

    def feed(self, number: int, at: int, data: bytes) -> None:
        self.runner.feed(self.range(number), at, data)


@given(
    objects=st.lists(compressed(), min_size=1, max_size=4),
    size=st.sampled_from([700, 5000, 50_000]),
    ahead=st.sampled_from([0, 3, 30]),
    most=st.sampled_from([1, 10_000, 10_000_000]),
    capacity=st.sampled_from([4096, MIB]),
)
def test_content_and_errors_are_those_of_inflating_in_order(
    objects: list[bytes], size: int, ahead: int, most: int, capacity: int
) -> None:
    async def inflate() -> tuple[list[tuple[bytes, str]], list[tuple[bytes, str]]]:
        several = Objects(objects, most, capacity)
        due = [in_order(ref, data) for ref, data in zip(several.refs, objects, strict=True)]
        with patch.object(transform_runner, "MOST_QUEUED", 2 * size):
            return due, await several.inflate(size, ahead)

    due, found = asyncio.run(inflate())
    for (content_due, error_due), (content_found, error_found) in zip(due, found, strict=True):
        if not error_due:
            assert (content_found, error_found) == (content_due, "")
        else:  # how much is inflated before a damage, and its offset, depend on where pieces are cut
            assert content_found.startswith(content_due) or content_due.startswith(content_found)
            assert error_found.split(" (")[0] == error_due.split(" (")[0]


async def test_little_waits_ahead() -> None:
    """However well the bytes are compressed, and however many of them are fed."""
    several = Objects([gzip.compress(bytes(20_000_000))] * 3, MIB)
    for number, data in enumerate(several.objects):
        several.feed(number, 0, data)
    await several.runner.lookahead.thread.run(lambda: None)  # after the first turn
    await several.runner.lookahead.thread.run(lambda: None)
    waiting = int(repr(several.runner.lookahead).split()[1])
    assert MIB <= waiting < MIB + STEP
    assert await several.inflate(len(several.objects[0]), 0, fed=3) == [(bytes(20_000_000), "")] * 3
