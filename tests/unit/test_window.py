"""The window, as a state machine against a plain model: any order of events, every byte once, in budget."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamer.plan import Entries, Growth, ObjectRef, Plan, Segment
from streamer.relay.fetch.prefetcher import all_epochs
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.schedule.window import FIRST_REQUESTS, Slot, Window

SIZES = (5, 0, 12, 1, 7)
PLAN = Plan.of(tuple(ObjectRef("b", str(i), size, "e") for i, size in enumerate(SIZES)))
PART, BUDGET, REQUESTS = 4, 13, 3


def window(plan: Plan = PLAN, *, part: int = PART, budget: int = BUDGET, requests: int = REQUESTS) -> Window:
    concurrency = ConcurrencyController(requests, part, fixed_limit=True, fixed_part=True)
    return Window(all_epochs(plan, lambda: part), MemoryBudget(budget, concurrency).quota())


class WindowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.plan, self.growth = self.make_plan()
        self.window = window(self.plan)
        self.running: list[Slot] = []
        self.admitted: list[Slot] = []
        self.epoch = 0
        self.offset = 0

    def make_plan(self) -> tuple[Plan, Growth | None]:
        return PLAN, None

    @rule()
    def admit(self) -> None:
        found = self.window.admit()
        self.running += found
        self.admitted += found

    @rule()
    def allow_next_epoch(self) -> None:
        self.window.last_epoch = max(self.window.last_epoch, self.epoch + 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        """In any order, with success or failure."""
        slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.window.landed(slot)

    @precondition(lambda self: self.window.head_of_line is not None)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        head = self.window.head_of_line
        assert head is self.admitted[0]
        assert (head.part.epoch, head.part.offset + head.delivered) == (self.epoch, self.offset)
        count = data.draw(st.integers(1, head.part.size - head.delivered))
        self.offset += count
        if self.window.deliver(count):
            self.admitted.pop(0)
        if self.offset == PLAN.total_bytes(0):
            self.epoch, self.offset = self.epoch + 1, 0

    @precondition(lambda self: self.window.last_epoch >= self.epoch)
    @rule()
    def reader_goes(self) -> None:
        dropped = self.window.abandon(self.epoch)
        assert dropped == [slot for slot in self.admitted if slot.part.epoch == self.epoch]
        self.admitted = self.admitted[len(dropped) :]
        self.running = [slot for slot in self.running if slot not in dropped]
        self.epoch, self.offset = self.epoch + 1, 0

    @invariant()
    def budget_and_requests_hold(self) -> None:
        quota = self.window.quota
        assert quota.reserved_bytes == sum(slot.reserved_bytes for slot in self.admitted) <= BUDGET
        assert quota.requests_in_flight == len(self.running) <= REQUESTS

    @invariant()
    def never_stuck(self) -> None:
        """With nothing admitted and the epoch allowed, something can be admitted."""
        if self.plan.open and (self.epoch or self.offset == sum(SIZES[: self.plan.known])):
            assert self.window.dry == (not self.admitted)
            return
        if not self.admitted and not self.running and self.window.last_epoch >= self.epoch:
            found = self.window.admit()
            assert found
            self.running += found
            self.admitted += found


class OpenWindowMachine(WindowMachine):
    """The window over a plan whose entries become known one by one, and then all are."""

    def make_plan(self) -> tuple[Plan, Growth | None]:
        entries = Entries()
        growth = Growth(entries)
        return Plan(entries, growth=growth), growth

    @precondition(lambda self: self.plan.open)
    @rule()
    def listing_goes_on(self) -> None:
        assert self.growth is not None
        if (known := self.plan.known) == len(SIZES):
            self.growth.close()
            return
        run = Entries()
        run.add(ObjectRef("b", str(known), SIZES[known], "e"))
        for _ in self.growth.add(run):
            pass


TestWindow = WindowMachine.TestCase
TestOpenWindow = OpenWindowMachine.TestCase


def test_a_part_larger_than_the_budget_is_refused() -> None:
    filled = window(part=10, budget=4, requests=1)
    filled.last_epoch = 0
    with pytest.raises(ValueError, match="can never fit"):
        filled.admit()


def test_a_plan_without_bytes_admits_nothing() -> None:
    filled = window(Plan.of((ObjectRef("b", "k", 0, "e"),)))
    filled.last_epoch = 5
    assert filled.admit() == []


def test_more_than_the_part_cannot_be_delivered() -> None:
    filled = window()
    filled.last_epoch = 0
    filled.admit()
    with pytest.raises(ValueError, match="delivered 5 bytes"):
        filled.deliver(5)


def test_close_returns_what_is_in_flight_and_admits_no_more() -> None:
    filled = window()
    filled.last_epoch = 0
    admitted = filled.admit()
    assert filled.close() == admitted
    assert filled.admit() == []
    assert (filled.quota.reserved_bytes, filled.quota.requests_in_flight) == (0, 0)


def test_the_next_epoch_has_a_quarter_until_this_one_is_delivered() -> None:
    filled = window(part=1, budget=40, requests=100)
    filled.last_epoch = 1
    admitted = filled.admit()
    assert [slot.part.epoch for slot in admitted] == [0] * sum(SIZES) + [1] * 10
    for slot in admitted:
        filled.landed(slot)
    for _ in range(sum(SIZES) - 1):
        filled.deliver(1)
    assert filled.admit() == []
    filled.deliver(1)
    assert [slot.part.epoch for slot in filled.admit()] == [1] * (sum(SIZES) - 10)


def stream(found: Window, *, epoch: int = 0) -> list[tuple[str, int, int]]:
    """Deliver all of `epoch` part by part; the parts, as key and range."""
    seen: list[tuple[str, int, int]] = []
    while True:
        for slot in found.admit():
            found.landed(slot)
        head = found.head_of_line
        if head is not None:
            found.landed(head)
        if head is None or head.part.epoch > epoch:
            return seen
        (item,) = head.part.items
        assert isinstance(item, Segment)
        seen.append((item.object.key, item.start, item.end))
        found.deliver(head.part.size)


def opening(*, reader: bool) -> Window:
    """Return a window of 14 parts, of which as many fit as are to come."""
    whole = Plan.of(tuple(ObjectRef("b", f"{i:02}", 2 * PART, "e") for i in range(7)))
    opened = window(whole, budget=14 * PART, requests=14)
    opened.last_epoch = 0
    opened.quota.activate(active=reader)
    return opened


@pytest.mark.parametrize("event", ["a byte", "the end of a request"])
def test_few_requests_come_before_the_first_byte_that_a_reader_waits_for(event: str) -> None:
    opened = opening(reader=True)
    first, *_ = admitted = opened.admit()
    assert len(admitted) == FIRST_REQUESTS
    assert not opened.admit()
    if event == "a byte":
        opened.deliver(1)
    else:
        opened.landed(admitted[-1])
    assert first is opened.head_of_line
    assert len(opened.admit()) == 14 - FIRST_REQUESTS


def test_without_a_reader_the_first_requests_are_many() -> None:
    assert len(opening(reader=False).admit()) == 14
