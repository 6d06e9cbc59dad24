"""A sidecar that streams while its listing goes on, and what may happen to either meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from aiohttp import web

from streamer.errors import ChannelError
from streamer.formats.recordio import encode
from streamer.readers import PipeReader
from tests.kit import stub as kit
from tests.kit.harness import fill
from tests.kit.pipes import read_all
from tests.kit.processes import PENSTOCK, Sidecar, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, error
from tests.kit.trailers import published_trailer

COUNT = 12
SIZES = [5000] * COUNT
PAGE = 3


@pytest.fixture
def truth(stub: S3Stub) -> bytes:
    """The content of four pages of listing, of which the first is answered."""
    stub.page, stub.pages_allowed = PAGE, 1
    return fill(stub, SIZES, prefix="b/train/")


@pytest.fixture
def serve(stub: S3Stub, tmp_path: Path) -> Callable[..., Any]:
    """Starts a sidecar of the channel `train`, and waits until it is ready."""

    @contextlib.contextmanager
    def start(*options: str, **channel: Any) -> Iterator[Sidecar]:
        document = job(stub.url, tmp_path / "ml", "b/train/", **channel.pop("penstock", {}))
        document["InputDataConfig"][0] |= channel
        with sidecar(write_job(tmp_path / "job.yaml", document), *options) as running:
            running.wait_for("ready")
            yield running

    return start


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "ml" / "input" / "data"


def take(file: IO[bytes], count: int) -> bytes:
    """Read exactly `count` bytes."""
    got = b""
    while len(got) < count and (piece := file.read(count - len(got))):
        got += piece
    return got


def test_objects_are_read_before_the_next_page_is_answered(
    stub: S3Stub, serve: Any, data: Path, truth: bytes
) -> None:
    with serve() as running:
        with open(data / "train_0", "rb", buffering=0) as file:
            got = take(file, 3 * 5000)
            status = running.status()["channels"]["train"]
            assert (status["listing"], status["bytes_total"], status["objects"]) == (True, None, 3)
            assert status["bottleneck"]["kind"] in ("idle", "storage", "even", "trainer")
            metrics = running.get("/metrics")[1]
            assert 'penstock_channel_listing{channel="train"} 1.0' in metrics
            assert "penstock_epoch_size_bytes{" not in metrics
            assert 'penstock_epoch_eta_seconds{channel="train"} NaN' in metrics
            assert running.wait_for("listing goes on")["objects"] == 3
            assert not [each for each in running.events if each["event"] == "planned"]
            for pages in (2, 3):
                stub.allow_pages(pages)
                got += take(file, 3 * 5000)
            stub.allow_pages()
            got += file.readall()
        assert got == truth
        planned = running.wait_for("planned")
        assert (planned["objects"], planned["bytes"]) == (COUNT, len(truth))
        trailer = published_trailer(data, "train", 0)
        assert (trailer.state, trailer.bytes_total, trailer.objects) == ("complete", len(truth), COUNT)
        assert trailer.digest.startswith(planned["digest"])
        assert read_all(data / "train_1") == truth
        status = running.status()["channels"]["train"]
        assert (status["listing"], status["bytes_total"]) == (False, len(truth))
        assert 'penstock_channel_listing{channel="train"} 0.0' in running.get("/metrics")[1]
        assert running.end() == 0


def test_the_proof_of_a_listing_s_end_comes_beside_the_first_objects(
    stub: S3Stub, serve: Any, data: Path, truth: bytes
) -> None:
    """The epoch itself ends with that proof: one LIST after the last key."""
    stub.page = 0
    with serve() as running:
        assert "planned" not in [each["event"] for each in running.events]
        with open(data / "train_0", "rb", buffering=0) as file:
            got = take(file, len(truth))
            stub.allow_pages()
            assert got + file.readall() == truth
        assert running.wait_for("planned")["objects"] == COUNT
        assert published_trailer(data, "train", 0).bytes_total == len(truth)
    assert (len(stub.listings), stub.split_listings) == (2, 1)


@pytest.mark.parametrize("shuffled", [True, False])
def test_what_needs_every_object_waits_for_the_listing(
    stub: S3Stub, tmp_path: Path, truth: bytes, shuffled: bool
) -> None:
    """A shuffled order, and a balance of bytes between rank FIFOs."""
    document = job(stub.url, tmp_path / "ml", "b/train/", **({} if shuffled else {"ShardBy": "bytes"}))
    channel = document["InputDataConfig"][0]
    channel |= {"ShuffleConfig": {"Seed": 7}} if shuffled else {"Penstock": {"Ranks": 2}}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("starting")
        stub.allow_pages()
        running.wait_for("ready")
        events = [each["event"] for each in running.events]
        assert events.index("planned") < events.index("ready")
        assert len(truth) == sum(SIZES)


def test_a_limit_and_a_further_prefix_are_streamed_while_the_listing_goes_on(
    stub: S3Stub, serve: Any, data: Path, truth: bytes
) -> None:
    further = fill(stub, [100] * 4, prefix="b/more/", seed=2)
    options = {"AlsoFrom": ["s3://b/more/"], "Limit": {"Objects": COUNT - 1 + 2}, "Exclude": ["0004"]}
    with serve(Penstock=options) as running:
        with open(data / "train_0", "rb", buffering=0) as file:
            assert take(file, 3 * 5000) == truth[: 3 * 5000]
            stub.allow_pages()
            assert file.readall() == truth[3 * 5000 : 4 * 5000] + truth[5 * 5000 :] + further[:200]
        assert running.wait_for("planned")["objects"] == COUNT + 1


def test_rank_fifos_are_dealt_while_the_listing_goes_on(
    stub: S3Stub, serve: Any, data: Path, truth: bytes
) -> None:
    objects = [truth[at : at + 5000] for at in range(0, len(truth), 5000)]
    with serve(Penstock={"Ranks": 2}, RecordWrapperType="RecordIO") as running:
        with (
            open(data / "train-0_0", "rb", buffering=0) as first,
            open(data / "train-1_0", "rb", buffering=0) as second,
        ):
            size = len(encode(objects[0]))
            got = take(first, 2 * size), take(second, size)
            stub.allow_pages()
            got = got[0] + first.readall(), got[1] + second.readall()
        for rank in range(2):
            assert got[rank] == b"".join(map(encode, objects[rank::2]))
            assert published_trailer(data, f"train-{rank}", 0).state == "complete"
        assert running.wait_for("planned")["ranks"] == 2


def killed(serve: Any, data: Path, *, read: int) -> IO[bytes]:
    """Kill a sidecar whose reader has some bytes of the first page; return the reader's file."""
    with serve("--keeper", "auto") as running:
        file = open(data / "train_0", "rb", buffering=0)  # noqa: SIM115 - closed by the caller
        try:
            file.taken = take(file, read)  # type: ignore[attr-defined]
            running.process.kill()
            running.process.wait()
        except BaseException:
            file.close()
            raise
    return file


