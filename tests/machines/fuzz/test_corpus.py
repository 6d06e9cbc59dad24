"""Every input that is kept, and arbitrary ones: each parser ends in a value or in an error of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.machines.fuzz import inputs
from tests.machines.fuzz.inputs import CORPUS, INTERESTING, add, kept
from tests.machines.fuzz.machine import INPUTS, Batch
from tests.machines.fuzz.targets import TARGETS
from tests.machines.machine import home
from tests.machines.report import search


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_ends_as_it_must(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)
    for data in kept(name):
        TARGETS[name].run(data)


def test_the_corpus_is_of_targets_that_are_there() -> None:
    files = list(CORPUS.iterdir())
    assert {path.name for path in files} <= {f"{name}.txt" for name in TARGETS}
    assert sum(path.stat().st_size for path in files) < 512 * 1024


def test_what_is_kept_is_read_again_and_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CORPUS", tmp_path)
    made = [bytes(range(256)), b"", b"\r\n# no comment\n", b"'\"\\"]
    for data in [*made, *made]:
        add("uri", data)
    assert kept("uri") == made
    assert kept("tar") == []


def spliced(seeds: tuple[bytes, ...]) -> Any:
    """A seed with something put in, or cut."""

    def make(parts: Any) -> Any:
        seed, at, to, put = parts
        return seed[: at % (len(seed) + 1)] + put + seed[to % (len(seed) + 1) :]

    put = st.one_of(st.binary(max_size=40), st.sampled_from(INTERESTING))
    return st.tuples(st.sampled_from(seeds), st.integers(0, 4096), st.integers(0, 4096), put).map(make)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_like_an_input_ends_as_it_must(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=30, suppress_health_check=list(HealthCheck))
    @given(spliced(target.seeds))
    @example(b"")
    def check(data: bytes) -> None:
        target.run(data)

    check()


def test_a_batch_is_run_and_its_seed_draws_it_again() -> None:
    report = search(home("fuzz"), [4], workers=1)
    assert not report.broken, report
    assert report.counts["inputs"] >= INPUTS
    first, again, other = (list(Batch(seed, "content-range").inputs()) for seed in (1, 1, 2))
    assert first == again != other
