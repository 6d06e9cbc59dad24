"""`penstock doctor` on a good set-up and on broken ones: what it says, what to do, how it exits."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.kit.harness import fill
from tests.kit.processes import PENSTOCK, findings, job, penstock, penstock_with, write_job
from tests.kit.raw import RawServer, Request, answer, listing, raw_server
from tests.kit.stub import S3Stub, fails, whole, with_headers
from tests.kit.terminal import terminal


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def examined(
    stub: S3Stub | RawServer,
    tmp_path: Path,
    *,
    fails_: Sequence[str] = (),
    base: str = "ml",
    **section: Any,
) -> Any:
    """Run it; the findings by name. Those of `fails_` are the failures, and they say what to do."""
    section = {"MemoryBudget": "64MiB"} | section
    document = job(stub.url, tmp_path / base, "b/train/", **section)
    done = penstock("doctor", "--json", "-c", write_job(tmp_path / "job.yaml", document))
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert report["code"] == done.returncode
    found = {each["check"]: each for each in report["findings"]}
    assert {name for name, each in found.items() if each["state"] == "failure"} == set(fails_)
    assert all(each["fix"] for each in found.values() if each["state"] != "ok")
    assert (done.returncode != 0) == bool(fails_)
    assert not (tmp_path / "ml").exists(), "something was left behind"
    return found, done.returncode


def test_objects_of_a_manifest_are_looked_at(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [100])
    document = job(stub.url, tmp_path / "ml", "b/train/")
    source = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
    source |= {"S3DataType": "ManifestFile", "S3Uri": "s3://b/manifest"}
    path = write_job(tmp_path / "job.yaml", document)
    key = next(iter(stub.objects)).removeprefix("b/")

    def found(*keys: str) -> dict[str, Any]:
        stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/"}, *keys]).encode()
        return findings(path)

    stub.if_match_refused = (501, "NotImplemented")
    assert found(*[key] * 100)["list train"]["text"] == "ManifestFile; objects of its first rows: 8"
    assert "IfMatch: omit" in found(key)["If-Match train"]["fix"]
    absent = found(key, "absent")["list train"]
    assert absent["state"] == "failure"
    assert "s3://b/manifest: entry 3: no such object" in absent["text"]


def test_a_good_set_up(stub: S3Stub, tmp_path: Path) -> None:
    """In words too, one line each; nothing is read but a byte and the probe."""
    fill(stub, [3_000_000, 0], prefix="b/train/")
    found, _ = examined(stub, tmp_path)
    assert list(found) == [
        "memory", "pipes", "open files", "FIFO directory", "admin port", "DNS", "credentials", "list train",
        "get train",
        "Range train", "clock", "If-Match train", "checksums train", "speed",
    ]  # fmt: skip
    assert found["list train"]["text"] == "objects: 2"
    assert "3.0 MB in" in found["speed"]["text"]
    assert found["Range train"]["text"] == "bytes 1-1/3000000"
    reported = penstock("doctor", "-c", str(tmp_path / "job.yaml"))
    assert reported.returncode == 0
    for name in found:
        assert f"\n{name:<18} ok " in "\n" + reported.stdout


def test_no_credentials(stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    fill(stub, [10], prefix="b/train/")
    found, code = examined(stub, tmp_path, fails_=["credentials"])
    assert code == 3
    assert "AWS_ACCESS_KEY_ID" in found["credentials"]["fix"]
    assert "list train" not in found


@pytest.mark.parametrize("reported", ["", '"another"'])
def test_an_endpoint_whose_etags_prove_nothing(stub: S3Stub, tmp_path: Path, reported: str) -> None:
    """What the run would refuse, doctor refuses."""
    fill(stub, [10], prefix="b/train/")
    stub.script(*[with_headers(ETag=reported)] * 100)
    found, code = examined(stub, tmp_path, fails_=["ETag train"])
    assert code == 5
    assert "listed as" in found["ETag train"]["text"]


@pytest.mark.parametrize(
    "refusal", [(501, "NotImplemented"), (400, "InvalidArgument"), (412, "PreconditionFailed")]
)
def test_an_endpoint_that_refuses_if_match(stub: S3Stub, tmp_path: Path, refusal: tuple[int, str]) -> None:
    """Doctor names the setting, and is content with it."""
    stub.if_match_refused = refusal
    fill(stub, [10], prefix="b/train/")
    found, _ = examined(stub, tmp_path, fails_=["If-Match train"])
    assert "although the ETag is right" in found["If-Match train"]["text"]
    assert "set Penstock.Endpoint.IfMatch: omit" in found["If-Match train"]["fix"].replace("Set", "set")
    endpoint = {"Url": stub.url, "PathStyle": True, "IfMatch": "omit"}
    found, _ = examined(stub, tmp_path, Endpoint=endpoint)
    assert found["If-Match train"]["state"] == "ok"
    assert "speed" in found
    done = penstock(
        "cat", "s3://b/train/", "--endpoint-url", stub.url, "--path-style", "--if-match", "omit", text=False
    )
    assert (done.returncode, done.stdout) == (0, stub.objects["b/train/0000"])


@pytest.mark.parametrize(("etags", "warned"), [("aa", True), ("ab", False)])
def test_one_etag_for_objects_of_different_sizes(
    credentials: None, tmp_path: Path, etags: str, *, warned: bool
) -> None:
    """Some servers have no ETag of their own for files that were not written by S3."""
    objects = [(f"train/{size}", size, etag) for size, etag in enumerate(etags, 1)]
    with raw_server(lambda asked: answer(404) if asked.key else listing(*objects)) as server:
        found, _ = examined(server, tmp_path, fails_=["get train"])
    assert ("ETag train" in found) == warned
    if warned:
        assert found["ETag train"]["state"] == "warning"
        assert found["ETag train"]["text"] == "a for objects of different sizes: train/1, train/2"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (listing(("train/a", 1, "e")).replace(b"ETag", b"eTag"), "an entry without ETag"),
        (listing(("other/a", 1, "e")), "does not begin with the prefix"),
        (answer(200, b"<html></html>"), "the answer is not S3's: 200 ok"),
    ],
    ids=["no ETag", "foreign", "HTML"],
)
def test_a_listing_that_the_run_refuses(credentials: None, tmp_path: Path, page: bytes, words: str) -> None:
    """Doctor reads it as the run does."""
    with raw_server(lambda _: page) as server:
        found, code = examined(server, tmp_path, fails_=["list train"])
    assert code == 5
    assert words in found["list train"]["text"]


def test_the_endpoint_is_down(stub: S3Stub, tmp_path: Path) -> None:
    url, stub.url = stub.url, "http://127.0.0.1:1"
    found, code = examined(stub, tmp_path, fails_=["list train"], GiveUpAfter=1)
    stub.url = url
    assert code == 5
    assert "check that the endpoint is up" in found["list train"]["text"]


def test_a_prefix_without_objects(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/other/")
    found, code = examined(stub, tmp_path, fails_=["list train"])
    assert code == 4
    assert "no object matches this prefix" in found["list train"]["text"]


def test_list_is_allowed_and_get_is_not(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    stub.script(fails(403, "AccessDenied"), fails(403, "AccessDenied"))
    found, code = examined(stub, tmp_path, fails_=["get train"])
    assert "speed" not in found
    assert code == 3
    assert found["list train"]["state"] == "ok"
    assert "access denied" in found["get train"]["text"]


def test_a_key_that_the_listing_encodes_wrongly(credentials: None, tmp_path: Path) -> None:
    """The remedy for a missing object, to correct S3Uri, would mislead."""
    page = listing(("train/a b", 100, "e"))
    missing = answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
    with raw_server(lambda request: page if "list-type" in request.query else missing) as server:
        found, code = examined(server, tmp_path, fails_=["get train"])
    assert "the server may encode the keys of its listings" in found["get train"]["fix"]
    assert code == 4


def test_a_proxy_that_compresses_is_named(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [1000], prefix="b/train/")
    stub.script(*[with_headers(200, Content_Encoding="gzip", Content_Range="")] * 9)
    found, _ = examined(stub, tmp_path, fails_=["Range train"])
    assert "may have been compressed or inflated on its way" in found["Range train"]["text"]


def test_a_proxy_that_ignores_ranges(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [3000], prefix="b/train/")
    stub.script(whole(stub))
    found, code = examined(stub, tmp_path, fails_=["Range train"])
    assert code == 5
    assert "answered 200 with 3000 bytes for one" in found["Range train"]["text"]


@pytest.mark.parametrize(("seconds", "state"), [(300, "warning"), (-7200, "failure")])
def test_the_clock_is_wrong(stub: S3Stub, tmp_path: Path, seconds: int, state: str) -> None:
    fill(stub, [10], prefix="b/train/")
    stub.script(with_headers(Date=formatdate(time.time() + seconds, usegmt=True)))
    found, code = examined(stub, tmp_path, fails_=["clock"] if state == "failure" else [])
    assert code == (3 if state == "failure" else 0)
    assert found["clock"]["state"] == state
    assert ("behind" if seconds > 0 else "ahead of") in found["clock"]["text"]


def test_no_fifo_can_be_made_and_memory_is_short(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    limits = ["FIFO directory", "memory"]
    (tmp_path / "file").touch()
    found, code = examined(stub, tmp_path, fails_=limits, base="file/ml", MemoryBudget="100TiB")
    assert code == 7
    assert "Penstock.BaseDirectory" in found["FIFO directory"]["fix"]
    assert "lower MemoryBudget" in found["memory"]["fix"]


def test_few_open_files(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))  # noqa: E731
    found = findings(path, code=0, preexec_fn=limit, env=dict(os.environ))
    assert (found["open files"]["state"], found["open files"]["text"]) == ("warning", "at most 512")


def answers(status: int, **headers: Any) -> Callable[[Any], Coroutine[Any, Any, web.Response]]:
    """The right byte, under another status or with other headers."""

    async def answer(right: Any) -> web.Response:
        return web.Response(status=status, body=right.body, headers=right.headers | headers)

    return answer


def test_a_server_that_says_200_with_the_right_range_streams(stub: S3Stub, tmp_path: Path) -> None:
    """`rclone serve s3` and s3rver answer so."""
    fill(stub, [3000], prefix="b/train/")
    stub.weather = lambda *_: answers(200)
    found, _ = examined(stub, tmp_path)
    assert found["Range train"]["text"] == "bytes 1-1/3000"
    assert "0.0 MB in" in found["speed"]["text"]


def test_a_wrong_range_is_refused_as_a_run_would(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [3000], prefix="b/train/")
    stub.script(answers(206, **{"Content-Range": "bytes 2-2/3000"}))
    found, _ = examined(stub, tmp_path, fails_=["Range train"])
    assert "Content-Range bytes 2-2/3000" in found["Range train"]["text"]


def test_a_server_that_takes_the_range_0_0_for_the_whole_object_streams(stub: S3Stub, tmp_path: Path) -> None:
    """s3rver does so; no run asks for that range of an object of more than a byte."""
    fill(stub, [3000], prefix="b/train/")
    right = whole(stub)
    stub.weather = lambda _, first, wanted: right if (first, wanted) == (0, 1) else None
    found, _ = examined(stub, tmp_path)
    assert found["Range train"]["text"] == "bytes 1-1/3000"


def test_an_object_of_one_byte(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [1], prefix="b/train/")
    found, _ = examined(stub, tmp_path)
    assert found["Range train"]["text"] == "bytes 0-0/1"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ExpiredToken", "Renew the credentials"),
        ("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        ("InvalidAccessKeyId", "AWS_SESSION_TOKEN"),
        ("AccessDenied", "Allow s3:ListBucket on the bucket in"),
    ],
)
def test_advice_is_by_the_cause(stub: S3Stub, tmp_path: Path, code: str, words: str) -> None:
    fill(stub, [10], prefix="b/train/")
    stub.refused_keys["AKIDTEST"] = code
    found, exits = examined(stub, tmp_path, fails_=["list train"])
    assert exits == 3
    assert words in found["list train"]["fix"]
    assert code == "AccessDenied" or "s3:ListBucket" not in found["list train"]["fix"]


def test_what_would_end_a_run_with_7_is_a_failure(stub: S3Stub, tmp_path: Path) -> None:
    """Each is made by the same function as in `run`, which fails before it asks storage for anything."""
    fill(stub, [3000], prefix="b/train/")
    fill(stub, [10**7], prefix="b/files/")
    data = tmp_path / "ml/input/data"
    data.mkdir(parents=True)
    (data / "train_0").touch()
    (data / "files").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        document = job(
            stub.url, tmp_path / "ml", "b/train/", "b/files/", Admin={"Port": taken.getsockname()[1]}
        )
        document["InputDataConfig"][1]["InputMode"] = "File"
        path = write_job(tmp_path / "job.yaml", document)

        def both() -> list[Any]:
            stub.listings.clear()
            run = penstock("run", "-c", path)
            assert run.returncode == 7, run.stderr
            assert not stub.listings
            failed = [each for each in findings(path, code=7).values() if each["state"] == "failure"]
            assert failed[0]["text"] in run.stderr
            return [each["check"] for each in failed]

        assert both() == ["FIFO directory", "admin port"]
        (data / "train_0").unlink()
        assert both() == ["FIFO directory", "admin port"]
        (data / "files").rmdir()
        assert both() == ["admin port"]
        assert "Penstock.Admin.Port" in penstock("run", "-c", path).stderr


def test_too_few_open_files_for_the_job_are_a_failure(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))}
    run = penstock("run", "-c", path, **limited)
    assert (run.returncode, stub.listings) == (7, [])
    found = findings(path, code=7, **limited)
    assert found["open files"]["state"] == "failure"
    assert "40 open files are too few for 1 FIFO; raise `ulimit -n` to 58" in run.stderr
    assert found["open files"]["text"] in run.stderr


@pytest.mark.parametrize("transport", ["aiobotocore", "buffered"])
def test_it_lists_by_the_client_of_the_job(credentials: None, tmp_path: Path, transport: str) -> None:
    with raw_server(lambda _: listing()) as server:
        examined(server, tmp_path, fails_=["list train"], Transport=transport)
        lists = [request for request in server.seen if "list-type" in request.query]
    assert lists
    assert {"botocore" in each.headers["user-agent"].lower() for each in lists} == {
        transport == "aiobotocore"
    }


def test_a_disk_that_is_too_small_is_found_before_it_is_filled(
    stub: S3Stub, tmp_path: Path, small_disk: Path
) -> None:
    """By the sum of all File channels, once they are listed and before the first byte is asked for."""
    fill(stub, [3_000_000], prefix="b/one/")
    fill(stub, [3_000_000], prefix="b/two/")
    document = job(stub.url, small_disk, "b/one/", "b/two/")
    for channel in document["InputDataConfig"]:
        channel["InputMode"] = "File"
    path = write_job(tmp_path / "job.yaml", document)
    run = penstock("run", "-c", path)
    assert run.returncode == 7
    assert "File channels need 6 MB and 2 files" in run.stderr
    assert not stub.seen
    assert findings(path, code=7)["disk"]["text"] in run.stderr
    document["InputDataConfig"].pop()
    found = findings(write_job(tmp_path / "job.yaml", document), code=0)
    assert found["disk"]["text"].startswith("File channels need 3 MB and 1 file of 4.19 MB in ")


def test_a_job_of_files_has_no_fifos(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0]["InputMode"] = "File"
    found = findings(write_job(tmp_path / "job.yaml", document))
    assert found["pipes"]["text"] == "the job has no FIFOs: every channel is in File mode"


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:1", "Start the endpoint, or correct the port"),
        ("https://127.0.0.1:@PORT@", "If the server has no TLS at this port, write http://"),
        ("http://no-such-host.invalid", "Correct the host in Endpoint.Url"),
        ("TLS", "Penstock.Endpoint.CaBundle must have"),
    ],
)
def test_advice_about_the_network_is_by_the_cause(
    stub: S3Stub, tls_stub: S3Stub, tmp_path: Path, endpoint: str, words: str
) -> None:
    url = tls_stub.url if endpoint == "TLS" else endpoint.replace("@PORT@", stub.url.rsplit(":", 1)[1])
    document = job(url, tmp_path / "ml", "b/train/", GiveUpAfter=1)
    found = findings(write_job(tmp_path / "job.yaml", document), code=5)
    failures = [each for each in found.values() if each["state"] == "failure"]
    assert any(words in each["fix"] for each in failures), failures


@pytest.mark.parametrize("token", [None, "short"])
def test_a_token_file_that_is_missing_or_wrong(stub: S3Stub, tmp_path: Path, token: str | None) -> None:
    fill(stub, [10], prefix="b/train/")
    if token is not None:
        (tmp_path / "token").write_text(token)
    found, code = examined(
        stub, tmp_path, fails_=["admin port"], Admin={"Port": 0, "TokenFile": str(tmp_path / "token")}
    )
    assert code == 2
    assert "openssl rand -hex 16" in found["admin port"]["fix"]


def test_colours_are_for_terminals_and_not_for_everybody(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    command = [
        *PENSTOCK,
        "doctor",
        "-c",
        write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/")),
    ]
    for variables, colours in (({}, True), ({"NO_COLOR": "1"}, False)):
        with terminal(command, columns=200, rows=40, **variables) as window:
            assert window.end() == 0
            assert "credentials        ok" in window.screen.text
            assert " checks: 0 failed, " in window.screen.text
            assert ("\x1b[32m" in window.screen.written) == colours
    assert "\x1b" not in penstock("doctor", "-c", str(tmp_path / "j.yaml")).stdout


def test_a_server_without_etags_is_a_warning(credentials: None, stub: S3Stub, tmp_path: Path) -> None:
    """An ETag is left out of listing and response; Last-Modified is compared."""
    stub.objects["b/train/0000"] = b"x" * 5000
    stub.times["b/train/0000"] = "2026-11-03T21:56:26.789Z"
    found, _ = examined(stub, tmp_path)
    assert found["ETag train"]["state"] == "warning"
    assert "Last-Modified" in found["ETag train"]["text"]
    assert found["Range train"]["state"] == "ok"
    assert found["If-Match train"]["state"] == "ok"


@pytest.mark.parametrize(
    ("options", "state", "code"),
    [((), "warning", 0), (("--for", "run"), "failure", 7), (("--for", "exec"), "ok", 0)],
)
def test_a_job_without_a_directory_is_one_for_exec(
    stub: S3Stub, tmp_path: Path, options: tuple[str, ...], state: str, code: int
) -> None:
    """An ordinary user may not write /opt/ml, and the port may be another's: `run` alone needs them."""
    fill(stub, [10], prefix="b/train/")
    document = job(stub.url, None, "b/train/")
    del document["Penstock"]["Admin"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        elsewhere = penstock_with(
            "sidecar.doctor.examination.DEFAULT_BASE = '/proc/none'",
            f"sidecar.job.rehearsal.ADMIN_PORT = {taken.getsockname()[1]}",
        )
        command = [*elsewhere, "doctor", "--json", "-c", write_job(tmp_path / "job.yaml", document), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    for check in ("FIFO directory", "admin port"):
        assert found[check]["state"] == state
        assert ("penstock exec takes a temporary directory" in found[check]["fix"]) == (state == "warning")


def test_a_check_that_hangs_is_named(credentials: None, tmp_path: Path) -> None:
    asked, over = threading.Event(), threading.Event()

    def silent(_: Request) -> bytes:
        asked.set()
        over.wait()
        return answer(503)

    with raw_server(silent) as server:
        path = write_job(tmp_path / "job.yaml", job(server.url, tmp_path / "ml", "b/train/"))
        command = [*PENSTOCK, "doctor", "-c", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            asked.wait()
            process.kill()
            lines = process.stdout.read().decode().split("\n")
            over.set()
    assert lines[-1] == f"{'list train':<18} "