@pytest.fixture
def no_keeper_left(data: Path) -> Iterator[None]:
    yield
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            command = Path("/proc", name, "cmdline").read_bytes() if name.isdigit() else b""
            if str(data).encode() in command and b"keeper" in command:
                os.kill(int(name), signal.SIGKILL)


@pytest.mark.usefixtures("no_keeper_left")
@pytest.mark.parametrize("read", [1, 7000, 15_000])
def test_a_sidecar_killed_while_listing_goes_on_at_the_exact_byte(
    stub: S3Stub, serve: Any, data: Path, truth: bytes, read: int
) -> None:
    with killed(serve, data, read=read) as file:
        stub.allow_pages()
        with serve("--keeper", "auto") as running:
            assert file.taken + file.readall() == truth  # type: ignore[attr-defined]
            assert published_trailer(data, "train", 0).state == "complete"
            assert read_all(data / "train_1") == truth
            assert running.end() == 0


@pytest.mark.usefixtures("no_keeper_left")
def test_a_restart_while_listing_is_a_pause(stub: S3Stub, serve: Any, data: Path, truth: bytes) -> None:
    with serve() as running, open(data / "train_0", "rb", buffering=0) as file:
        got = take(file, 7000)
        running.process.send_signal(signal.SIGUSR2)
        running.wait_for("starting", times=2)
        stub.allow_pages()
        assert got + file.readall() == truth
        assert running.wait_for("resuming")["offset"] >= 7000
        assert published_trailer(data, "train", 0).state == "complete"
        assert running.end() == 0


