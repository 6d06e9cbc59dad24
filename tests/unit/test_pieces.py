"""Streams cut into pieces of files: every byte once, and no piece counts before the one in front of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.relay.files.pieces import Piece, PieceCutter, TargetFile, WrittenFiles

SIZES = st.lists(st.integers(0, 20), max_size=12)


def files(sizes: list[int], first: int = 0) -> list[TargetFile]:
    """Files of these sizes, of which the first one has its first bytes already."""
    firsts = [min(first, max(0, size - 1)) if i == 0 else 0 for i, size in enumerate(sizes)]
    return [TargetFile(str(i), size, firsts[i]) for i, size in enumerate(sizes)]


@given(sizes=SIZES, first=st.integers(0, 20), steps=st.lists(st.integers(1, 30)), order=st.randoms())
def test_pieces_are_the_files_and_count_in_stream_order(
    sizes: list[int], first: int, steps: list[int], order: random.Random
) -> None:
    targets = files(sizes, first)
    left = sum(file.size - file.first for file in targets)
    cutter, written = PieceCutter(iter(targets)), WrittenFiles()
    batches, noted = [], list[Piece]()
    for step in steps:
        if count := min(step, left):
            batches.append(written.begin(cutter.cut(count)))
            left -= count
    if left:
        batches.append(written.begin(cutter.cut(left)))
    batches.append(written.begin(cutter.rest()))
    order.shuffle(batches)
    for batch in batches:
        noted += written.ended(batch)
    at = {file.path: file.first for file in targets}
    for piece in noted:
        assert piece.start == at[piece.file.path]
        at[piece.file.path] = piece.end
    assert at == {file.path: file.size for file in targets}
    assert [piece.file.path for piece in noted] == sorted((p.file.path for p in noted), key=int)
    assert (written.files, written.bytes) == (
        len(targets),
        sum(file.size - file.first for file in targets),
    )
    assert not len(written)


def test_a_piece_does_not_count_before_the_piece_in_front_of_it() -> None:
    cutter, written = PieceCutter(iter(files([10]))), WrittenFiles()
    front, later = written.begin(cutter.cut(4)), written.begin(cutter.cut(6))
    assert list(written.ended(later)) == []
    assert written.bytes == 0
    assert [piece.end for piece in written.ended(front)] == [4, 10]


def test_a_stream_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 bytes more than its files"):
        PieceCutter(iter(files([3]))).cut(5)
    cutter = PieceCutter(iter(files([3])))
    cutter.cut(2)
    with pytest.raises(ValueError, match="ended inside"):
        cutter.rest()
