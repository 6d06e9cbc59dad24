"""Streams cut into pieces of files: every byte once, and an empty file as one piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.directory import Directory
from streamer.relay.files.target import PieceCutter, TargetFile

NOWHERE = Directory("/nowhere", -1)


def files(sizes: list[int]) -> list[TargetFile]:
    return [
        TargetFile(str(number), size, number=number, parts=NOWHERE, tree=NOWHERE)
        for number, size in enumerate(sizes)
    ]


@given(sizes=st.lists(st.integers(0, 20), max_size=12), steps=st.lists(st.integers(1, 30)))
def test_pieces_are_the_files(sizes: list[int], steps: list[int]) -> None:
    targets, left = files(sizes), sum(sizes)
    cutter = PieceCutter(iter(targets))
    pieces = []
    for step in steps:
        count = min(step, left)
        pieces += cutter.cut(count)
        left -= count
    pieces += cutter.cut(left)
    pieces += cutter.rest()
    written: dict[str, int] = {}
    for file, start, end in pieces:
        assert start == written.get(file.path, 0)
        assert start < end or file.size == 0
        written[file.path] = end
    assert list(written.items()) == [(file.path, file.size) for file in targets]
    assert sum(file.size == 0 for file, _, _ in pieces) == sizes.count(0)


def test_a_stream_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 bytes more than its files"):
        PieceCutter(iter(files([3]))).cut(5)
    cutter = PieceCutter(iter(files([3])))
    cutter.cut(2)
    with pytest.raises(ValueError, match="ended inside"):
        cutter.rest()
