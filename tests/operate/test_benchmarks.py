"""The benchmarks as a program: statistics, listings, the origin's answers, and one tiny run end to end.

No figure is judged here; that the figures are of the right thing is.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks import __main__ as program
from benchmarks import (
    clients,
    large_index,
    lineup,
    measure,
    origin,
    readers,
    report,
    scenarios,
    stats,
)
from benchmarks import listing as lists
from benchmarks.dataset import MIB, DataSet, Shape, directory_in_memory, listing, nginx_etag
from benchmarks.index_server import Periodic
from benchmarks.peers.agent import in_order
from benchmarks.process import Child, ProcessFailed, cpu_seconds, peak_memory
from benchmarks.task import Stream, Task
from streamer.errors import ErrorContext
from streamer.s3.pages.page_parser import parse_page
from tests.kit.warm_python import warm_python
from tests.operate.promql import ROOT

ENVIRONMENT = {"PATH": os.defpath}
FAR = time.monotonic() + 1e6
"""A deadline after the end of any test."""
READER = [sys.executable, "-I", "-S", measure.READER]


@pytest.fixture(autouse=True)
def no_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the deadline of the test ends a wait for a program that a benchmark has started."""
    for name in ("clients.START_SECONDS", "readers._PATIENCE"):
        monkeypatch.setattr(f"benchmarks.{name}", 1e6)


TINY = Shape("tiny", 2, 3, 2 * MIB + 12345)


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    made = DataSet(TINY, str(tmp_path / "data"))
    made.create()
    return made


# --- Statistics and reports --------------------------------------------------------------------------


def run(
    seconds: float = 1.0,
    length: int = 2_000_000_000,
    cpu: float = 0.5,
    *,
    cut: bool = False,
    received: int | None = None,
) -> dict[Any, Any]:
    return {
        "seconds": seconds,
        "bytes": length,
        "cpu_seconds": cpu,
        "peak_rss": 90_000_000,
        "cut": cut,
        "verified": False,
        "received_bytes": received,
        "transport": None,
    }


def entry(*runs: Any, **fields: str | bool) -> dict[Any, object]:
    return {"setting": "default", "runs": list(runs), "verified": True, "problem": None} | fields


def scenario(**entries: Any) -> dict[Any, Any]:
    return {"text": "a text", "objects": "8 objects", "bytes": 8 * MIB, "clients": entries}


