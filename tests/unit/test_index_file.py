"""The file of a record index: whatever a killed build leaves is continued; one process writes."""

from __future__ import annotations

import fcntl
import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from sidecar.index.file import open_index
from streamer.errors import ConfigError, SinkError
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject
from tests.kit.index import read_index

TFRECORD = RecordFormat.parse("TFRecord")


def row(name: int, records: int = 3) -> IndexedObject:
    return IndexedObject(name, name + 1, 100, records, 100, array("Q", range(records)))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file of four rows, in blocks of two, one and one."""
    found = str(tmp_path / "new" / "c.index")
    with open_index(found, TFRECORD) as file:
        for rows in ([row(1), row(2)], [row(3)], [row(4)]):
            file.append(rows)
    return found


def test_a_file_that_is_cut_off_anywhere_is_continued(path: str) -> None:
    whole = Path(path).read_bytes()
    seen = set()
    for size in range(len(whole) + 1):
        Path(path).write_bytes(whole[:size])
        if 0 < size < 36:
            refused = pytest.raises(SinkError, match="cannot be read as a record index")
            with refused, open_index(path, TFRECORD):
                raise AssertionError
            continue
        with open_index(path, TFRECORD) as file:
            kept = file.index.names()
            assert kept in ([], [1, 2], [1, 2, 3], [1, 2, 3, 4])
            seen.add(len(kept))
            file.append([row(9)])
        assert read_index(path).names() == [*kept, 9]
    assert seen == {0, 2, 3, 4}


def test_tidy_leaves_what_counts_in_order_by_one_rename(path: str) -> None:
    with open_index(path, TFRECORD) as file:
        file.append([row(2, records=7)])
        before = os.stat(path).st_ino
        Path(f"{path}.tmp").write_bytes(b"of a build that was killed")
        file.tidy([4, 2, 1])
        assert file.index.names() == [4, 2, 1]
    assert os.stat(path).st_ino != before
    found = read_index(path)
    assert list(found) == [row(4), row(2, records=7), row(1)]
    assert found.replaced == 0
    assert os.listdir(os.path.dirname(path)) == ["c.index"]

    before = os.stat(path).st_ino
    with open_index(path, TFRECORD) as file:
        file.tidy([4, 2, 1])
    assert os.stat(path).st_ino == before, "there was nothing to do"


def test_a_rewrite_that_fails_leaves_the_file_as_it_was(path: str) -> None:
    before = Path(path).read_bytes()
    with open_index(path, TFRECORD) as file, pytest.raises(KeyError):
        file.tidy([1, 99])
    assert Path(path).read_bytes() == before
    assert os.listdir(os.path.dirname(path)) == ["c.index"]


def test_one_process_writes_a_file(path: str) -> None:
    refused = pytest.raises(SinkError, match="another process writes")
    with open_index(path, TFRECORD), refused, open_index(path, TFRECORD):
        raise AssertionError
    lines = RecordFormat.parse("lines")
    with pytest.raises(ConfigError, match="is of TFRecord, and not of lines"), open_index(path, lines):
        raise AssertionError


def test_the_lock_is_of_the_file_that_has_the_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build renames its new file to the name between open(2) and flock(2)."""
    real = fcntl.flock
    calls: list[int] = []

    def flock(fd: int, operation: int) -> Any:
        if not calls:
            Path(f"{path}.other").write_bytes(Path(path).read_bytes())
            os.rename(f"{path}.other", path)
        calls.append(os.fstat(fd).st_ino)
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with open_index(path, TFRECORD) as file:
        file.append([row(9)])
    assert len(calls) == 2
    assert read_index(path).names() == [1, 2, 3, 4, 9]


def test_rows_that_do_not_come_into_the_index_are_no_success(path: str) -> None:
    """Another program has made the file longer: the block is not where the index ends."""
    with open_index(path, TFRECORD) as file:
        with open(path, "ab") as other:
            other.write(b"ten bytes.")
        with pytest.raises(SinkError, match="was overwritten while it was in use"):
            file.append([row(9)])
        assert file.index.names() == [1, 2, 3, 4]
        assert file.writes == 0
    Path(path).write_bytes(Path(path).read_bytes())
    with open_index(path, TFRECORD) as file:
        assert file.index.names()[:4] == [1, 2, 3, 4]
