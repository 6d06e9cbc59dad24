"""The shared budget, as a state machine: whatever channels do, the sum holds and floors are never refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamer.plan import ObjectRef, Part, Segment
from streamer.relay.staging.buffers import BUFFER_SIZE, BufferPool, BufferStages
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import KIB, MIB

BUDGET, REQUESTS = 100, 8


def memory_budget(members: int, *, requests: int = REQUESTS, budget: int = BUDGET) -> MemoryBudget:
    return MemoryBudget(
        budget, ConcurrencyController(requests, 4, fixed_limit=True, fixed_part=True), members=members
    )


class AllotmentMachine(RuleBasedStateMachine):
    """Four channels that take, give, come and go; what one is refused is remembered until `on_available`."""

    members = 4

    def __init__(self) -> None:
        super().__init__()
        self.whole = memory_budget(self.members)
        self.shares = [self.whole.quota() for _ in range(self.members)]
        self.waiting: dict[int, int | None] = {}
        """The room that each was refused; None: a request."""
        self.pieces: list[list[int]] = [[] for _ in self.shares]
        for number, quota in enumerate(self.shares):
            quota.on_available = functools.partial(self.became_available, number)

    def became_available(self, number: int) -> None:
        self.waiting.pop(number, None)

    index = st.integers(0, 3)

    @rule(i=index, reserved_bytes=st.integers(1, 60))
    def take(self, i: int, reserved_bytes: int) -> None:
        quota = self.shares[i]
        self.waiting.pop(i, None)
        if quota.reserved_bytes + reserved_bytes <= quota.floor:
            assert quota.fits(reserved_bytes), "a share below its floor was refused"
        if quota.fits(reserved_bytes):
            quota.take(reserved_bytes)
            self.pieces[i].append(reserved_bytes)
        else:
            self.waiting[i] = reserved_bytes

    @precondition(lambda self: any(self.pieces))
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from([i for i, held in enumerate(self.pieces) if held]))
        reserved_bytes = self.pieces[i].pop(data.draw(st.integers(0, len(self.pieces[i]) - 1)))
        self.shares[i].give(reserved_bytes)
        self.waiting.pop(i, None)  # it knows by itself

    @rule(i=index, active=st.booleans())
    def reader(self, i: int, active: Any) -> None:
        self.shares[i].activate(active=active)
        self.waiting.pop(i, None)

    @rule(i=index)
    def begin(self, i: int) -> None:
        self.waiting.pop(i, None)
        if self.shares[i].may_request():
            self.shares[i].begin()
        else:
            self.waiting[i] = None

    @precondition(lambda self: any(quota.requests_in_flight for quota in self.shares))
    @rule(data=st.data(), requests=st.integers(1, 24))
    def end(self, data: st.DataObject, requests: int) -> None:
        """A request that has landed may change the limit of all."""
        i = data.draw(st.sampled_from([i for i, quota in enumerate(self.shares) if quota.requests_in_flight]))
        self.whole.concurrency.limit = requests
        self.shares[i].end()
        self.waiting.pop(i, None)

    @rule(requests=st.integers(1, 24))
    def throttled(self, requests: int) -> None:
        """The limit is lower at once, without a word to anybody."""
        self.whole.concurrency.limit = min(requests, self.whole.concurrency.limit)

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        for number, reserved_bytes in self.waiting.items():
            quota = self.shares[number]
            if reserved_bytes is None:
                assert quota.requests_in_flight >= quota.requests_limit, "there is a request, and nobody told"
            else:
                assert not quota.allows(reserved_bytes), "there is room, and nobody told"
            assert quota.refused

    @invariant()
    def the_sum_holds(self) -> None:
        held = [sum(pieces) for pieces in self.pieces]
        assert [quota.reserved_bytes for quota in self.shares] == held
        assert sum(held) <= BUDGET
        floors = [quota.floor for quota in self.shares]
        assert self.whole.committed == sum(map(max, held, floors)) <= BUDGET

    @invariant()
    def quotas_and_requests(self) -> None:
        active = [quota for quota in self.shares if quota.active]
        assert self.whole.active == len(active)
        for quota in self.shares:
            assert quota.byte_limit >= quota.floor
            assert quota.requests_limit >= 1
            if not quota.active:
                assert quota.byte_limit == quota.floor
        assert sum(quota.byte_limit for quota in self.shares) <= BUDGET
        assert sum(quota.requests_limit for quota in active) <= max(self.whole.concurrency.limit, len(active))

    @invariant()
    def no_dead_end(self) -> None:
        """An empty share can always take its floor; with nothing held at all, its whole quota too."""
        for quota in self.shares:
            if not quota.reserved_bytes:
                refused = quota.refused
                assert quota.fits(quota.floor)
                if not any(map(sum, self.pieces)):
                    assert quota.fits(quota.byte_limit)
                assert quota.refused == refused


TestAllotment = AllotmentMachine.TestCase


def test_a_channel_alone_has_everything() -> None:
    quota = memory_budget(1).quota()
    assert (quota.floor, quota.byte_limit) == (BUDGET, BUDGET)
    assert quota.fits(BUDGET)
    assert not quota.fits(BUDGET + 1)
    assert quota.requests_limit == REQUESTS


def test_the_only_channel_that_is_read_has_more_than_half() -> None:
    whole = memory_budget(2)
    read, unread = whole.quota(), whole.quota()
    read.activate(active=True)
    assert (read.byte_limit, unread.byte_limit) == (75, 25)
    assert read.requests_limit == REQUESTS
    unread.activate(active=True)
    assert (read.byte_limit, unread.byte_limit) == (50, 50)
    assert (read.requests_limit, unread.requests_limit) == (4, 4)


def test_what_was_taken_while_alone_is_missing_from_nobodys_floor() -> None:
    """A reader that comes has its floor at once, and its equal part when the other has delivered."""
    whole = memory_budget(2)
    early, late = whole.quota(), whole.quota()
    reported = []
    late.on_available = lambda: reported.append("late")
    early.activate(active=True)
    early.take(75)
    late.activate(active=True)
    assert late.fits(25)
    late.take(25)
    assert not late.fits(10)
    assert reported == []
    early.give(10)
    assert reported == ["late"]
    assert late.fits(10)


def test_a_request_more_is_offered_and_one_that_is_no_more_is_not() -> None:
    """A channel has as many requests as it has, whatever the others leave; only the limit of all gives
    more."""
    whole = memory_budget(2, requests=2)
    one, other = whole.quota(), whole.quota()
    reported = []
    other.on_available = lambda: reported.append("other")
    other.activate(active=True)
    one.activate(active=True)
    other.begin()
    assert not other.may_request()
    one.begin()
    one.end()
    assert reported == []
    one.begin()
    whole.concurrency.limit = 4
    one.end()
    assert reported == ["other"]


def test_a_refused_channel_is_looked_at_when_there_is_something_for_it() -> None:
    """Each of a thousand channels looked again whenever a request ended: 9 s of CPU for their end alone."""
    count = 1000
    whole = memory_budget(count, requests=64, budget=2 * count)
    shares = [whole.quota() for _ in range(count)]
    looks = []
    for quota in shares:
        quota.on_available = lambda: looks.append(1)
        quota.take(1)
        quota.begin()
        assert not quota.may_request()
        assert not quota.fits(1)
    for quota in shares:
        quota.end()
        quota.give(1)
    assert not looks


@pytest.mark.parametrize(("reader", "limit"), [(False, 4), (True, 2)])
def test_small_objects_ask_for_more_requests_until_a_channel_has_a_reader(reader: bool, limit: int) -> None:
    """With a reader, a delivery that does not wait shows that the requests are enough."""
    concurrency = ConcurrencyController(2, 4, fixed_part=True)
    whole = MemoryBudget(BUDGET, concurrency, members=2)
    early, late = whole.quota(), whole.quota()
    late.activate(active=reader)
    early.begin(4)
    for number in range(3):
        assert not early.may_request()
        early.landed(number / 10, received=4, first_byte=0.025, seconds=0.026)
    assert concurrency.limit == limit


def test_no_more_members_than_agreed() -> None:
    whole = memory_budget(1)
    whole.quota()
    with pytest.raises(ValueError, match="for 1 channels"):
        whole.quota()


@pytest.mark.parametrize(("budget", "members"), [(0, 1), (1, 0), (-1, 1)])
def test_an_allotment_of_nothing_is_refused(budget: int, members: int) -> None:
    with pytest.raises(ValueError, match="needs bytes"):
        memory_budget(members, budget=budget)


def test_a_budget_that_changes() -> None:
    """Raised, it is there at once for those refused; lowered, nothing is taken until enough is given."""
    whole = memory_budget(1)
    quota = whole.quota()
    reported = []
    quota.on_available = lambda: reported.append(quota.fits(50))
    quota.take(100)
    assert not quota.fits(50)
    whole.change_budget(200)
    assert reported == [True]
    whole.change_budget(60)
    assert not quota.fits(1)
    quota.give(60)
    assert quota.fits(20)
    assert not quota.fits(21)
    assert whole.least_budget == 4
    with pytest.raises(ValueError, match="at least 4 bytes"):
        whole.change_budget(3)


def test_the_least_budget_holds_a_part_in_whole_buffers() -> None:
    """Lowered to it, a part of 64 KiB could never be admitted, and the channel ended with ValueError."""
    concurrency = ConcurrencyController(1, 64 * KIB, fixed_part=True)
    whole = MemoryBudget(8 * MIB, concurrency, members=2, unit=BUFFER_SIZE)
    stages = BufferStages(whole.quota(), BufferPool())
    whole.change_budget(whole.least_budget)
    ref = ObjectRef("b", "k", 64 * KIB, "e")
    assert stages.quota.fits(stages.reserved_bytes(Part.of(0, 0, [Segment(ref, 0, 64 * KIB)])))


@pytest.mark.parametrize(
    ("budget", "members", "inflating", "ahead"),
    [
        (256 * MIB, 1, 1, 16 * MIB),
        (128 * MIB, 3, 2, 8 * MIB),
        (128 * MIB, 3, 0, 0),
        (31 * MIB, 1, 1, 0),  # an eighth is too little to inflate ahead in
        (64 * MIB, 4, 1, 0),  # and here parts of 8 MiB need it all
    ],
)
def test_parts_never_have_what_is_inflated_ahead(
    budget: int, members: int, inflating: int, ahead: int
) -> None:
    concurrency = ConcurrencyController(64, 8 * MIB, fixed_part=True)
    whole = MemoryBudget(budget, concurrency, members=members, inflating=inflating)
    quotas = [whole.quota() for _ in range(members)]
    assert {quota.ahead for quota in quotas} == {ahead}
    for quota in quotas:
        quota.activate(active=True)
        quota.take(quota.floor)
    for quota in quotas:
        while quota.fits(1000):
            quota.take(1000)
    reserved = sum(quota.reserved_bytes for quota in quotas)
    assert budget - members * 1000 < reserved + inflating * ahead <= budget
    assert min(quota.floor for quota in quotas) >= 8 * MIB
    with pytest.raises(ValueError, match="at least"):
        whole.change_budget(inflating * ahead + 8 * MIB - 1)


def test_requests_that_change() -> None:
    whole = memory_budget(1, requests=2)
    quota = whole.quota()
    for _ in range(2):
        quota.begin()
    assert not quota.may_request()
    whole.change_requests(3)
    assert quota.may_request()
    whole.change_requests(None)
    assert (whole.concurrency.limit, whole.concurrency.fixed) == (3, False)