def test_spread_is_median_and_range() -> None:
    assert stats.spread([3.0, 1.0, 2.0]) == stats.Spread(2.0, 1.0, 3.0)
    assert stats.spread([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="no values"):
        stats.spread([])


@pytest.mark.parametrize(
    ("values", "text"),
    [([2.0], "2.00"), ([1.0, 2.0, 4.0], "2.00 (1.00\u20134.00)"), ([0.004, 0.004], "0.004")],
)
def test_spread_as_text(values: list[float], text: str) -> None:
    assert stats.spread(values).text() == text


def test_fastest_setting_wins_and_the_earlier_of_equals() -> None:
    assert stats.fastest({"a": 1.0, "b": 3.0, "c": 2.0}) == "b"
    assert stats.fastest({"a": 1.0, "b": 1.0}) == "a"


def test_rows_are_sorted_and_keep_those_without_figures() -> None:
    made = stats.rows(
        scenario(
            absent=entry(problem="not installed"),
            slow=entry(run(seconds=4.0, cut=True)),
            quick=entry(run(seconds=1.0, received=2_500_000_000), run(seconds=2.0), run(seconds=1.0)),
        )
    )
    assert [row.client for row in made] == ["quick", "slow", "absent"]
    quick, slow, absent = made
    assert quick.throughput == stats.Spread(2.0, 1.0, 2.0)
    assert quick.cpu == stats.Spread(0.25, 0.25, 0.25)
    assert quick.ahead == 0.25
    assert (slow.cut, quick.cut) == (True, False)
    assert (absent.problem, absent.throughput) == ("not installed", None)


def test_comparison_takes_each_best_peer_and_no_variant_of_ours() -> None:
    made = stats.rows(
        scenario(
            **{
                "penstock": entry(run(seconds=1.0, cpu=1.0)),
                "penstock-aiobotocore": entry(run(seconds=0.1, cpu=0.1)),
                "quick": entry(run(seconds=2.0, cpu=4.0)),
                "lame": entry(run(seconds=20.0, cpu=2.0)),
            }
        )
    )
    found = stats.beside(made)
    assert found is not None
    assert (found.fastest_peer, found.throughput) == ("quick", 2.0)
    assert (found.cheapest_peer, found.cpu) == ("lame", 0.5)
    assert stats.beside([row for row in made if row.client.startswith("penstock")]) is None
    assert stats.beside([row for row in made if row.client != "penstock"]) is None


def results(**found: Any) -> dict[Any, Any]:
    return {
        "date": "2026-01-02",
        "note": "A note.",
        "rounds": 1,
        "machine": {
            "cpu": "A CPU",
            "cores": 2,
            "memory_gib": 24.0,
            "kernel": "6.1",
            "python": "3.11",
            "load": 0.5,
            "nginx": "nginx/1.22",
        },
        "versions": {"penstock": "1"},
        "scenarios": found,
    }


def test_markdown_tells_losses_gaps_and_reasons() -> None:
    fast = scenario(
        penstock=entry(run(seconds=2.0, received=2_200_000_000)),
        peer=entry(run(seconds=1.0)),
        gone=entry(problem="not installed\nand | more"),
        odd=entry(run(), verified=False),
    )
    text = report.markdown(
        results(
            fast=fast,
            nic={"text": "a card", "problem": "network namespaces need root", "clients": {}},
        )
    )
    assert "A note." in text
    assert "read ahead into the next epoch: 10%" in text
    assert "gone was not measured, not installed and | more" in text
    assert "NOT VERIFIED" in text
    assert "| `fast` | 0.50 | peer | 1.00 | peer |" in text
    assert "Penstock loses on throughput in `fast`." in text
    assert "- `nic`, a card: not measured, network namespaces need root." in text
    tables = [
        [line.count("|") for line in lines]
        for inside, lines in itertools.groupby(text.splitlines(), lambda line: line.startswith("|"))
        if inside
    ]
    assert tables == [[6] * 3, *[[6] * 3] * 3]  # the summary, then each figure of four clients
    assert "| scenario | penstock | peer | gone | odd |" in text
    assert "| `fast` | 1.00 | 2.00 | - |" in text


def test_results_replace_what_was_between_the_markers() -> None:
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.insert(page, "new\n")
    assert once == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    assert report.insert(once, "new\n") == once
    with pytest.raises(ValueError, match="no lines"):
        report.insert("no markers", "new")


def test_the_page_has_the_markers() -> None:
    with open(os.path.join(ROOT, "docs", "explanation", "performance.md"), encoding="utf-8") as file:
        assert report.insert(file.read(), "new")


# --- The command line --------------------------------------------------------------------------------


def test_lists_are_in_a_fixed_order_and_everything_is_chosen_unless_told() -> None:
    chosen = program.parser().parse_args(["--peers", "obstore, penstock"])
    assert (chosen.scenarios, chosen.peers) == (list(scenarios.SCENARIOS), ["penstock", "obstore"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenarios", "fats"], "no 'fats'; there are fast, s3like"),
        (["--peers", "boto"], "no 'boto'; there are penstock"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--scale", "0"], "--scale above 0"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_every_scenario_has_settings_for_every_client() -> None:
    for one, client in itertools.product(scenarios.SCENARIOS.values(), lineup.CLIENTS.values()):
        for name in client.choices(one.shape):
            client.setting_for(name, one.shape.buckets)
        assert client.choices(one.shape)
        assert one.settings_from in (None, *scenarios.SCENARIOS)
        assert one.server in origin.SERVERS


@pytest.mark.parametrize("name", ["penstock", "penstock-aiobotocore"])
@pytest.mark.parametrize("streams", [1, 20])
def test_every_setting_of_ours_is_a_valid_job(name: str, streams: int) -> None:
    from benchmarks.ours import Penstock
    from sidecar.config.job import Job

    client = lineup.CLIENTS[name]
    assert isinstance(client, Penstock)
    assert client.unavailable() is None
    channels = [
        Stream(bucket="abc", keys=[], size=0, fifo=client.fifo("/dir", index)) for index in range(streams)
    ]
    for setting in client.settings | client.small:
        given = client.setting_for(setting, streams)
        task = Task(url="http://127.0.0.1:1", ca_bundle=None, streams=channels, setting=given)
        job = Job.model_validate(client.job(task, channels, "/dir/ml"))
        assert len(job.input_data_config) == streams


def test_an_absent_peer_says_so() -> None:
    peer = clients.PythonPeer("nobody", {"default": {}}, {"default": {}}, "nobody", "no-such-distribution")
    assert peer.unavailable() == "no-such-distribution is not installed"


def test_client_environment_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert not {"HTTPS_PROXY", "AWS_PROFILE"} & clients.environment("/home").keys()


# --- Objects -----------------------------------------------------------------------------------------


def test_listing_is_what_s3_would_say() -> None:
    entries = [("a&b/<1>", 7, "68596340-7"), ("c", 0, "68596341-0")]
    tree = ET.fromstring(listing("bucket", entries))
    space = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}
    found = [
        tuple(item.findtext(f"s3:{name}", namespaces=space) for name in ("Key", "Size", "ETag"))
        for item in tree.findall("s3:Contents", space)
    ]
    assert found == [(key, str(size), f'"{etag}"') for key, size, etag in entries]
    assert tree.findtext("s3:IsTruncated", namespaces=space) == "false"
    assert tree.findtext("s3:KeyCount", namespaces=space) == "2"


def test_expected_hashes_are_those_of_the_files(data: DataSet) -> None:
    for bucket in range(TINY.buckets):
        content = b""
        for index in range(TINY.objects):
            path = os.path.join(data.root, "objects", TINY.bucket(bucket), TINY.key(index))
            with open(path, "rb") as file:
                content += file.read()
        assert len(content) == TINY.stream_bytes
        for length in (TINY.stream_bytes, TINY.size + MIB + 1, 1):
            assert data.expected_sha256(bucket, length) == hashlib.sha256(content[:length]).hexdigest()
    assert data.expected_sha256(0, TINY.stream_bytes) != data.expected_sha256(1, TINY.stream_bytes)


def test_no_two_chunks_of_a_data_set_are_alike(data: DataSet) -> None:
    chunks = [
        bytes(piece)
        for bucket in range(TINY.buckets)
        for index in range(TINY.objects)
        for piece in data.pieces(bucket, index)
    ]
    assert len(set(chunks)) == len(chunks) == TINY.buckets * TINY.objects * 3


def test_scaling_keeps_objects_big_and_small_ones_small() -> None:
    big, small = Shape("big", 1, 8, 256 * MIB), Shape("small", 1, 5000, 100_000)
    assert big.scaled(1 / 256) == Shape("big", 1, 8, MIB)
    assert small.scaled(0.01) == Shape("small", 1, 50, 100_000)
    assert big.scaled(1) is big


def test_a_wrong_stream_is_refused(data: DataSet) -> None:
    right = {"bytes": TINY.stream_bytes, "cut": False, "sha256": data.expected_sha256(0, TINY.stream_bytes)}
    measure.check(0, right, data)
    measure.check(0, {"bytes": 5, "cut": True, "sha256": data.expected_sha256(0, 5)}, data)
    for wrong in ({"sha256": "0" * 64}, {"bytes": 5}, {"bytes": TINY.stream_bytes + 1, "cut": True}):
        with pytest.raises(measure.WrongBytes):
            measure.check(0, right | wrong, data)
    with pytest.raises(ProcessFailed, match="delivered nothing"):
        measure.check(0, {"bytes": 0, "cut": True, "sha256": None}, data)


# --- Processes and the reader ------------------------------------------------------------------------


def test_cpu_clock_and_memory_are_those_of_the_process() -> None:
    """In a process without children, which would count too."""
    script = (
        "import os, resource, time\n"
        "from benchmarks.process import cpu_seconds, peak_memory\n"
        "before = time.process_time()\n"
        "seen = cpu_seconds(os.getpid())\n"
        "assert before <= seen <= time.process_time()\n"
        "used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"
        "assert 1 << 20 < peak_memory(os.getpid()) <= 2 * used\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_process_that_is_gone_is_an_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        cpu_seconds(gone.pid)
    with pytest.raises(ProcessLookupError):
        peak_memory(gone.pid)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a reader on a FIFO; returns it with the FIFO's write end."""
    started = []

    def start(**options: Any) -> tuple[Child, io.FileIO]:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        child = Child("reader", [*READER, json.dumps({"limit": 30} | options)], env=ENVIRONMENT)
        started.append(child)
        assert child.line(deadline=FAR) == "ready"
        child.say(str(fifo))
        return child, open(fifo, "wb", buffering=0)

    yield start
    for child in started:
        child.close()


def test_reader_counts_and_hashes(reader: Any) -> None:
    child, fifo = reader(hash=True)
    content = random.Random(1).randbytes(3 * MIB + 7)
    with fifo:
        fifo.write(content)
    answer = json.loads(child.line(deadline=FAR))
    assert (answer["bytes"], answer["cut"]) == (len(content), False)
    assert answer["sha256"] == hashlib.sha256(content).hexdigest()


def test_reader_leaves_a_silent_writer_when_its_time_is_up(reader: Any) -> None:
    child, fifo = reader(hash=True, limit=0.2)
    with fifo:
        fifo.write(b"some")
        answer = json.loads(child.line(deadline=FAR))
        with pytest.raises(BrokenPipeError):
            fifo.write(b"more")
    assert (answer["bytes"], answer["cut"]) == (4, True)
    assert answer["sha256"] == hashlib.sha256(b"some").hexdigest()


def test_reader_leaves_a_busy_writer_when_its_time_is_up(reader: Any) -> None:
    child, fifo = reader(limit=0.2)
    with fifo, pytest.raises(BrokenPipeError):
        while True:
            fifo.write(bytes(MIB))
    answer = json.loads(child.line(deadline=FAR))
    assert answer["cut"]
    assert answer["bytes"] > 0


def test_a_silent_death_is_reported_with_its_last_words() -> None:
    child = Child("a peer", [sys.executable, "-c", "raise SystemExit('no luck')"], env=ENVIRONMENT)
    try:
        with pytest.raises(ProcessFailed, match="a peer ended early: no luck"):
            child.line(deadline=FAR)
    finally:
        child.close()


async def test_ranges_are_written_in_order_whatever_comes_first(tmp_path: Path) -> None:
    keys, size, part = ["a", "b", "c"], 10 * 1000 + 1, 1000
    content = {key: random.Random(key).randbytes(size) for key in keys}
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    flying: list[asyncio.Future[None]] = []
    most = 0

    async def get(bucket: str, key: str, start: int, end: int) -> tuple[bytes]:
        nonlocal most
        future = asyncio.get_running_loop().create_future()
        flying.append(future)
        most = max(most, len(flying))
        if len(flying) == 4 or (key, end) == ("c", size):
            for waiting in reversed(flying):  # the youngest first
                waiting.set_result(None)
            flying.clear()
        await future
        return (content[key][start:end],)

    received: list[bytes] = []

    def read() -> None:
        with open(fifo, "rb") as file:
            received.append(file.read())

    thread = threading.Thread(target=read)
    thread.start()
    stream = Stream(bucket="any", keys=keys, size=size, fifo=fifo)
    await in_order(stream, get, part_size=part, ahead=4)
    await asyncio.to_thread(thread.join)
    assert received == [b"".join(content.values())]
    assert most == 4


# --- The origin --------------------------------------------------------------------------------------


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, Message, bytes]:
    request = urllib.request.Request(url, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_configuration_passes_nginx(tmp_path: Path) -> None:
    origin.write_certificate(str(tmp_path), "127.0.0.1")
    path = tmp_path / "nginx.conf"
    text = origin.config(
        str(tmp_path), str(tmp_path), address="127.0.0.1", ports=(18001, 18002, 18003), workers=2
    )
    path.write_text(text)
    origin.check_config(str(path))
    path.write_text(text + "nonsense;\n")
    with pytest.raises(origin.OriginFailed, match="nonsense"):
        origin.check_config(str(path))


@pytest.mark.parametrize("server", ["fast", "paced"])
def test_origin_answers_as_s3_does(tmp_path: Path, data: DataSet, server: str) -> None:
    with origin.running_origin(data, str(tmp_path / "origin")) as running:
        bucket = f"{running.urls[server]}/{TINY.bucket(1)}"
        status, headers, listed = ask(f"{bucket}?list-type=2&prefix=&encoding-type=url")
        assert (status, headers["Content-Type"]) == (200, "application/xml")
        status, headers, body = ask(f"{bucket}/{TINY.key(2)}", Range="bytes=1000-1999")
        with open(os.path.join(data.root, "objects", TINY.bucket(1), TINY.key(2)), "rb") as file:
            assert body == file.read()[1000:2000]
        assert status == 206
        assert headers["Content-Range"] == f"bytes 1000-1999/{TINY.size}"
        assert headers["ETag"].encode() in listed.replace(b"&quot;", b'"')
        assert headers["ETag"].strip('"') == nginx_etag(int(headers["ETag"][1:].split("-")[0], 16), TINY.size)
        assert ask(f"{bucket}/{TINY.key(2)}", **{"If-Match": headers["ETag"]})[0] == 200
        assert ask(f"{bucket}/{TINY.key(2)}", **{"If-Match": '"other"'})[0] == 412
        status, headers, body = ask(f"{bucket}/{TINY.key(0)}", "HEAD")
        assert (status, headers["Content-Length"], body) == (200, str(TINY.size), b"")
        assert ask(f"{bucket}/nothing")[0] == 404
    with pytest.raises(urllib.error.URLError):
        ask(running.urls[server])  # it has gone with its block


def test_objects_are_removed_whatever_happens() -> None:
    with pytest.raises(SystemExit), directory_in_memory("penstock-bench-") as directory:
        DataSet(Shape("tiny", 1, 1, 10), os.path.join(directory, "data")).create()
        raise SystemExit(1)
    assert not os.path.exists(directory)


def test_a_tiny_run_from_end_to_end(tmp_path: Path) -> None:
    command = ["--scenarios", "fast", "--peers", "penstock", "--rounds", "1", "--scale", str(1 / 256)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command, "--defaults", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "results.json").read_text())
    measured = document["scenarios"]["fast"]["clients"]["penstock"]
    assert measured["problem"] is None
    assert measured["verified"] is True
    (counted,) = measured["runs"]
    assert (counted["bytes"], counted["cut"]) == (8 * MIB, False)
    assert counted["cpu_seconds"] > 0
    assert counted["peak_rss"] > 0
    assert counted["received_bytes"] >= 8 * MIB
    text = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", str(tmp_path / "results.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "- `fast`, " in text
    assert "; penstock (default) over splice" in text
    assert text.count("| scenario | penstock |") == len(report.FIGURES)


# --- The readers beside those of other packages ------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("family", "name"), [("tensorflow", "lines-100"), ("torch", "tfrecord-8k"), ("plain", "tfrecord-8k")]
)
def test_readers_are_measured_side_by_side(
    family: Literal["tensorflow", "torch", "plain"],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tiny case end to end: every reader reads every byte, and the page gets its table."""
    if family in {"tensorflow", "torch"}:
        monkeypatch.setattr(sys, "executable", warm_python(family))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{readers.BEGIN}\nold\n{readers.END}\nafter\n")
    out = tmp_path / "readers.json"
    monkeypatch.setitem(readers.CASES, name, replace(readers.CASES[name], total=100_000))
    command = ["--readers", family, "--cases", name, "--rounds", "1", "--out", str(out), "--into", str(page)]
    assert readers.main(command) == 0
    assert json.loads(out.read_text())["cases"].keys() == {f"{family}/{name}"}
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    for reader in readers.READERS:
        if reader.family == family and (reader.fifos or family == "tensorflow"):
            assert f"| `{name}` | {reader.label} |" in text
    if family == "tensorflow":
        assert text.count("| 1.00 | 1.00 |") == 1


def test_a_case_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        readers.main(["--cases", "lines-100,lines-101"])
    assert "no 'lines-101'; there are tfrecord-200" in capsys.readouterr().err


# --- Made-up listings --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", lists.SHAPES)
def test_made_up_keys_ascend_and_are_listed_from_any_of_them(shape: str) -> None:
    keys = lists.Keys(shape, 2500)
    assert [*keys] == sorted({*keys})
    for after in (keys[0], keys[1200], keys[2499]):
        page = parse_page(lists.page(keys, {"start-after": [after]}), ErrorContext("bucket", "train/"))
        assert page.keys == [key.encode() for key in keys if key > after][:1000]
        assert (page.token is None) == (after == keys[2499])


def test_listings_by_both_clients_are_a_table_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{lists.BEGIN}\nold\n{lists.END}\nafter\n", encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.listing", "--keys", "10,3000", "--delay", "0"]
    command += ["--rounds", "1", "--into", str(page)]
    subprocess.check_output(command)
    rows = [line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if "| " in line]
    assert [row[0] for row in rows] == [
        "| Keys",
        "| 10",
        "| 3,000",
        "| 10, aiobotocore",
        "| 3,000, aiobotocore",
    ]
    assert {len(row) for row in rows} == {len(lists.COLUMNS)}


# --- Ranks -------------------------------------------------------------------------------------------


def test_starts_of_ranks_are_measured_with_and_without_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    large_index.measure(Periodic(2, 2000, large_index.PAYLOAD), [1, 4], rounds=1)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("4,000 records in 2 objects: the index has ")
    starts = [line.partition(": first global batch after ")[0].strip() for line in lines]
    assert starts == ["1 ranks", "1 ranks, --resume", "4 ranks", "4 ranks, --resume"]
    for line in lines:
        assert float(line.split(" after ")[1].split(" ")[0]) > 0
        assert int(line.split(", ")[-1].removesuffix(" MiB of memory")) > 10


def test_files_are_uploaded_to_a_sink_by_plain_http_and_tls() -> None:
    program = """
from benchmarks import uploads
uploads.SHAPES, uploads.CLIENTS = {"two": (2, 9_000_000)}, ("penstock",)
print(*uploads.rows(1, 1.0), sep="\\n")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    _, _, *rows = ran.stdout.splitlines()
    assert [row.split("|")[1:4] for row in rows] == [
        [" two ", f" {server} ", " `penstock` "] for server in ("plain", "TLS")
    ]
