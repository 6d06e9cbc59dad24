"""The cache of the last epochs' values."""

from __future__ import annotations

from streamer.plan.epoch_cache import MOST_EPOCHS, EpochCache


def test_the_epochs_that_were_added_last_are_cached() -> None:
    cache = EpochCache[str]()
    for epoch in (7, 0, 1, 2, 3):
        assert cache.put(epoch, f"value {epoch}") == cache.get(epoch)
    assert cache.get(7) is None
    assert [cache.get(epoch) for epoch in range(MOST_EPOCHS)] == [f"value {epoch}" for epoch in range(4)]


def test_an_epoch_that_is_in_use_stays_cached() -> None:
    cache = EpochCache[str]()
    cache.put("present", "value")
    for number in range(3 * MOST_EPOCHS):
        cache.put(number, "other")
        assert cache.get("present") == "value"
    assert cache.get(0) is None