@pytest.mark.usefixtures("no_keeper_left")
def test_objects_that_the_first_sidecar_had_not_listed_may_change(
    stub: S3Stub, serve: Any, data: Path, truth: bytes
) -> None:
    """No byte of them was streamed: the next sidecar streams what it lists."""
    with killed(serve, data, read=100) as file:
        stub.objects["b/train/0011"] = b"new"
        stub.allow_pages()
        with serve("--keeper", "auto"):
            assert file.taken + file.readall() == truth[:-5000] + b"new"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_keeper_left")
@pytest.mark.parametrize("change", ["replaced", "added", "removed"])
def test_a_change_before_the_position_is_refused_by_name(
    stub: S3Stub, serve: Any, data: Path, truth: bytes, change: str
) -> None:
    with killed(serve, data, read=5100) as file:
        match change:
            case "replaced":
                stub.objects["b/train/0000"] = b"new" + truth[3:5000]
            case "added":
                stub.objects["b/train/00001"] = b"new"
            case _:
                del stub.objects["b/train/0001"]
        stub.allow_pages()
        with serve("--keeper", "auto") as running:
            failed = running.wait_for("epoch failed")
            assert "the plan has changed since epoch 0 began" in failed["error"]
            assert "over the 3 objects that were listed then" in failed["error"]
            assert failed["fifo"] == "held open"
            assert published_trailer(data, "train", 0).state == "failed"
        assert file.taken == truth[:5100]  # type: ignore[attr-defined]


def listing_answers(
    monkeypatch: pytest.MonkeyPatch, number: int, answer: Callable[[web.Response], web.Response]
) -> None:
    """Spoil the listing's answer of this number, and each after it."""
    right = kit.S3Stub.answer_listing

    async def spoilt(self: S3Stub, request: web.Request, bucket: str) -> web.Response:
        response = await right(self, request, bucket)
        return answer(response) if len(self.listings) >= number else response

    monkeypatch.setattr(kit.S3Stub, "answer_listing", spoilt)


def replaced(before: str, after: str) -> Callable[[web.Response], web.Response]:
    def answer(response: web.Response) -> web.Response:
        text = response.text or ""
        return web.Response(content_type="application/xml", text=text.replace(before, after))

    return answer


@pytest.mark.parametrize(
    ("answer", "text", "code"),
    [
        (lambda _: error(403, "AccessDenied"), "the listing failed after 3 objects", 3),
        (replaced("train/0003", "train/0002"), "the listing names the object twice", 5),
        (replaced("train/0003", "train/0001"), "name the objects in a manifest", 5),
        (replaced("train/0004", "train/0003"), "the listing names the object twice", 5),
        (replaced("<Size>5000<", "<Size>-1<"), "the listing failed after 3 objects", 5),
        (replaced("train/0003", "other"), "does not begin with the prefix", 5),
        (lambda _: web.Response(text="<page>", content_type="text/xml"), "after 3 objects", 5),
    ],
    ids=["denied", "twice", "out of order", "twice in a page", "size", "prefix", "no listing"],
)
def test_a_page_that_cannot_be_believed_fails_the_epoch_after_the_pages_before(
    request: pytest.FixtureRequest, serve: Any, data: Path, *, answer: Any, text: str, code: int
) -> None:
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    stub, truth = request.getfixturevalue("stub"), request.getfixturevalue("truth")
    listing_answers(monkeypatch, 2, answer)
    with serve() as running:
        with open(data / "train_0", "rb", buffering=0) as file:
            assert take(file, 3 * 5000) == truth[: 3 * 5000]
            stub.allow_pages()
            failed = running.wait_for("epoch failed")
            assert text in failed["error"]
            assert "s3://b/" in failed["error"]
            assert running.wait_for("listing failed")["objects"] == 3
            trailer = published_trailer(data, "train", 0)
            assert (trailer.state, trailer.bytes_delivered) == ("failed", 3 * 5000)
            assert running.get("/readyz")[0] == 503
        assert running.end() == code


