"""What a machine may lack for a while: space, open files, names, the endpoint itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.process import cpu_seconds
from sidecar.process.exits import Exit
from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.pipes import read_all
from tests.kit.processes import PENSTOCK, job, leftovers, penstock, sidecar, write_job
from tests.kit.proxy import TcpProxy
from tests.kit.stub import Answer, S3Stub
from tests.kit.trailers import published_trailer
from tests.sidecar.test_shared_streams import status_with

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 512 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def use_up(place: Path) -> Path:
    """Fill the file system, and return the file that does."""
    path = place / "filler"
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return path


@needs_root
def test_no_space_for_a_trailer_is_waited_for(stub: S3Stub, tmp_path: Path, small: Path) -> None:
    """The reader has every byte and waits for the end; there is none before it can be proven."""
    truth = fill(stub, [MORE_THAN_A_FIFO, 1], prefix="b/train/")
    with sidecar(write_job(tmp_path / "job.yaml", job(stub.url, small / "ml", "b/train/"))) as running:
        running.wait_for("ready")
        data = small / "ml" / "input" / "data"
        with open(data / "train_0", "rb", buffering=0) as reader:
            got = reader.read(1000)
            filler = use_up(small)
            while len(got) < len(truth):
                got += reader.read(1 << 20)
            stated = running.wait_for("waiting for this machine", channel="train")
            assert "No space left on device; free space" in stated["error"]
            refusal = f"waiting for this machine: {stated['error']}"
            assert running.get("/readyz") == (503, f"train: {refusal}\n")
            channels = status_with(running, "train", lambda each: each["bottleneck"]["kind"] == "machine")
            channel = channels["train"]
            assert channel["bottleneck"]["text"] == refusal
            assert channel["refused"] == stated["error"]
            metrics = running.get("/metrics")[1]
            (ready,) = re.findall(r"^penstock_ready (.*)$", metrics, re.MULTILINE)
            (spent,) = re.findall(
                r'^penstock_channel_seconds_total{channel="train",state="refused"} (.*)$',
                metrics,
                re.MULTILINE,
            )
            assert (float(ready), float(spent) > 0) == (0, True)
            os.set_blocking(reader.fileno(), False)
            assert reader.read(1) is None
            os.set_blocking(reader.fileno(), True)
            assert published_trailer(data, "train", 0).state == "open"
            filler.unlink()
            assert reader.read(1) == b""
        assert got == truth
        running.wait_for("epoch complete")
        assert running.get("/readyz") == (200, "ready\n")
        assert published_trailer(data, "train", 0).state == "complete"
        # And before the first byte: the next epoch's FIFO cannot be prepared.
        filler = use_up(small)
        found: list[bytes] = []
        reading = threading.Thread(target=lambda: found.append(read_all(data / "train_1")))
        reading.start()
        running.wait_for("waiting for this machine", times=2)
        filler.unlink()
        reading.join()
        assert found == [truth]
        assert running.end() == 0
    assert leftovers(small / "ml") == [".train_0.penstock.json", ".train_1.penstock.json"]


@needs_root
def test_no_space_for_a_keepers_socket_is_said(small: Path) -> None:
    """The only file that a keeper has."""
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", small], check=True)
    (small / "last").touch()
    done = penstock("keeper", str(small / "keeper"))
    assert (done.returncode, done.stdout) == (7, f"{small}/keeper: No space left on device\n")
    (small / "last").unlink()
    with subprocess.Popen(
        [*PENSTOCK, "keeper", small / "keeper"], stdout=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ready\n"
        keeper.terminate()
    assert keeper.returncode == 0


@needs_root
def test_no_space_for_a_download_is_no_channel_and_the_next_start_continues(
    stub: S3Stub, tmp_path: Path, small: Path
) -> None:
    """The disk has room when the channel is listed; another program fills it during the download."""
    files = fill(stub, [100_000] * 4, prefix="b/files/")
    document = job(stub.url, small / "ml", "b/files/")
    document["InputDataConfig"][0]["InputMode"] = "File"
    path, data = write_job(tmp_path / "job.yaml", document), small / "ml" / "input" / "data"

    async def taken(answer: Answer) -> web.Response:
        (small / "other").write_bytes(bytes(200_000))
        return web.Response(status=206, body=answer.body, headers=answer.headers)

    stub.script(taken)
    done = penstock("run", "-c", path)
    assert done.returncode == 7
    assert "No space left on device; see to the disk" in done.stderr
    assert not (data / "files").exists()
    (small / "other").unlink()
    with sidecar(path) as running:
        running.wait_for("ready")
        assert b"".join(each.read_bytes() for each in sorted((data / "files").iterdir())) == files
        assert running.end() == 0


def limited(files: int) -> list[str]:
    """A prefix for a command that may have `files` open files."""
    return ["sh", "-c", f'ulimit -n {files} && exec "$0" "$@"']


def test_no_open_files_are_waited_for_without_spinning(stub: S3Stub, tmp_path: Path) -> None:
    """Somebody else's connections take all there are; then they close."""
    truth = fill(stub, [MORE_THAN_A_FIFO // 4] * 2, prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path, prefix=limited(80)) as running, contextlib.ExitStack() as taken:
        running.wait_for("ready")
        assert "connections fit into the limit" in running.wait_for("few open files")["limits"]
        address = running.url.removeprefix("http://").split(":")
        for _ in range(100):
            last = taken.enter_context(socket.create_connection((address[0], int(address[1])), 10))
        assert last.recv(1) == b"", "accepted, and closed for want of a descriptor"
        found: list[bytes] = []
        fifo = tmp_path / "ml" / "input" / "data" / "train_0"
        reading = threading.Thread(target=lambda: found.append(read_all(fifo)))
        reading.start()
        stated = running.wait_for("waiting for this machine", channel="train")
        assert "Too many open files" in stated["error"]
        spent = cpu_seconds(running.process.pid)
        reading.join(1)
        assert cpu_seconds(running.process.pid) - spent < 0.5, "it spins"
        taken.close()
        reading.join()
        assert found == [truth]
        assert running.end() == 0


@pytest.mark.parametrize("transport", ["buffered", "splice"])
def test_few_open_files_are_fewer_requests(stub: S3Stub, tmp_path: Path, transport: str) -> None:
    truth = fill(stub, [300_000] * 60, prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/", Transport=transport, RequestsInFlight=200)
    with sidecar(write_job(tmp_path / "job.yaml", document), prefix=limited(128)) as running:
        running.wait_for("ready")
        assert read_all(tmp_path / "ml" / "input" / "data" / "train_0") == truth
        assert "error" not in {event.get("level") for event in running.events}
        assert running.status()["channels"]["train"]["retries"] == {}
        assert running.end() == 0


@pytest.mark.parametrize(
    ("files", "stated"),
    [
        (128, "open files at most 36 connections fit into the limit of open files; raise `ulimit -n`"),
        (4096, None),
    ],
)
def test_a_plan_says_how_many_connections_open_files_allow(
    stub: S3Stub, tmp_path: Path, files: int, stated: str | None
) -> None:
    fill(stub, [10], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    command = [*limited(files), *PENSTOCK, "plan", "-c", path]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line for line in shown.splitlines() if line.startswith("open files")] == (
        [stated] if stated else []
    )


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("exec", "-c", "JOB", "true"), "cannot make a temporary directory: No usable temporary directory"),
        (
            ("index", "build", "--to", "DIR/index", "--format", "lines", "-c", "JOB"),
            "cannot write the record index",
        ),
        (
            ("index", "build", "--to", "s3://b/x/", "--format", "lines", "-c", "JOB"),
            "cannot make a temporary directory",
        ),
        (("index", "verify", "--from", "s3://b/x/", "-c", "JOB"), "cannot copy the record index"),
    ],
)
def test_a_machine_without_a_place_for_temporary_files(
    stub: S3Stub, tmp_path: Path, command: tuple[str, ...], text: str
) -> None:
    """A container with a read-only root file system: here no file can have a byte."""
    fill(stub, [10], prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/")
    del document["Penstock"]["BaseDirectory"]
    path = write_job(tmp_path / "job.yaml", document)
    words = [word.replace("JOB", path).replace("DIR", str(tmp_path)) for word in command]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0 && exec "$0" "$@"', *PENSTOCK, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 7, done.stderr
    assert text in done.stderr


def private_names(place: Path) -> list[str]:
    """A prefix for a command that knows no names but those in the file `hosts` of `place`."""
    (place / "hosts").touch()
    (place / "nsswitch").write_text("hosts: files\n")
    mounts = " && ".join(
        f"mount --bind {place}/{ours} /etc/{theirs}"
        for ours, theirs in (("hosts", "hosts"), ("nsswitch", "nsswitch.conf"))
    )
    prefix = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$0" "$@"']
    done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no private /etc/hosts can be had here: {done.stderr.decode().strip()}")
    return prefix


@pytest.mark.parametrize("transport", ["buffered", "aiobotocore"])
def test_names_that_do_not_resolve_for_a_while(
    stub: S3Stub, proxy: TcpProxy, tmp_path: Path, transport: str
) -> None:
    """At the start they are waited for, not ready and saying why; in mid-stream old addresses serve."""
    truth = fill(stub, [MORE_THAN_A_FIFO // 8] * 8, prefix="b/train/")
    prefix, hosts = private_names(tmp_path), tmp_path / "hosts"
    url = f"http://storage.test:{proxy.port}"
    document = job(url, tmp_path / "ml", "b/train/", Transport=transport, MemoryBudget="8MiB")
    with sidecar(write_job(tmp_path / "job.yaml", document), prefix=prefix) as running:
        stated = running.wait_for("waiting for storage", channel="train")
        assert "storage.test" in stated["error"]
        code, why = running.get("/readyz")
        assert (code, "waiting for storage" in why) == (503, True)
        assert running.get("/livez")[0] == 200
        assert not (tmp_path / "ml").exists()
        hosts.write_text("127.0.0.1 storage.test\n")
        running.wait_for("ready")
        assert running.get("/readyz") == (200, "ready\n")
        with open(tmp_path / "ml" / "input" / "data" / "train_0", "rb", buffering=0) as reader:
            got = bytearray(reader.read(1000))
            hosts.write_text("")
            proxy.refuse()
            proxy.cut_all()
            os.set_blocking(reader.fileno(), False)  # to look up the name may take longer than what is staged
            while (failed := running.status()["channels"]["train"]["requests"].get("transient", 0)) < 3:
                if not failed:
                    got += reader.read(1 << 16) or b""  # so that something is asked for
            os.set_blocking(reader.fileno(), True)
            proxy.accept()
            if transport == "aiobotocore":  # its client looks names up by itself
                hosts.write_text("127.0.0.1 storage.test\n")
            while data := reader.read(1 << 20):
                got += data
        assert got == truth
        assert running.end() == 0


def test_the_first_failure_is_logged(stub: S3Stub, proxy: TcpProxy, tmp_path: Path) -> None:
    """Not when the listing's own retries end, nor when the part is given up."""
    truth = fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    url, base = f"http://127.0.0.1:{proxy.port}", tmp_path / "ml"
    path = write_job(tmp_path / "job.yaml", job(url, base, "b/train/", GiveUpAfter=1))
    proxy.refuse()
    with sidecar(path) as down:
        stated = down.wait_for("waiting for storage", channel="train")
        assert "(Connection refused)" in stated["error"]
        assert stated["give_up_after"] == 1
        assert down.process.wait() == Exit.UNREACHABLE
        ended = down.wait_for("ended")["error"]
        assert all(words in ended for words in ("gave up after", url.removeprefix("http://"))), ended
    waits = [each for each in down.events if each["event"] == "waiting for storage"]
    assert len(waits) == 1
    proxy.accept()
    path = write_job(tmp_path / "job.yaml", job(url, base, "b/train/", PartSize="1MiB", RequestsInFlight=1))
    with sidecar(path) as running:
        running.wait_for("ready")
        with open(base / "input" / "data" / "train_0", "rb", buffering=0) as reader:
            got = bytearray(reader.read(1000))
            proxy.refuse()
            proxy.cut_all()
            rest: list[bytes] = []
            late = threading.Thread(target=lambda: rest.append(reader.read()))
            late.start()
            running.wait_for("waiting for storage", channel="train")
            proxy.accept()
            running.wait_for("storage responds again", channel="train")
            late.join()
        assert got + rest[0] == truth
        assert running.end() == 0


def test_cat_says_that_it_waits_for_storage(stub: S3Stub, proxy: TcpProxy) -> None:
    truth = fill(stub, [1000], prefix="b/train/")
    proxy.refuse()
    url = f"http://127.0.0.1:{proxy.port}"
    command = [*PENSTOCK, "cat", "s3://b/train/", "--endpoint-url", url, "--path-style"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cat:
        assert cat.stdout
        assert cat.stderr
        event = json.loads(cat.stderr.readline())
        proxy.accept()
        assert cat.stdout.read() == truth
    assert event["event"] == "waiting for storage"
    assert url.removeprefix("http://") in event["error"]
    assert cat.returncode == 0


def test_an_endpoint_that_is_down_at_the_start_is_waited_for(
    stub: S3Stub, proxy: TcpProxy, tmp_path: Path
) -> None:
    """Nothing is offered meanwhile, every page of the admin port answers, and a signal ends the wait."""
    truth = fill(stub, [1000], prefix="b/train/")
    proxy.refuse()
    path = write_job(
        tmp_path / "job.yaml", job(f"http://127.0.0.1:{proxy.port}", tmp_path / "ml", "b/train/")
    )
    with sidecar(path) as first:
        first.wait_for("waiting for storage", channel="train")
        assert {first.get(page)[0] for page in ("/", "/status", "/metrics", "/limits", "/livez")} == {200}
        assert first.end() == 0
    with sidecar(path) as second:
        second.wait_for("waiting for storage", channel="train")
        proxy.accept()
        second.wait_for("ready")
        assert read_all(tmp_path / "ml" / "input" / "data" / "train_0") == truth
        assert second.end() == 0
