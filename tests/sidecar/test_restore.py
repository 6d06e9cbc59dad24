"""Checkpoints in S3 become files before the trainer starts: whole, verified, and never over a local file."""

from __future__ import annotations

import base64
import json
import re
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc64nvme

from sidecar.config.hosts import Hosts
from sidecar.config.job import Job
from sidecar.download import restore as restore_module
from sidecar.download.checkpoints import InS3, files_of, list_checkpoints, whole_steps
from sidecar.download.restore import restore_checkpoints
from sidecar.observe.state import JobState
from sidecar.upload.journal import Journal, journal_of
from sidecar.upload.markers import Marker
from streamer.directory import Directory
from streamer.errors import BadAnswer, ConfigError, Denied, Mismatch, Missing, SinkError
from streamer.plan import ObjectRef, S3Uri
from streamer.retry import RetryPolicy
from tests.kit.harness import clients_of
from tests.kit.pipes import eventually
from tests.kit.processes import job, penstock, sidecar, write_job
from tests.kit.raw import answer, etag, raw_server
from tests.kit.stub import S3Stub, fails, stalls
from tests.sidecar.test_checkpoints import uploading
from tests.sidecar.test_download import tree

URI = S3Uri("b", "run/")
FILES = {
    "checkpoint": b'model_checkpoint_path: "step-2/ckpt"',
    "empty": b"",
    "step-1/ckpt.index": b"i" * 300,
    "step-2/ckpt.data": bytes(range(256)) * 9000,
    "step-2/deep/ümläut\n": b"u" * 3001,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def store(stub: S3Stub, files: dict[str, bytes] = FILES, *, second: int = 0) -> None:
    """Put files below the prefix; each a second after the one before."""
    stub.objects["b/train/0000"] = b"data"
    for number, (name, data) in enumerate(files.items(), second):
        stub.objects[f"b/run/{name}"] = data
        stub.written[f"b/run/{name}"] = f"2026-01-01T00:{number // 60:02}:{number % 60:02}.000Z"
        crc = crc64nvme(data).to_bytes(8, "big")
        stub.checksums[f"b/run/{name}"] = {"x-amz-checksum-crc64nvme": base64.b64encode(crc).decode()}


def restored(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(root).items() if not name.startswith(".penstock")}


async def restore(stub: S3Stub, root: Path, *, hosts: int = 1, **penstock: Any) -> None:
    document = job(stub.url, root.parent, "b/train/", **penstock)
    document["CheckpointConfig"] = {"S3Uri": "s3://b/run"}
    state = JobState(Job.model_validate(document), Hosts(0, tuple(f"algo-{n + 1}" for n in range(hosts))))
    async with clients_of(stub) as clients:
        with Directory.at(str(root)) as directory:
            await restore_checkpoints(state, clients, URI, directory)
    assert state.downloading is None
    assert not (root / ".penstock.restoring").exists()


async def test_everything_is_restored_with_its_time_and_once(stub: S3Stub, root: Path) -> None:
    """What the first start has fetched, the second one does not fetch, nor does it upload it later."""
    store(stub)
    stub.objects["b/run-old/x"] = stub.objects["b/run/step-1/"] = b""
    stub.objects["b/run/.penstock/step-1/algo-1.json"] = stub.objects["b/run/.penstock.uploads"] = b"{}"
    await restore(stub, root)
    assert restored(root) == FILES
    assert stub.head_count <= 1  # of the object that may have several parts
    times = [(root / name).stat().st_mtime for name in FILES]
    assert [time - times[0] for time in times] == [0, 1, 2, 3, 4]
    with Directory.at(str(root)) as directory, closing(Journal(directory, journal_of(URI))) as journal:
        assert [journal.same(name, (root / name).stat()) for name in FILES] == [*map(etag, FILES.values())]
    stub.seen.clear()
    await restore(stub, root)
    assert not [seen for seen in stub.seen if not seen.key.startswith("run/.penstock/")]


async def test_a_local_file_that_differs_stays(
    stub: S3Stub, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Likewise one of the same size, a directory, a link, and a file in place of a directory."""
    store(stub)
    (root / "checkpoint").write_bytes(b"x" * len(FILES["checkpoint"]))
    (root / "empty").mkdir()
    (root / "empty/inside").write_bytes(b"inside")
    (root / "step-1").write_bytes(b"a file")
    (root / "step-2").mkdir()
    (root / "step-2/ckpt.data").symlink_to("/etc/passwd")
    before = restored(root)
    await restore(stub, root)
    name = "step-2/deep/ümläut\n"
    assert restored(root) == before | {name: FILES[name]}
    (event,) = (each for each in caplog.records if each.message == "local checkpoints are kept")
    assert event.__dict__["fields"]["files"] == [
        "checkpoint",
        "empty",
        "step-1/ckpt.index",
        "step-2/ckpt.data",
    ]


async def test_a_restored_file_that_nobody_has_changed_follows_s3(stub: S3Stub, root: Path) -> None:
    store(stub)
    await restore(stub, root)
    (root / "step-1/ckpt.index").write_bytes(b"changed here")
    store(stub, {"checkpoint": b"newer", "step-1/ckpt.index": b"changed there"})
    await restore(stub, root)
    changed = {"checkpoint": b"newer", "step-1/ckpt.index": b"changed here"}
    assert restored(root) == FILES | changed


async def test_a_listing_of_many_pages_ends_or_is_an_error(stub: S3Stub, root: Path) -> None:
    """Also if it goes round."""
    store(stub)
    stub.page = 2
    await restore(stub, root)
    assert restored(root) == FILES
    stub.tokens["run/step-2/ckpt.data"] = "run/empty"
    with pytest.raises(BadAnswer, match="does not advance"):
        await restore(stub, root)


@pytest.mark.parametrize("bucket", [True, False])
async def test_nothing_yet_is_no_error_and_an_absent_bucket_is(
    stub: S3Stub, root: Path, *, bucket: bool
) -> None:
    if bucket:
        stub.objects["b/train/0000"] = b"data"
        await restore(stub, root)
        assert restored(root) == {}
    else:
        with pytest.raises(Missing, match="bucket"):
            await restore(stub, root)


@pytest.mark.parametrize("name", ["a/../../x", "a//b", "./x", "/x", "x" * 256])
async def test_a_key_that_is_no_path_is_named(stub: S3Stub, root: Path, name: str) -> None:
    store(stub, {name: b"1"})
    with pytest.raises(ConfigError, match="cannot be a file of LocalPath; remove it"):
        await restore(stub, root)
    assert restored(root) == {}


async def test_a_directory_wins_over_a_file_of_its_name(stub: S3Stub, root: Path) -> None:
    """A trainer that has replaced the one by the other leaves both in S3."""
    store(stub, {"a": b"file", "a/b": b"inside"})
    await restore(stub, root)
    assert restored(root) == {"a/b": b"inside"}


@pytest.mark.parametrize("transport", ["auto", "splice", "buffered", "aiobotocore"])
async def test_wrong_bytes_never_have_a_name(stub: S3Stub, root: Path, transport: str) -> None:
    """Also of small objects, which one part has together."""
    store(stub)
    for name in ("step-2/ckpt.data", "step-1/ckpt.index"):
        stub.objects[f"b/run/{name}"] = b"\1" + FILES[name][1:]
        with pytest.raises(Mismatch, match="do not match its stored checksum") as error:
            await restore(stub, root, Transport=transport)
        assert error.value.context.key == f"run/{name}"
        assert restored(root) == {}


async def test_an_object_that_changes_meanwhile_is_listed_again(stub: S3Stub, root: Path) -> None:
    store(stub)
    changed = FILES | {"checkpoint": b"another one"}
    stub.script(
        fails(412, "PreconditionFailed"), fails(412, "PreconditionFailed"), key="b/run/step-1/ckpt.index"
    )
    await restore(stub, root)
    assert restored(root) == FILES
    store(stub, changed)
    await restore(stub, root)
    assert restored(root) == changed


async def test_batches(stub: S3Stub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill costs the last one alone."""
    monkeypatch.setattr(restore_module, "BATCH_FILES", 2)
    store(stub)
    stub.script(*[fails(403, "AccessDenied")] * 9, key="b/run/step-2/ckpt.data")
    with pytest.raises(Denied):
        await restore(stub, root)
    assert len(restored(root)) == 2
    stub.faults.clear()
    stub.seen.clear()
    await restore(stub, root)
    assert restored(root) == FILES
    assert len({seen.key for seen in stub.seen}) == 3


@pytest.mark.usefixtures("credentials")
async def test_a_listing_without_sizes_is_an_error() -> None:
    page = b"<ListBucketResult><Contents><Key>run/a</Key></Contents></ListBucketResult>"
    with raw_server(lambda _: answer(200, page)) as server:
        async with clients_of(server) as clients:
            with pytest.raises(BadAnswer, match="invalid object size"):
                await list_checkpoints(clients, URI, RetryPolicy(), lambda _: None)


async def test_a_name_that_cannot_be_written_is_named(stub: S3Stub, root: Path) -> None:
    store(stub)
    (root / ".penstock.restored").mkdir()
    with pytest.raises(SinkError, match=f"cannot write {re.escape(str(root))}/.penstock.restored: Is a dir"):
        await restore(stub, root)


async def test_too_little_space_is_named_before_a_byte(stub: S3Stub, root: Path) -> None:
    store(stub)
    stub.listed_sizes["b/run/step-2/ckpt.data"] = 1 << 59
    with pytest.raises(SinkError, match=r"checkpoints need 57.*TB, .* set Penstock.Checkpoints: {Restore"):
        await restore(stub, root)
    assert not stub.seen


# Steps


def file(path: str, second: int = 0) -> InS3:
    return InS3(path, ObjectRef("b", path, 1, f"etag-{path}"), float(second))


def marker(step: str, host: str, *hosts: str, modified: int = 0, **wrong: str) -> Marker:
    files = {f"{step}/{host}": (1, wrong.get("etag", f"etag-{step}/{host}"))}
    return Marker(step, host, hosts, modified, files)


def test_what_is_uploaded_is_restored() -> None:
    own = [".penstock/step-1/algo-1.json", ".penstock.uploads", ".penstock.restoring/1"]
    files = [".penstocks", ".penstock-1/weights", "a/.penstock", "a/.penstock.uploads"]
    assert [each.path for each in files_of([*map(file, own + files)])] == files


PLAIN = [file("checkpoint", 9), file("runs/events", 99), *(file(f"step-{n}/a", n) for n in (900, 1000, 80))]
TWO = [file(f"step-{step}/{host}") for step in (1, 2, 3) for host in "ab"]


@pytest.mark.parametrize(
    ("files", "markers", "newest", "left_out", "chosen"),
    [
        (PLAIN, [], False, set(), ["runs", "step-1000"]),
        (PLAIN, [], True, {"step-900", "step-80"}, ["runs", "step-1000"]),
        ([file("step-9/a"), file("step-10/a")], [], True, {"step-9"}, ["step-10"]),
        (
            TWO,
            [marker(f"step-{n}", host, "a", "b", modified=n) for n in (1, 2) for host in "ab"]
            + [marker("step-3", "a", "a", "b", modified=3)],
            False,
            {"step-3"},
            ["step-2"],
        ),
        (
            TWO,
            [marker(f"step-{n}", host, "a", "b", modified=n) for n in (1, 2) for host in "ab"],
            True,
            {"step-1", "step-3"},
            ["step-2"],
        ),
        (TWO, [marker("step-1", "a", "a", "b")], True, {"step-1", "step-2", "step-3"}, []),
        (
            TWO,
            [marker("step-1", "a", "a"), marker("step-2", "a", "a", modified=2, etag="of before")],
            True,
            {"step-2", "step-3"},
            ["step-1"],
        ),
    ],
)
def test_steps(
    files: list[InS3], markers: list[Marker], newest: bool, left_out: set[str], chosen: list[str]
) -> None:
    kept, found = whole_steps(files, markers, newest=newest)
    assert {each.step for each in files} - {each.step for each in kept} == left_out
    assert found == chosen


@pytest.mark.parametrize("hosts", [1, 2])
async def test_each_host_names_the_step_that_it_has_restored(stub: S3Stub, root: Path, hosts: int) -> None:
    store(stub)
    for step in ("step-1", "step-2"):
        names = {name: data for name, data in FILES.items() if name.startswith(step)}
        files = {name: (len(data), etag(data)) for name, data in names.items()}
        of = Marker(step, "algo-1", ("algo-1",), int(step[-1]), files)
        stub.objects[f"b/run/{of.name}"] = of.document()
    stub.objects["b/run/step-2/ckpt.data"] += b"of the next start, which was killed"
    await restore(stub, root, hosts=hosts, Checkpoints={"Restore": "newest"} if hosts == 1 else {})
    assert {*restored(root)} == {"checkpoint", "empty", "step-1/ckpt.index"}
    assert (root / ".penstock.restored").read_text() == "step-1\n"


# The job


def of_job(stub: S3Stub, tmp_path: Path, **keys: Any) -> str:
    document = (
        job(stub.url, tmp_path / "ml", "b/train/") | {"CheckpointConfig": {"S3Uri": "s3://b/run"}} | keys
    )
    return write_job(tmp_path / "job.yaml", document)


async def test_a_killed_start_goes_on_and_two_starts_exclude_each_other(stub: S3Stub, tmp_path: Path) -> None:
    """No FIFO is offered before; the probe says what the sidecar does."""
    store(stub)
    stub.script(*[stalls(stub)] * 9, key="b/run/step-2/ckpt.data")
    path, root = of_job(stub, tmp_path), tmp_path / "ml/checkpoints"
    with sidecar(path) as running:
        running.wait_for("downloading", channel="checkpoints")
        await eventually(lambda: "run/step-2/ckpt.data" in {seen.key for seen in stub.seen})
        assert "downloading checkpoints: " in running.get("/readyz")[1]
        assert "another sidecar serves" in penstock("run", "-c", path).stderr
        assert restored(root) == {}
        running.end(signal.SIGKILL)
    stub.faults.clear()
    stub.release()
    with sidecar(path) as running:
        event = running.wait_for("checkpoints restored")
        assert (event["objects"], event["fetched"], event["verified"]) == (5, 5, 4)
        running.wait_for("ready")
        assert restored(root) == FILES
        assert running.end() == 0


@pytest.mark.parametrize("penstock_keys", [{}, {"Checkpoints": "ignore"}])
def test_a_trainer_finds_its_checkpoints(stub: S3Stub, tmp_path: Path, penstock_keys: dict[str, Any]) -> None:
    """Under exec without a base directory too, in a temporary one."""
    store(stub)
    document = job(stub.url, None, "b/train/", **penstock_keys)
    document |= {"CheckpointConfig": {"S3Uri": "s3://b/run"}}
    script = 'cd "$SAGEMAKER_BASE_DIR/checkpoints" && find . -type f ! -name ".penstock*" -printf x'
    path = write_job(tmp_path / "job.yaml", document)
    done = penstock("exec", "-c", path, "sh", "-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "" if penstock_keys else "xxxxx"), done.stderr


READ_ONE = 'from streamer.readers import PipeReader\nprint(next(iter(PipeReader("train-0"))).decode())'
READ_SIX = """
import json
from streamer.readers import PipeReader
reader = PipeReader("train-0")
records = iter(reader)
for _ in range(6):
    next(records)
print(json.dumps(reader.state_dict()))
"""


@pytest.mark.parametrize("name", ["penstock-state.json", "step-2/penstock-state.json", "step-2/state.json"])
def test_the_state_of_resume_comes_with_the_checkpoint(stub: S3Stub, tmp_path: Path, name: str) -> None:
    """The path is that of the job file. Training and data go on at one step, at another number of ranks."""
    ranks: dict[str, Any] = {
        "Ranks": {"Count": 2, "GlobalBatch": 4, "Fetch": "separately"},
        "Records": {"Format": "fixed:8"},
    }
    document = job(stub.url, None, "b/train/") | {"CheckpointConfig": {"S3Uri": "s3://b/run"}}
    document["InputDataConfig"][0]["Penstock"] = ranks
    path = write_job(tmp_path / "job.yaml", document)
    stub.objects["b/train/0000"] = b"".join(b"%08d" % number for number in range(40))
    done = penstock("exec", "-c", path, sys.executable, "-c", READ_SIX)
    assert done.returncode == 0, done.stderr
    state = done.stdout.encode()
    assert json.loads(state)["step"] == 3
    store(stub, {"step-1/penstock-state.json": b"of an earlier step", name: state})
    stub.objects["b/train/0000"] = b"".join(b"%08d" % number for number in range(40))
    ranks["Ranks"]["Count"] = 4
    write_job(tmp_path / "job.yaml", document)
    resume = "/opt/ml/checkpoints/" + ("step-2/state.json" if name.endswith("/state.json") else "")
    done = penstock("exec", "-c", path, "--resume", resume, sys.executable, "-c", READ_ONE)
    assert (done.returncode, done.stdout) == (0, "00000012\n"), done.stderr


async def test_what_two_hosts_have_uploaded_comes_back_whole_on_each(stub: S3Stub, tmp_path: Path) -> None:
    """The step that one of them had not written is left out; nothing is uploaded again."""
    stub.objects["b/train/0000"] = b"data"
    hosts = ["algo-1", "algo-2"]
    for index, name in enumerate(hosts):
        root = tmp_path / name
        for step in ("step-9", "step-10", "step-11")[: 3 - index]:
            (root / step).mkdir(parents=True)
            (root / step / name).write_bytes(f"{step} of {name}".encode() * 99)
        async with uploading(stub, root, hosts=(index, hosts)) as checkpoints:
            assert await checkpoints.finish() == []
    assert "b/run/step-11/algo-1" in stub.objects
    due = {f"{step}/{name}" for step in ("step-9", "step-10") for name in hosts}
    puts = len(stub.puts.seen)
    for index, newest in enumerate((False, True)):
        root = tmp_path / f"later-{index}" / "checkpoints"
        root.mkdir(parents=True)
        restore_of = {"Checkpoints": {"Restore": "newest"}} if newest else {}
        await restore(stub, root, hosts=2, **restore_of)
        assert restored(root).keys() == {path for path in due if not newest or "step-10/" in path}
        assert (root / ".penstock.restored").read_text() == "step-10\n"
        async with uploading(stub, root, hosts=(index, hosts)) as checkpoints:
            assert await checkpoints.finish() == []
    assert len(stub.puts.seen) == puts
