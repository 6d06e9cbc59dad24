"""The cache of the last epochs' values."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from streamer.plan.epoch_cache import MOST_EPOCHS, EpochCache


def unmade() -> str:
    raise AssertionError("made again")


def test_the_epochs_that_were_added_last_are_cached() -> None:
    cache = EpochCache[str]()
    for epoch in (7, 0, 1, 2, 3):
        assert cache.of(epoch, partial("value {}".format, epoch)) == cache.of(epoch, unmade)
    with pytest.raises(AssertionError, match="made again"):
        cache.of(7, unmade)
    assert [cache.of(epoch, unmade) for epoch in range(MOST_EPOCHS)] == [f"value {n}" for n in range(4)]


def test_an_epoch_that_is_in_use_stays_cached() -> None:
    cache = EpochCache[str]()
    cache.of("present", lambda: "value")
    for number in range(3 * MOST_EPOCHS):
        cache.of(number, lambda: "other")
        assert cache.of("present", unmade) == "value"
    assert cache.of(0, lambda: "anew") == "anew"


def test_threads_make_a_value_once_and_do_not_wait_for_another_one() -> None:
    """The event loop needs the length of the present epoch while a thread sums up the next one."""
    cache = EpochCache[str]()
    cache.of(0, lambda: "present")
    making, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        making.set()
        assert go_on.wait(30)
        return "next"

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.of, 1, slow)
        assert making.wait(30)
        second = threads.submit(cache.of, 1, unmade)
        assert cache.of(0, unmade) == "present"
        go_on.set()
        assert (first.result(), second.result()) == ("next", "next")
