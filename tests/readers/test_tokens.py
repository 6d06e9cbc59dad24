"""Token blocks: raw tokens of a channel as arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamer.errors import ChannelError, CorruptRecord, CutRecord, TruncatedStream
from streamer.readers import PipeReader
from streamer.readers.token_blocks import ARRAY_BYTES, join_blocks
from streamer.readers.tokens import TokenReader
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.readers.feeder import Feeder

DTYPES = ["uint16", "uint32", "int32"]


def tokens(count: int, dtype: str = "uint16") -> Any:
    return (np.arange(count) * 7919 % 50_000).astype(dtype)


def windows(all_tokens: Any, length: int, extra: int) -> list[list[int]]:
    """The blocks, by the definition."""
    starts = range(0, len(all_tokens) - length - extra + 1, length)
    return [all_tokens[start : start + length + extra].tolist() for start in starts]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 8])
def test_blocks_are_the_tokens_in_order(
    feeder: Feeder, dtype: str, overlap: bool, batch_size: int | None
) -> None:
    """More than one array's bytes, and a last batch that is short."""
    length = 1021
    count = (3 * ARRAY_BYTES // 2 // np.dtype(dtype).itemsize // length | 1) * length + overlap
    data = tokens(count, dtype)
    feeder.feed(0, data.tobytes())
    reader = TokenReader("train", dtype, length=length, batch_size=batch_size, overlap=overlap)
    arrays = list(reader)
    shape = (length + overlap,) if batch_size is None else (batch_size, length + overlap)
    assert {array.shape for array in arrays[:-1]} == {shape}
    assert arrays[0].dtype == dtype
    rows = [row.tolist() for array in arrays for row in np.atleast_2d(array)]
    assert rows == windows(data, length, overlap)
    # Views of what was read, which the caller may write.
    assert all(array.base is not None and array.flags.writeable for array in arrays)


@pytest.mark.parametrize(("overlap", "left"), [(False, 1), (False, 99), (True, 2), (True, 100)])
def test_tokens_that_are_no_whole_block_are_an_error_or_dropped(
    feeder: Feeder, overlap: bool, left: int
) -> None:
    data = tokens(5 * 100 + left)
    feeder.feed(0, data.tobytes())
    got: list[Any] = []
    offset = 2 * 5 * 100
    with pytest.raises(CutRecord, match=f"token block: {2 * left} bytes are left from offset {offset} on"):
        got.extend(TokenReader("train", "uint16", length=100, overlap=overlap))
    assert [block.tolist() for block in got] == windows(data, 100, overlap)
    for batch_size, rows in ((None, 5), (2, 4)):
        feeder.feed(1, data.tobytes())
        reader = TokenReader(
            "train",
            "uint16",
            length=100,
            overlap=overlap,
            batch_size=batch_size,
            drop_remainder=True,
            epoch=1,
        )
        assert sum(len(np.atleast_2d(array)) for array in reader) == rows
    feeder.feed(2, data.tobytes() + b"\0")
    with pytest.raises(CutRecord):
        list(TokenReader("train", "uint16", length=100, drop_remainder=True, epoch=2))


def test_the_token_of_the_overlap_alone_is_no_remainder(feeder: Feeder) -> None:
    for epoch, count in enumerate((0, 1, 101)):
        feeder.feed(epoch, tokens(count).tobytes())
        assert len(list(TokenReader("train", "uint16", length=100, overlap=True))) == count // 100


def test_an_epoch_that_was_cut_is_an_error(feeder: Feeder) -> None:
    data = tokens(1000).tobytes()
    feeder.feed(0, data[:1000], state="open", total=len(data))
    with pytest.raises(TruncatedStream, match="1000 of 2000 bytes"):
        list(TokenReader("train", "uint16", length=100, drop_remainder=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_state_after_any_array_goes_on_with_the_next_token(
    feeder: Feeder, overlap: bool, batch_size: int | None
) -> None:
    data = tokens(10 * 100 + overlap)
    expected = windows(data, 100, overlap)

    def reader() -> TokenReader:
        return TokenReader("train", "uint16", length=100, overlap=overlap, batch_size=batch_size, epoch=0)

    feeder.feed(0, data.tobytes())
    states, returned, first = [(reader().state_dict(), 0)], 0, reader()
    for array in first:
        returned += len(np.atleast_2d(array))
        states.append((first.state_dict(), returned))
    for state, rows in states:
        epoch = state["epoch"]
        feeder.feed(epoch, data.tobytes())
        again = reader()
        again.load_state_dict(json.loads(json.dumps(state)))
        assert again.state_dict() == state
        got = [row.tolist() for array in again for row in np.atleast_2d(array)]
        assert got == (expected if epoch else expected[rows:])
    # At the same token with blocks of another length.
    feeder.feed(0, data.tobytes())
    other = TokenReader("train", "uint16", length=50, epoch=0, drop_remainder=True)
    other.load_state_dict(states[1][0])
    assert next(iter(other)).tolist() == data[states[1][1] * 100 :][:50].tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", [0, 99, 100, 250, 300])
def test_a_token_beyond_the_vocabulary_is_an_error(feeder: Feeder, overlap: bool, place: int) -> None:
    for epoch, (dtype, wrong) in enumerate((("uint16", 50_000), ("int32", -1))):
        data = tokens(300 + 100 + overlap, dtype)
        data[place] = wrong
        feeder.feed(epoch, data.tobytes())
        got: list[Any] = []
        text = f"token {wrong} at offset {place * data.itemsize} of the stream is not one of the 50000 tokens"
        with pytest.raises(CorruptRecord, match=text):
            got.extend(TokenReader("train", dtype, length=100, overlap=overlap, vocabulary=50_000))
        good = [block for block in windows(data, 100, overlap) if wrong not in block]
        assert [block.tolist() for block in got] == good[: len(got)]
        assert len(got) == max(0, place - overlap) // 100


def test_wrong_arguments_are_refused(feeder: Feeder) -> None:
    for wrong, text in (
        ({"dtype": "float32"}, "the type of a token is 'float32': write uint16, uint32, int32"),
        ({"length": 0}, "length is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"vocabulary": 0}, "vocabulary is 0"),
    ):
        with pytest.raises(ValueError, match=text):
            TokenReader("train", **{"dtype": "uint16", "length": 4} | wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the number of records of channel train is unknown"):
        feeder.feed(0, b"")
        len(TokenReader("train", "uint16", length=4))
    with pytest.raises(ValueError, match="'fixed:0' is no record format"):
        PipeReader("train", "fixed:0")


def test_records_of_a_fixed_size(feeder: Feeder) -> None:
    data = tokens(10 * 300_000)
    for epoch in range(2):
        feeder.feed(epoch, data.tobytes())
    records = list(PipeReader("train", "fixed:600000"))
    blocks = join_blocks(records, "uint16")
    assert blocks.flags.writeable
    assert np.array_equal(blocks, data.reshape(10, -1))
    with pytest.raises(CutRecord, match="inside a record of 4096 bytes"):
        list(PipeReader("train", "fixed:4096"))
    for wrong in ([], [b"12", b"1234"], [b"123"]):
        with pytest.raises(ValueError, match="are no blocks of uint16 tokens"):
            join_blocks(wrong, "uint16")


def test_ranks_share_blocks_in_equal_steps(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects of 5, 0, 7 and 8 blocks in global batches of 6 blocks, the last one left out."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "ml"))
    length, data = 64, tokens(20 * 64)
    cuts = [0, 5, 5, 12, 20]
    for number in range(4):
        part = data[cuts[number] * length : cuts[number + 1] * length]
        stub.objects[f"b/train/{number}"] = part.tobytes()
    document = job(stub.url, tmp_path / "ml", "b/train/")
    ranks = {"Count": 2, "GlobalBatch": 6, "Fetch": "separately"}
    records = {"Format": f"fixed:{2 * length}"}
    document["InputDataConfig"][0]["Penstock"] = {"Ranks": ranks, "Records": records}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        found = []
        for rank in range(2):
            reader = TokenReader(f"train-{rank}", "uint16", length=length, batch_size=3)
            assert (len(reader), reader.steps_per_epoch) == (3, 3)
            for step, array in enumerate(reader):
                found.append((step, rank, array.ravel()))
                assert reader.state_dict()["step"] == (step + 1) % 3
        for options, text in (
            ({"length": 32}, "Records.Format: fixed:128, .* and this reader reads fixed:64"),
            ({"length": 64, "overlap": True}, "leave out overlap"),
        ):
            with pytest.raises(ChannelError, match=text):
                list(TokenReader("train-0", "uint16", **options))  # type: ignore[arg-type]
        running.process.kill()
    found.sort(key=lambda each: each[:2])
    assert np.array_equal(np.concatenate([array for _, _, array in found]), data[: 18 * length])
