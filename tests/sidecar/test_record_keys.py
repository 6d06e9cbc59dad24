"""Keys of records, by real processes: each record says its object and number, and the readers must too."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamer.errors import ChannelError
from streamer.formats import recordio, tfrecord
from streamer.key_list import key_list_path
from streamer.readers import KeyedRecord, PipeReader
from streamer.readers.tokens import TokenReader
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import S3Stub

KEYS = ["a", "b\n[0, 0]", "c/ü💥", "d empty", "e", "f"]
"""Last steps of keys. The fourth object is empty."""
COUNTS = [3, 400, 1, 0, 77, 250]
"""Records of these objects."""
SIZE = 64
"""Bytes of a record in an object of lines."""


def payload(key: str, number: int) -> bytes:
    """The bytes of a record, which say what it is."""
    return json.dumps([key, number]).encode()


def line(key: str, number: int) -> bytes:
    return payload(key, number).ljust(SIZE - 1) + b"\n"


def put(stub: S3Stub, channel: str, kind: str) -> None:
    """Put the objects of a channel."""
    for end, count in zip(KEYS, COUNTS, strict=True):
        key = f"{channel}/{end}"
        encode = {"TFRecord": tfrecord.encode, "RecordIO": recordio.encode}.get(kind)
        parts = [encode(payload(key, n)) if encode else line(key, n) for n in range(count)]
        data = b"".join(parts)
        if kind == "wrapped":
            data = payload(key, 0) * (count > 0)
        stub.objects[f"b/{key}"] = data


def directories(base: Path) -> dict[str, Any]:
    return {
        "pipe_dir": str(base / "input/data"),
        "config_dir": str(base / "input/config"),
        "state_dir": str(base / "pipe_state"),
    }


def check(records: Sequence[KeyedRecord], channel: str) -> None:
    """Every record has the key and the number that it says."""
    for record, key, number, bucket in records:
        assert bucket == "b"
        assert key.startswith(f"{channel}/")
        assert json.loads(record) == [key, number], (channel, key, number)


def channels_of(stub: S3Stub, base: Path, **channels: dict[str, Any]) -> dict[str, Any]:
    document = job(stub.url, base, *(f"b/{name}/" for name in channels))
    for channel, more in zip(document["InputDataConfig"], channels.values(), strict=True):
        penstock = {"RecordKeys": True} | more.pop("Penstock", {})
        channel.update(more | {"Penstock": penstock})
    return document


def test_records_of_every_kind_of_channel(stub: S3Stub, tmp_path: Path) -> None:
    """Shuffled, wrapped, inflated; keys with line ends and of other scripts; empty objects; two epochs."""
    wrapped: dict[str, Any] = {"RecordWrapperType": "RecordIO"}
    shuffled = {"ShuffleConfig": {"Seed": 3}}
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "plain": ("TFRecord", "TFRecord", shuffled),
        "text": ("lines", "TextLine", {}),
        "fixed": ("lines", f"fixed:{SIZE}", {}),
        "frames": ("RecordIO", "RecordIO", {}),
        "wrapped": ("wrapped", "RecordIO", wrapped | shuffled),
        "gzip": ("TFRecord", "TFRecord", {"CompressionType": "Gzip"}),
        "both": ("wrapped", "RecordIO", wrapped | shuffled | {"CompressionType": "Gzip"}),
    }
    for name, (kind, _, more) in kinds.items():
        put(stub, name, kind)
        for key, data in stub.objects.items():
            if key.startswith(f"b/{name}/") and "CompressionType" in more and data:
                stub.objects[key] = gzip.compress(data)
    base = tmp_path / "ml"
    document = channels_of(stub, base, **{name: more for name, (_, _, more) in kinds.items()})
    with sidecar(write_job(tmp_path / "job.yaml", document)) as started:
        started.wait_for("ready")
        for name, (kind, record_format, _) in kinds.items():
            reader = PipeReader(name, record_format, key=True, **directories(base))
            for _ in range(6 if name == "plain" else 2):
                records = list(reader)
                each = [1] * len(COUNTS) if kind == "wrapped" else COUNTS
                assert len(records) == sum(each), name
                if kind == "wrapped":
                    assert [(found.key, found.number) for found in records if not found.record] == [
                        (f"{name}/d empty", 0)
                    ]
                check([found for found in records if found.record], name)
        assert started.end() == 0
    lists = [Path(key_list_path(str(base / "input/data"), "plain", epoch)) for epoch in range(6)]
    assert [each.exists() for each in lists] == [False] * 2 + [True] * 4


@pytest.mark.parametrize("more", [{}, {"Copies": 2}, {"Fetch": "together"}])
def test_ranks_by_record(stub: S3Stub, tmp_path: Path, more: dict[str, Any]) -> None:
    """Runs of records, of two sources that are mixed, on several FIFOs."""
    put(stub, "one", "lines")
    put(stub, "two", "lines")
    base = tmp_path / "ml"
    document = channels_of(
        stub,
        base,
        one={
            "ShuffleConfig": {"Seed": 5},
            "Penstock": {
                "AlsoFrom": ["s3://b/two/"],
                "Mix": {
                    "Weights": [2, 1],
                    "By": "record",
                    "Then": [{"Epoch": 0, "Step": 2, "Weights": [1, 2]}],
                },
                "Ranks": {"Count": 2, "GlobalBatch": 16, "Block": 640} | more,
                "Records": {"Format": f"fixed:{SIZE}"},
            },
        },
    )
    with sidecar(write_job(tmp_path / "job.yaml", document)) as started:
        started.wait_for("ready")
        names = [f"one-{index}" for index in range(2 * more.get("Copies", 1))]
        readers = [PipeReader(name, "TextLine", key=True, **directories(base)) for name in names]
        for _ in range(2):
            with ThreadPoolExecutor(len(names)) as threads:
                seen: list[list[KeyedRecord]] = list(threads.map(list, readers))
            for found in seen:
                check([each for each in found if each.key.startswith("one/")], "one")
                check([each for each in found if each.key.startswith("two/")], "two")
            assert {each.key.partition("/")[0] for each in seen[0]} == {"one", "two"}


def test_a_killed_sidecar_and_a_resumed_one_go_on_with_the_list(stub: S3Stub, tmp_path: Path) -> None:
    """Killed in mid-epoch under a keeper; then both processes anew, from a state inside an object."""
    for end in range(40):
        key = f"plain/{end}"
        stub.objects[f"b/{key}"] = b"".join(
            tfrecord.encode(payload(key, number).ljust(1000)) for number in range(150)
        )
        key = f"gzip/{end}"
        stub.objects[f"b/{key}"] = gzip.compress(
            b"".join(tfrecord.encode(payload(key, number).ljust(1000)) for number in range(150)), 1
        )
    base = tmp_path / "ml"
    path = write_job(
        tmp_path / "job.yaml", channels_of(stub, base, plain={}, gzip={"CompressionType": "Gzip"})
    )
    names = ("plain", "gzip")
    readers = {name: PipeReader(name, "TFRecord", key=True, **directories(base)) for name in names}
    epochs = {name: iter(reader) for name, reader in readers.items()}
    with sidecar(path, "--keeper", "auto") as started:
        started.wait_for("ready")
        for name, records in epochs.items():
            check(list(islice(records, 1900)), name)
    with sidecar(path, "--keeper", "auto") as started:
        started.wait_for("ready")
        for name, records in epochs.items():
            rest = list(records)
            check(rest, name)
            assert len(rest) == 40 * 150 - 1900
        second = {name: iter(reader) for name, reader in readers.items()}
        for name, records in second.items():
            check(list(islice(records, 2045)), name)
        del records
        states = [json.loads(json.dumps(reader.state_dict())) for reader in readers.values()]
        second.clear()  # leaves the epochs early
        assert started.end() == 0
    file = tmp_path / "state.json"
    file.write_text(json.dumps(states))
    with sidecar(path, "--resume", str(file)) as started:
        started.wait_for("ready")
        for state in states:
            reader = PipeReader(state["channel"], "TFRecord", key=True, **directories(base))
            reader.load_state_dict(state)
            rest = list(reader)
            assert (len(rest), rest[0].number) == (40 * 150 - 2045, 2045 % 150)
            check(rest, state["channel"])


LENGTH = 16
"""Tokens of a block, of 4 bytes."""


def check_blocks(elements: Sequence[KeyedRecord]) -> int:
    """Every block has the key and the number that its tokens say; return how many blocks there are."""
    blocks = np.concatenate([each.record for each in elements])
    assert (blocks == blocks[:, :1]).all()
    due = [int(key.rpartition("/")[2]) << 16 for each in elements for key in each.key]
    assert ((np.concatenate([each.number for each in elements]) + due) == blocks[:, 0]).all()
    return len(due)


def test_blocks_of_tokens(stub: S3Stub, tmp_path: Path) -> None:
    """Key lists of ranks by record, and of objects that are inflated, resumed inside one of them."""
    counts = [5, 0, 300, 200, 70]
    for at, count in enumerate(counts):
        blocks = (np.arange(count, dtype="uint32") | at << 16).repeat(LENGTH).tobytes()
        stub.objects[f"b/shared/{at}"] = blocks
        stub.objects[f"b/whole/{at}"] = gzip.compress(blocks) if count else b""
    base = tmp_path / "ml"
    shared = {"Ranks": {"Count": 2, "GlobalBatch": 16}, "Records": {"Format": f"fixed:{4 * LENGTH}"}}
    document = channels_of(
        stub,
        base,
        shared={"ShuffleConfig": {"Seed": 5}, "Penstock": shared},
        whole={"CompressionType": "Gzip"},
    )
    path = write_job(tmp_path / "job.yaml", document)

    def reader(channel: str) -> TokenReader:
        return TokenReader(channel, "uint32", length=LENGTH, batch_size=8, key=True, **directories(base))

    with sidecar(path) as started:
        started.wait_for("ready")
        with ThreadPoolExecutor(2) as threads:
            found: list[list[Any]] = list(threads.map(list, map(reader, ("shared-0", "shared-1"))))
        assert [check_blocks(each) for each in found] == [sum(counts) // 16 * 8] * 2
        begun = reader("whole")
        elements = iter(begun)
        assert check_blocks(list(islice(elements, 50))) == 400
        state = begun.state_dict()
        del elements
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    with sidecar(path, "--resume", str(file)) as started:
        started.wait_for("ready")
        rest = reader("whole")
        rest.load_state_dict(state)
        assert check_blocks(list(rest)) == sum(counts) - 400


def test_without_record_keys_a_reader_says_so(stub: S3Stub, tmp_path: Path) -> None:
    put(stub, "train", "TFRecord")
    base = tmp_path / "ml"
    path = write_job(tmp_path / "job.yaml", job(stub.url, base, "b/train/"))
    with sidecar(path) as started:
        started.wait_for("ready")
        with pytest.raises(ChannelError, match=r"has no key list.*RecordKeys"):
            list(PipeReader("train", "TFRecord", key=True, **directories(base)))
        assert not list((base / "input/data").glob("*.keys"))


def test_tensorflow_begins_at_a_step_of_ranks_by_record(stub: S3Stub, tmp_path: Path) -> None:
    """A state of steps, which is inside an object, for the sidecar and the reader."""
    pytest.importorskip("tensorflow")
    from streamer.readers.tensorflow import PipeModeDataset

    put(stub, "train", "lines")
    base = tmp_path / "ml"
    ranks = {"Count": 2, "GlobalBatch": 16, "Fetch": "separately"}
    records = {"Format": f"fixed:{SIZE}"}
    document = channels_of(stub, base, train={"Penstock": {"Ranks": ranks, "Records": records}})
    path = write_job(tmp_path / "job.yaml", document)

    def dataset(**options: Any) -> Any:
        return PipeModeDataset(
            "train-1", "TextLine", batch_size=8, key=True, positions=True, **options, **directories(base)
        )

    def checked(elements: Any) -> list[Any]:
        found = [
            KeyedRecord(record, key.decode(), number, bucket.decode())
            for each, _ in elements
            for record, key, number, bucket in zip(*(column.tolist() for column in each), strict=True)
        ]
        check(found, "train")
        return found

    with sidecar(path) as started:
        started.wait_for("ready")
        batches = list(dataset().as_numpy_iterator())
        whole = checked(batches)
        assert len(whole) == sum(COUNTS) // 16 * 8
    state = json.loads(batches[10][1])
    assert state["step"] == 11
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    with sidecar(path, "--resume", str(file)) as started:
        started.wait_for("ready")
        assert checked(dataset(start=state).as_numpy_iterator()) == whole[11 * 8 :]