def test_an_outage_in_mid_listing_is_a_pause(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, serve: Any, data: Path, truth: bytes
) -> None:
    outage = [error(503, "SlowDown") for _ in range(3)]
    listing_answers(monkeypatch, 2, lambda right: outage.pop() if outage else right)
    with serve() as running:
        with open(data / "train_0", "rb", buffering=0) as file:
            stub.allow_pages()
            assert take(file, len(truth) + 1) == truth
        assert published_trailer(data, "train", 0).state == "complete"
        assert not outage
        assert running.end() == 0


def test_a_listing_out_of_order_from_its_first_page_on_is_sorted_before_it_streams(
    stub: S3Stub, serve: Any, data: Path, truth: bytes
) -> None:
    stub.unsorted_pages = True
    stub.allow_pages()
    with serve() as running:
        assert read_all(data / "train_0") == truth
        events = [each["event"] for each in running.events]
        assert "listing goes on" not in events


@pytest.mark.parametrize("reader", [True, False])
def test_a_signal_while_listing_ends_the_sidecar(serve: Any, data: Path, truth: bytes, reader: bool) -> None:
    """Without a reader at once; with one after `DrainFor`, and the epoch says that it was stopped."""
    with serve(penstock={"DrainFor": 1}) as running, contextlib.ExitStack() as stack:
        if reader:
            file = stack.enter_context(open(data / "train_0", "rb", buffering=0))
            assert take(file, 5000) == truth[:5000]
        assert running.end() == 0
        if reader:
            assert published_trailer(data, "train", 0).state == "stopped"
            assert running.wait_for("cut off")["missing_bytes"] is None


def records(reader: PipeReader, count: int) -> list[bytes]:
    found = iter(reader)
    return [next(found) for _ in range(count)]


def test_a_state_that_was_saved_while_listing_resumes(
    stub: S3Stub, serve: Any, data: Path, tmp_path: Path, truth: bytes
) -> None:
    """The sidecar compares the objects listed then, and only a sidecar with that state lets the reader on."""
    objects = [truth[at : at + 5000] for at in range(0, len(truth), 5000)]

    def reader(name: str) -> PipeReader:
        return PipeReader("train", "RecordIO", epoch=0, pipe_dir=str(data), state_dir=str(tmp_path / name))

    with serve(RecordWrapperType="RecordIO"):
        first = reader("first")
        assert records(first, 2) == objects[:2]
        state = json.loads(json.dumps(first.state_dict()))
        assert state["digest"].startswith("3:")
    stub.allow_pages()
    with serve("--resume", json.dumps(state), RecordWrapperType="RecordIO"):
        second = reader("second")
        second.load_state_dict(state)
        assert list(second) == objects[2:]
        assert ":" not in second.state_dict()["digest"]
    with serve(RecordWrapperType="RecordIO"):
        third = reader("third")
        third.load_state_dict(state)
        with pytest.raises(ChannelError, match="start it with --resume and this state"):
            list(third)
    stub.objects["b/train/0001"] = b"new"
    job_file = str(tmp_path / "job.yaml")
    refused = penstock("run", "-c", job_file, "--resume", json.dumps(state))
    assert refused.returncode == 2
    assert "over the 3 objects that were listed then" in refused.stderr


