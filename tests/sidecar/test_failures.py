"""Channels that fail for good, as processes: foreign readers beside them, the trainer of `exec`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.formats import recordio, tfrecord
from tests.kit.harness import fill
from tests.kit.pipes import read_all
from tests.kit.processes import job, penstock, penstock_with, sidecar, write_job
from tests.kit.stub import Answer, S3Stub, fails
from tests.kit.trailers import published_trailer
from tests.sidecar import foreign
from tests.sidecar.test_shared_streams import status_with

PROGRAM = str(Path(foreign.__file__))


class Faults:
    """What S3 refuses, until it is mended: by object, from which byte on, and how."""

    def __init__(
        self, stub: S3Stub, **places: tuple[int, Callable[[Answer], Awaitable[web.StreamResponse]]]
    ) -> None:
        self.places = {f"b/{channel}/1": fault for channel, fault in places.items()}
        stub.weather = self

    def __call__(
        self, name: str, first: Any, _size: Any
    ) -> Callable[[Answer], Awaitable[web.StreamResponse]] | None:
        start, fault = self.places.get(name, (0, None))
        return fault if first >= start else None


def records(channel: str, encode: Callable[[bytes], bytes], *, objects: int = 3) -> Any:
    """Objects of a channel, and the digests of their records."""
    dice = random.Random(channel)
    made = [[dice.randbytes(dice.randrange(9000)) for _ in range(60)] for _ in range(objects)]
    found = {f"b/{channel}/{number}": b"".join(map(encode, each)) for number, each in enumerate(made)}
    return found, [hashlib.sha256(each).hexdigest() for one in made for each in one]


@contextlib.contextmanager
def reading(data: Path, reader: str, channel: str) -> Iterator[subprocess.Popen[str]]:
    """A foreign reader of one epoch; killed if it is still there."""
    command = [sys.executable, PROGRAM, reader, str(data), "1", channel]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def reported(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)[0]


@pytest.mark.timeout(120)
def test_held_readers_notice_a_pause_once_the_cause_is_mended(stub: S3Stub, tmp_path: Path) -> None:
    """Failures of every kind, in any place: `penstock restart` goes on at the exact byte."""
    pytest.importorskip("pandas")
    lines = [b"%d,%d\n" % (number, number * number) for number in range(60_000)]
    tables = {f"b/csv/{part}": b"".join(lines[part * 20_000 :][:20_000]) for part in range(3)}
    frames, frame_digests = records("frames", recordio.encode)
    examples, example_digests = records("examples", tfrecord.encode)
    raw = {f"b/raw/{number}": random.Random(number).randbytes(400_000) for number in range(3)}
    stub.objects |= tables | frames | examples | raw
    faults = Faults(
        stub,
        csv=(65_536, fails(403, "AccessDenied")),
        frames=(0, fails(404, "NoSuchKey")),
        examples=(131_072, fails(412, "PreconditionFailed")),
        raw=(65_536, fails(403, "AccessDenied")),
    )
    data = tmp_path / "ml" / "input" / "data"
    document = job(
        stub.url, tmp_path / "ml", "b/csv/", "b/frames/", "b/examples/", "b/raw/", PartSize="64KiB"
    )
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running, contextlib.ExitStack() as stack:
        running.wait_for("ready")
        readers = {
            channel: stack.enter_context(reading(data, reader, channel))
            for channel, reader in (
                ("csv", "csv_chunks"), ("frames", "dmlc"), ("examples", "incumbent_tfrecord"), ("raw", "cat"),
            )
        }  # fmt: skip
        events = {channel: running.wait_for("epoch failed", channel=channel) for channel in readers}
        assert {channel: event["key"] for channel, event in events.items()} == {
            channel: f"{channel}/1" for channel in readers
        }
        assert [events["csv"][name] for name in ("bucket", "offset", "attempt", "fifo")] == [
            "b", 65_536, 1, "held open",
        ]  # fmt: skip
        assert "`penstock restart` goes on at the exact byte" in events["csv"]["do"]
        assert events["csv"]["request_id"] == "REQERR"
        code, why = running.get("/readyz")
        assert (code, all(f"{channel}: " in why for channel in readers)) == (503, True)
        for channel in readers:
            assert f'penstock_channel_failed{{channel="{channel}"}} 1.0' in running.get("/metrics")[1]
            assert published_trailer(data, channel, 0).state == "failed"
            bottleneck = status_with(running, channel, lambda each: each["bottleneck"]["kind"] == "failed")
            assert bottleneck[channel]["bottleneck"]["remedy"] == events[channel]["do"]
        assert [process.poll() for process in readers.values()] == [None] * 4
        faults.places.clear()
        assert penstock("restart", "--base-directory", str(tmp_path / "ml")).returncode == 0
        assert reported(readers["csv"]) == [60_000, sum(range(60_000)), sum(n * n for n in range(60_000))]
        assert reported(readers["frames"]) == frame_digests
        assert reported(readers["examples"]) == example_digests
        assert reported(readers["raw"]) == hashlib.sha256(b"".join(raw.values())).hexdigest()
        again = running.wait_for("ready", times=2)["admin"]
        assert penstock("probe", "--url", again).returncode == 0
        for channel in readers:
            running.wait_for("epoch complete", channel=channel)
        assert running.end() == 0


@pytest.mark.timeout(120)
def test_a_keeper_holds_what_has_failed_beyond_the_end_of_the_sidecar(stub: S3Stub, tmp_path: Path) -> None:
    """SIGTERM is no end of the epoch either; the next sidecar goes on."""
    truth = fill(stub, [200_000, 200_000], prefix="b/train/")
    stub.objects = {f"b/train/{number}": data for number, data in enumerate(stub.objects.values())}
    faults = Faults(stub, train=(0, fails(403, "AccessDenied")))
    document = job(stub.url, tmp_path / "ml", "b/train/", PartSize="64KiB")
    path, data = write_job(tmp_path / "job.yaml", document), tmp_path / "ml" / "input" / "data"
    with contextlib.ExitStack() as stack:
        with sidecar(path, "--keeper", "auto") as first:
            first.wait_for("ready")
            reader = stack.enter_context(reading(data, "cat", "train"))
            first.wait_for("epoch failed")
            assert first.end() == 3
            first.wait_for(
                "left to the keeper, which holds the FIFO until its reader leaves", channel="train"
            )
        assert reader.poll() is None
        faults.places.clear()
        with sidecar(path, "--keeper", "auto") as second:
            assert reported(reader) == hashlib.sha256(truth).hexdigest()
            second.wait_for("epoch complete")
            assert second.end() == 0


def test_a_restart_goes_on_with_the_epoch_after_one_that_was_ended(stub: S3Stub, tmp_path: Path) -> None:
    """Rank FIFOs fail one by one; what ended is over, and a new sidecar offers the next epoch."""
    found, _ = records("train", tfrecord.encode, objects=2)
    stub.objects |= found
    faults = Faults(stub, train=(65_536, fails(404, "NoSuchKey")))
    document = job(stub.url, tmp_path / "ml", "b/train/", PartSize="64KiB")
    document["InputDataConfig"][0]["Penstock"] = {"Ranks": 2, "WhenFailed": "close"}
    data = tmp_path / "ml" / "input" / "data"
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        with reading(data, "cat", "train-0") as process:
            assert reported(process) == hashlib.sha256(found["b/train/0"]).hexdigest()
        with reading(data, "incumbent_tfrecord", "train-1") as process:
            _, err = process.communicate()
        assert "CRC check on data failed" in err  # which not every reader checks
        ended = running.wait_for("epoch failed", channel="train-1")
        assert ended["fifo"] == "closed"
        assert "restart sidecar and trainer" in ended["do"]
        faults.places.clear()
        running.process.send_signal(signal.SIGUSR2)
        running.wait_for("ready", times=2)
        assert not (data / "train-1_0").exists()
        assert read_all(data / "train-1_1") == found["b/train/1"]
        assert running.end() == 0


CHILDREN = {
    "hold": ({}, "cat", fails(403, "AccessDenied"), 3),
    "close": ({"WhenFailed": "close"}, "cat", fails(404, "NoSuchKey"), 6),
}


@pytest.mark.parametrize("policy", list(CHILDREN))
def test_exec_ends_its_child_with_a_message_and_the_failure_s_code(
    stub: S3Stub, tmp_path: Path, policy: str
) -> None:
    """Whatever the child makes of it: it waits, ends well, or ends with an error of its own."""
    extras, reader, fault, code = CHILDREN[policy]
    found, _ = records("train", recordio.encode)
    stub.objects |= found
    Faults(stub, train=(65_536, fault))
    document = job(stub.url, tmp_path / "ml", "b/train/", PartSize="64KiB")
    document["InputDataConfig"][0]["Penstock"] = extras
    grace = 0.8 if policy == "hold" else 40  # the others end by themselves, however slowly
    settings = f"sidecar.commands.execute.GRACE = {grace}", "sidecar.job.channel_log.REMIND_EVERY = 0.2"
    data = str(tmp_path / "ml" / "input" / "data")
    child = [sys.executable, PROGRAM, reader, data, "1", "train"]
    path = write_job(tmp_path / "job.yaml", document)
    done = subprocess.run(
        [*penstock_with(*settings), "exec", "-c", path, "--", *child],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    stated = {event["event"]: event for event in events}
    assert done.returncode == code
    assert stated["epoch failed"]["key"] == "train/1"
    if policy != "hold":
        assert "ending the trainer, whose channel failed" not in stated
        return
    message = stated["ending the trainer, whose channel failed"]
    assert (message["signal"], message["channel"], message["code"]) == ("SIGTERM", "train", code)
    assert "s3://b/train/1" in message["error"]
    assert stated["still held"]["channel"] == "train"
    assert done.stdout == ""


def test_a_channel_that_has_failed_waits_for_nothing(stub: S3Stub, tmp_path: Path) -> None:
    """The snapshot after the failure has requests that failed since the one before it."""
    fill(stub, [3_000_000], prefix="b/train/")
    stub.weather = lambda *_: fails(500, "InternalError")
    document = job(stub.url, tmp_path / "ml", "b/train/", GiveUpAfter=0.1)
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        with open(tmp_path / "ml/input/data/train_0", "rb"):
            running.wait_for("epoch failed")
            status_with(running, "train", lambda each: each["bottleneck"]["kind"] == "failed")
            running.end()
    names = [event["event"] for event in running.events]
    assert "waiting for storage" not in names[names.index("epoch failed") :]
