"""Jobs with File channels, as processes: mixed jobs, and starts that continue a download."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from streamer.units import MIB
from tests.kit.harness import fill
from tests.kit.pipes import eventually, read_all
from tests.kit.processes import Sidecar, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, stalls
from tests.sidecar.test_download import tree


def mixed(stub: S3Stub, tmp_path: Path) -> str:
    document = job(stub.url, tmp_path / "ml", "b/train/", "b/files/")
    document["InputDataConfig"][1]["InputMode"] = "File"
    return write_job(tmp_path / "job.yaml", document)


def test_a_mixed_job(stub: S3Stub, tmp_path: Path) -> None:
    """A trainer finds the files at once and the stream as ever; a restart does not fetch again."""
    train, files = fill(stub, [70_000], prefix="b/train/"), fill(stub, [30_000], prefix="b/files/", seed=2)
    for word in ("downloaded", "downloaded before"):
        with sidecar(mixed(stub, tmp_path)) as running:
            assert running.wait_for("host")["of"] == 1
            running.wait_for(word, channel="files")
            running.wait_for("ready")
            data = tmp_path / "ml" / "input" / "data"
            assert tree(data / "files") == {"0000": files}
            assert not (data / "files_0").exists()
            assert read_all(data / "train_0") == train
            assert running.end() == 0


def metrics(running: Sidecar) -> dict[str, float]:
    """The metrics of the download, by name without `penstock_download_`; of requests, those that are ok."""
    prefix, found = "penstock_download_", {}
    for line in running.get("/metrics")[1].splitlines():
        name, _, value = line.partition(" ")
        if name.startswith(prefix) and ("outcome" not in name or '"ok"' in name):
            assert '{channel="files"' in name
            found[name.removeprefix(prefix).partition("{")[0]] = float(value)
    return found


async def test_metrics_of_a_download(stub: S3Stub, tmp_path: Path) -> None:
    """They are counted from the start; a file of an earlier start is progress, and no byte of this one."""
    fill(stub, [70_000], prefix="b/train/")
    fill(stub, [MIB, MIB], prefix="b/files/", seed=2)
    # Half of the second file, so that no end of the first one stays in a pipe that is not full. Hedges too.
    stub.script(*[stalls(stub, after=MIB // 2)] * 9, key="b/files/0001")
    path = mixed(stub, tmp_path)
    one = {"written_bytes_total": MIB, "files_total": 1, "progress_ratio": 1, "requests_total": 1}
    found: dict[str, float] = {}
    with sidecar(path) as running:
        running.wait_for("downloading")

        async def is_far() -> bool:
            found.update(await asyncio.to_thread(metrics, running))
            return found["files_total"] == 1

        await eventually(is_far)
        assert found.keys() == one.keys()
        assert MIB <= found["written_bytes_total"] < 2 * MIB
        assert 0.5 <= found["progress_ratio"] < 1
        assert found["requests_total"] == 1
        assert running.end() == 0
    stub.faults.clear()
    stub.release()
    with sidecar(path) as running:
        running.wait_for("ready")
        assert metrics(running) == one
        assert running.end() == 0
    with sidecar(path) as running:
        running.wait_for("downloaded before", channel="files")
        running.wait_for("ready")
        assert metrics(running) == dict.fromkeys(one, 0) | {"progress_ratio": 1}
        assert running.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_killed_sidecar_s_download_is_continued(
    stub: S3Stub, tmp_path: Path, number: signal.Signals
) -> None:
    """Whether it may end in order or not: what was fetched is not fetched again."""
    fill(stub, [5], prefix="b/train/")
    files = fill(stub, [6 * MIB] * 5, prefix="b/files/", seed=2)
    stub.script(stalls(stub), stalls(stub), key="b/files/0004")  # a hedge too
    path, data = mixed(stub, tmp_path), tmp_path / "ml" / "input" / "data"

    with sidecar(path) as running:
        running.wait_for("downloading", channel="files")
        await eventually(lambda: len(tree(data / ".files.penstock.new")) >= 3)
        assert "downloading files: " in running.get("/readyz")[1]
        running.end(number)
    assert not (data / "files").exists()
    stub.faults.clear()
    stub.release()
    stub.seen.clear()
    with sidecar(path) as running:
        event = running.wait_for("downloading", channel="files")
        assert event["objects_done"] >= 3
        running.wait_for("ready")
        assert b"".join(each for _, each in sorted(tree(data / "files").items())) == files
        assert len({seen.key for seen in stub.seen if "files" in seen.key}) <= 2
        assert read_all(data / "train_0") == stub.objects["b/train/0000"]
        assert running.end() == 0


async def test_a_file_that_may_not_be_so_large_ends_the_job(stub: S3Stub, tmp_path: Path) -> None:
    """A full disk does so; the next start, which may write it, continues."""
    fill(stub, [5], prefix="b/train/")
    files = fill(stub, [1 * MIB, 8 * MIB], prefix="b/files/", seed=2)
    path, data = mixed(stub, tmp_path), tmp_path / "ml" / "input" / "data"
    with sidecar(path, prefix=["sh", "-c", 'ulimit -f 4096 && exec "$0" "$@"']) as running:
        error = running.wait_for("ended")["error"]
        assert "File too large; raise the limit of file sizes (ulimit -f)" in error
        assert running.wait() == 7
    assert not (data / "files").exists()
    with sidecar(path) as running:
        running.wait_for("ready")
        assert b"".join(each for _, each in sorted(tree(data / "files").items())) == files
        assert running.end() == 0


@pytest.mark.parametrize("files", [90, 128, 256])
def test_few_open_files_suffice(stub: S3Stub, tmp_path: Path, files: int) -> None:
    """Connections leave the writers' files and pipes their descriptors."""
    fill(stub, [5], prefix="b/train/")
    due = fill(stub, [20_000] * 400, prefix="b/files/", seed=2)
    path, data = mixed(stub, tmp_path), tmp_path / "ml" / "input" / "data"
    with sidecar(path, prefix=["sh", "-c", f'ulimit -n {files} && exec "$0" "$@"']) as running:
        running.wait_for("ready")
        assert b"".join(each for _, each in sorted(tree(data / "files").items())) == due
        assert running.end() == 0


def test_exec_tells_the_trainer_where_the_files_are(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [5], prefix="b/train/")
    fill(stub, [30_000], prefix="b/files/", seed=2)
    script = 'test "$SM_CHANNELS" = \'["files","train"]\' && cat "$SM_CHANNEL_FILES/0000" | wc -c'
    done = penstock("exec", "-c", mixed(stub, tmp_path), "sh", "-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "30000"), done.stderr


def test_no_fifo_is_offered_if_the_files_do_not_come(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [5], prefix="b/train/")
    stub.objects["b/files/a"] = b"1"
    stub.objects["b/files/a/b"] = b"2"
    done = penstock("run", "-c", mixed(stub, tmp_path))
    assert done.returncode == 2
    assert "cannot both be files" in done.stderr
    assert not (tmp_path / "ml" / "input" / "data" / "train_0").exists()
