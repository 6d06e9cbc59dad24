"""What a sidecar finds in the FIFO directory of one that died."""

from __future__ import annotations

from pathlib import Path

from streamer.sink.fifo import FifoDirectory
from streamer.trailer import Trailer, fifo_path


def test_a_trailer_that_was_half_written_goes(tmp_path: Path) -> None:
    def opening(epoch: int) -> Trailer:
        return Trailer(channel="train", epoch=epoch, state="open", bytes_total=1, digest="d")

    half = tmp_path / ".train_2.penstock.json.4711.tmp"
    other = tmp_path / ".train_2.penstock.json.4711.tmp.mine"
    for path in (half, other):
        path.write_text("{")
    fifos = FifoDirectory(str(tmp_path), "train", opening=opening)
    try:
        assert fifos.resume(2) == 2
        assert not half.exists()
        assert other.exists()
    finally:
        fifos.close()
    assert not (tmp_path / fifo_path(str(tmp_path), "train", 2)).exists()