def test_a_state_of_the_whole_plan_waits_for_the_listing(
    stub: S3Stub, serve: Any, data: Path, tmp_path: Path, truth: bytes
) -> None:
    """A position in epoch 0 needs no --resume: the reader compares the digest when the sidecar has it."""
    objects = [truth[at : at + 5000] for at in range(0, len(truth), 5000)]
    stub.allow_pages()
    with serve(RecordWrapperType="RecordIO") as running:
        running.wait_for("planned")
        first = PipeReader(
            "train", "RecordIO", epoch=0, pipe_dir=str(data), state_dir=str(tmp_path / "first")
        )
        assert records(first, 2) == objects[:2]
        state = first.state_dict()
        assert ":" not in state["digest"]
    stub.listings.clear()
    stub.pages_allowed = 1
    with serve(RecordWrapperType="RecordIO"):
        second = PipeReader(
            "train", "RecordIO", epoch=0, pipe_dir=str(data), state_dir=str(tmp_path / "second")
        )
        second.load_state_dict(state)
        stub.allow_pages()
        assert list(second) == objects[2:]


@contextlib.contextmanager
def catting(stub: S3Stub, *uris: str) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock cat`, with pipes for its output and its errors."""
    command = [*PENSTOCK, "cat", "--endpoint-url", stub.url, "--path-style", *uris]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


def test_cat_writes_objects_before_the_next_page_is_answered(stub: S3Stub, truth: bytes) -> None:
    with catting(stub, "s3://b/train/") as running:
        assert running.stdout is not None
        got = take(running.stdout, 3 * 5000)
        for pages in (2, 3, None):
            stub.allow_pages(pages)
            got += take(running.stdout, 3 * 5000)
        assert got + running.stdout.read() == truth
        assert running.wait() == 0


def test_cat_lists_prefixes_and_objects_in_turn(stub: S3Stub, truth: bytes) -> None:
    """For an object's own key nothing more is listed; for a prefix its pages, and the proof of its end."""
    stub.objects |= {"b/a": b"first", "b/ab": b"not this", "b/z/1": b"last"}
    stub.allow_pages()
    with catting(stub, "s3://b/z/", "s3://b/a", "s3://b/train/") as running:
        assert running.stdout is not None
        assert running.stdout.read() == b"lastfirst" + truth
        assert running.wait() == 0
    assert stub.listings == ["z/", "z/", "a", *["train/"] * (COUNT // PAGE + 1)]


def test_a_reader_of_cat_that_leaves_ends_the_listing(stub: S3Stub, truth: bytes) -> None:
    with catting(stub, "s3://b/train/") as running:
        assert running.stdout is not None
        assert take(running.stdout, 10) == truth[:10]
        running.stdout.close()
        assert running.wait() == 141


@pytest.mark.parametrize("late", [False, True])
def test_cat_of_a_prefix_without_objects_fails(stub: S3Stub, truth: bytes, late: bool) -> None:
    """After the objects of the prefixes before it: its exit code is the error's."""
    stub.allow_pages()
    uris = ["s3://b/train/", "s3://b/none/"]
    with catting(stub, *(uris if late else uris[::-1])) as running:
        out, err = running.communicate()
        assert out == (truth if late else b"")
        assert b"no object matches this prefix" in err
        assert running.returncode == 4


def test_cat_of_a_listing_that_fails_has_its_error(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, truth: bytes
) -> None:
    listing_answers(monkeypatch, 2, lambda _: error(403, "AccessDenied"))
    stub.allow_pages()
    with catting(stub, "s3://b/train/") as running:
        out, err = running.communicate()
        assert out == truth[: 3 * 5000]
        assert b"the listing failed after 3 objects" in err
        assert running.returncode == 3
