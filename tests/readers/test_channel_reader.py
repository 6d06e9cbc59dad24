"""A loaded state stays the reader's state until the first new record, whatever fails before it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from streamer.errors import ChannelError, TruncatedStream
from streamer.formats import recordio
from streamer.readers import PipeReader
from streamer.readers.tables import TableReader
from streamer.readers.tokens import TokenReader
from tests.readers.feeder import Feeder


def table() -> bytes:
    """Return a record with a table; pyarrow is imported when a test needs it."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    content = pa.table({"number": list(range(20))})
    with pa.ipc.new_stream(sink, content.schema) as out:
        out.write_table(content)
    return recordio.encode(sink.getvalue().to_pybytes())


RECORDS = b"".join(recordio.encode(b"%d" % number) for number in range(20))
READERS: dict[str, tuple[Callable[..., Any], bytes | Callable[[], bytes], dict[str, Any]]] = {
    "records": (PipeReader, RECORDS, {"record_format": "RecordIO"}),
    "shuffled": (PipeReader, RECORDS, {"record_format": "RecordIO", "seed": 1, "shuffle": 15}),
    "tokens": (TokenReader, bytes(range(200)), {"dtype": "uint16", "length": 5}),
    "tables": (TableReader, table, {"batch_rows": 1}),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("epoch", [0, None])
def test_a_loaded_state_survives_failures_before_the_first_record(
    feeder: Feeder, kind: str, epoch: int | None
) -> None:
    """No FIFO appears, then the FIFO ends early; a third iteration goes on after the record of the state."""
    made, content, options = READERS[kind]
    data = content() if callable(content) else content
    feed = feeder.feed(0, data)
    first = made("train", epoch=epoch, **options)
    records = iter(first)
    before = [str(each) for each in itertools.islice(records, 7)]
    state = first.state_dict()
    records.close()
    feed.join()

    reader = made("train", epoch=epoch, timeout=0.01, **options)
    reader.load_state_dict(state)
    with pytest.raises(ChannelError, match="did not appear"):
        next(iter(reader))
    assert reader.state_dict() == state
    feeder.feed(0, data[:60], state="failed", total=len(data))
    with pytest.raises((TruncatedStream, ChannelError)):
        next(iter(reader))
    assert reader.state_dict() == state

    feeder.feed(0, data)
    other = made("train", epoch=epoch, **options)
    other.load_state_dict(reader.state_dict())
    found = before + [str(each) for each in other]
    feeder.feed(1, data)
    assert sorted(found) == sorted(map(str, made("train", epoch=1, **options)))


@pytest.mark.parametrize(
    ("kind", "wrong"), [("records", "shufle"), ("tokens", "shuffle"), ("tables", "seed")]
)
def test_an_argument_that_a_reader_does_not_take_is_refused(feeder: Feeder, kind: str, wrong: str) -> None:
    make, _, options = READERS[kind]
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'"):
        make("train", **options, **{wrong: 3}, **feeder.directories)
