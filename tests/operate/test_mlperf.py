"""Emulated accelerators: the published workloads, their batches, and tiny runs end to end.

No figure is judged here; that the figures are of the right thing is.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.clients import ROOT
from benchmarks.mlperf import __main__ as program
from benchmarks.mlperf import runs
from benchmarks.mlperf.feeds import FEEDS, RANGE, groups
from benchmarks.mlperf.loads import LOADS, batches, sample_sizes, utilisation
from benchmarks.mlperf.samples import Samples

TINY = replace(
    LOADS["unet3d-a100"], sample=200_000.0, deviation=60_000.0, batch=3, computation=0.02, loaders=2
)


def test_rates_are_those_that_accelerators_are_known_by() -> None:
    rates = {name: round(load.rate / 1e9, 2) for name, load in LOADS.items()}
    assert rates == {
        "unet3d-a100": 1.61,
        "unet3d-h100": 3.18,
        "unet3d-b200": 6.33,
        "retinanet-b200": 0.16,
        "retinanet-mi355": 0.16,
        "resnet50-a100": 0.11,
        "resnet50-h100": 0.2,
        "cosmoflow-a100": 0.51,
        "cosmoflow-h100": 0.81,
    }


@pytest.mark.parametrize("count", [1, 2, 13, 30])
def test_sizes_have_the_mean_of_the_load(count: int) -> None:
    sizes = sample_sizes(LOADS["unet3d-a100"], count)
    assert statistics.fmean(sizes) == pytest.approx(LOADS["unet3d-a100"].sample, rel=1e-6)
    assert sample_sizes(LOADS["unet3d-a100"], count) == sizes
    assert min(sizes) > 0


@pytest.mark.parametrize("name", LOADS)
def test_batches_cover_the_stream_in_order(name: str) -> None:
    load = LOADS[name]
    objects = [load.samples_per_object * size for size in sample_sizes(load, 60)]
    ends = [sum(objects[:index]) for index in range(len(objects))]
    at = 0
    for batch in batches(load, objects):
        for index, start, length in batch:
            assert ends[index] + start == at
            assert start + length <= objects[index]
            at += length
    assert at == sum(objects) if load.samples_per_object == 1 and 60 % load.batch == 0 else at <= sum(objects)
    assert sum(objects) - at < load.batch * max(objects)


def test_utilisation_is_computation_by_time() -> None:
    assert utilisation(TINY, 10, 0.4) == pytest.approx(0.5)


def test_large_pieces_are_requested_in_ranges_and_small_ones_together() -> None:
    batch = [("a", 0, 10), ("b", 5, 2 * RANGE + 1), ("c", 0, RANGE)]
    assert list(groups(batch)) == [
        [("b", 5, RANGE), ("b", 5 + RANGE, RANGE), ("b", 5 + 2 * RANGE, 1)],
        [("a", 0, 10), ("c", 0, RANGE)],
    ]


def test_links_make_a_long_stream_of_few_objects(tmp_path: Path) -> None:
    data = Samples(TINY, str(tmp_path / "data"), accelerators=2, steps=10, distinct_bytes=1e6)
    data.create()
    assert (data.distinct, data.shape.objects) == (5, 31)
    for accelerator in range(2):
        found = [Path(data.directory(accelerator), key).stat() for key in data.keys]
        assert [status.st_size for status in found] == data.sizes
        assert len({status.st_ino for status in found}) == 5


def test_every_client_has_settings() -> None:
    for feed in FEEDS:
        for setting in runs.settings(feed, TINY).values():
            assert setting.loaders >= 1


@pytest.mark.timeout(180)
def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accelerators; a batch that is not read as a whole would end the run."""
    monkeypatch.setitem(LOADS, "tiny", replace(TINY, samples_per_object=4))
    monkeypatch.setitem(runs.DISTRIBUTIONS, "boto3", ["no-such-distribution"])
    page, out = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"before\n{program.BEGIN}\nstale\n{program.END}\nafter\n")
    command = ["--loads", "tiny", "--rounds", "1", "--seconds", "0.1", "--accelerators", "2", "--defaults"]
    command += ["--clients", "penstock,files,boto3"]
    assert program.main([*command, "--out", str(out), "--into", str(page)]) == 0
    text = page.read_text()
    assert "stale" not in text
    assert "**`tiny`**, 2 accelerators, origin `fast`" in text
    entries = json.loads(out.read_text())["loads"]["tiny"]["feeds"]
    assert entries["boto3"]["problem"] == "no-such-distribution is not installed"
    assert "| boto3 | no-such-distribution is not installed | - | - | - |" in text
    assert not entries["boto3"]["runs"]
    for feed in ("penstock", "files"):
        entry = entries[feed]
        (run,) = entry["runs"]
        assert run["steps"] >= 2
        assert 0 < run["utilisation"] <= 1
        assert f"| {feed} | {entry['setting']} |" in text


@pytest.mark.parametrize("brought", [7, 11])
def test_a_batch_of_other_bytes_is_no_result(brought: int, tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    loader = "import sys\nprint('ready', flush=True)\nfor _ in sys.stdin: print(sys.argv[1], flush=True)"
    order.write_text(
        json.dumps(
            {
                "loaders": [[sys.executable, "-c", loader, str(brought)]],
                "sizes": [7] * 4,
                "ahead": 2,
                "computation": 0.001,
                "seconds": 10.0,
            }
        )
    )
    command = [sys.executable, "-I", "-S", runs.TRAINER, str(order)]
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, check=False)
    if brought == 7:
        assert json.loads(done.stdout.splitlines()[-1])["steps"] == 3
    else:
        assert done.returncode == 1
        assert "batch 0 has 11 bytes instead of 7" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loads", "unet3d-z80"], "no 'unet3d-z80'; there are unet3d-a100"),
        (["--clients", "carrier-pigeon"], "no 'carrier-pigeon'; there are penstock"),
        (["--rounds", "-1"], "--rounds must not be negative"),
        (
            ["--out", "/no/results", "--settings-of", "unet3d-a100"],
            "/no/results has no results of unet3d-a100",
        ),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_page_has_the_markers() -> None:
    page = Path(ROOT, "docs", "explanation", "performance-training.md").read_text(encoding="utf-8")
    assert report.insert(page, "new", begin=program.BEGIN, end=program.END) != page
