"""Every input that is kept, and arbitrary ones: each parser ends in a value or in an error of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz import __main__ as search
from tests.fuzz.__main__ import CORPUS, INTERESTING, add, kept
from tests.fuzz.targets import TARGETS


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
    monkeypatch.setattr(search, "CORPUS", tmp_path)
    inputs = [bytes(range(256)), b"", b"\r\n# no comment\n", b"'\"\\"]
    for data in [*inputs, *inputs]:
        add("uri", data)
    assert kept("uri") == inputs
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

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(spliced(target.seeds))
    @example(b"")
    def check(data: bytes) -> None:
        target.run(data)

    check()


def test_a_finding_is_found_and_kept(tmp_path: Path) -> None:
    """The search itself, blind as it may be: a second of one target, by the command."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--minutes", "0.02", "--target", "content-range"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 targets, " in done.stdout
    assert " 0 executions" not in done.stdout
