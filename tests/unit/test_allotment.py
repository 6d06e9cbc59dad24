"""The shared budget, as a state machine: whatever channels do, the sum holds and floors are never refused."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamer.plan import ObjectRef, Part
from streamer.relay.staging.buffers import BUFFER_SIZE, BufferPool, MemoryStages
from streamer.schedule.budget import Allotment
from streamer.schedule.concurrency import Pace
from streamer.units import KIB, MIB

BUDGET, LANES = 100, 8


def allotment(members, *, lanes=LANES, budget=BUDGET):
    return Allotment(budget, Pace(lanes, 4, fixed_lanes=True, fixed_part=True), members=members)


class AllotmentMachine(RuleBasedStateMachine):
    """Three channels that take, give, come and go; what one is refused is remembered until `on_room`."""

    members = 3

    def __init__(self):
        super().__init__()
        self.whole = allotment(self.members)
        self.shares = [self.whole.share() for _ in range(self.members)]
        self.waiting: dict[int, int | None] = {}
        """The room that each was refused; None: a request."""
        self.pieces: list[list[int]] = [[] for _ in self.shares]
        for number, share in enumerate(self.shares):
            share.on_room = lambda number=number: self.waiting.pop(number, None)

    index = st.integers(0, 2)

    @rule(i=index, room=st.integers(1, 60))
    def take(self, i, room):
        share = self.shares[i]
        self.waiting.pop(i, None)
        if share.held + room <= share.floor:
            assert share.fits(room), "a share below its floor was refused"
        if share.fits(room):
            share.take(room)
            self.pieces[i].append(room)
        else:
            self.waiting[i] = room

    @precondition(lambda self: any(self.pieces))
    @rule(data=st.data())
    def give(self, data):
        i = data.draw(st.sampled_from([i for i, held in enumerate(self.pieces) if held]))
        room = self.pieces[i].pop(data.draw(st.integers(0, len(self.pieces[i]) - 1)))
        self.shares[i].give(room)
        self.waiting.pop(i, None)  # it knows by itself

    @rule(i=index, active=st.booleans())
    def reader(self, i, active):
        self.shares[i].activate(active=active)
        self.waiting.pop(i, None)

    @rule(i=index)
    def begin(self, i):
        self.waiting.pop(i, None)
        if self.shares[i].lane_free():
            self.shares[i].begin()
        else:
            self.waiting[i] = None

    @precondition(lambda self: any(share.in_flight for share in self.shares))
    @rule(data=st.data(), lanes=st.integers(1, 24))
    def end(self, data, lanes):
        """A request that has landed may change the limit of all."""
        i = data.draw(st.sampled_from([i for i, share in enumerate(self.shares) if share.in_flight]))
        self.whole.pace.lanes = lanes
        self.shares[i].end()
        self.waiting.pop(i, None)

    @rule(lanes=st.integers(1, 24))
    def throttled(self, lanes):
        """The limit is lower at once, without a word to anybody."""
        self.whole.pace.lanes = min(lanes, self.whole.pace.lanes)

    @invariant()
    def nobody_waits_for_what_is_there(self):
        for number, room in self.waiting.items():
            share = self.shares[number]
            if room is None:
                assert share.in_flight >= share.lanes, "there is a lane, and nobody told"
            else:
                assert not share.allows(room), "there is room, and nobody told"
            assert share.refused

    @invariant()
    def the_sum_holds(self):
        held = [sum(pieces) for pieces in self.pieces]
        assert [share.held for share in self.shares] == held
        assert sum(held) <= BUDGET
        assert self.whole.committed == sum(max(each, self.whole.floor) for each in held) <= BUDGET

    @invariant()
    def quotas_and_lanes(self):
        active = [share for share in self.shares if share.active]
        assert self.whole.active == len(active)
        for share in self.shares:
            assert share.quota >= share.floor
            assert share.lanes >= 1
            if not share.active:
                assert share.quota == share.floor
        assert sum(share.quota for share in self.shares) <= BUDGET
        assert sum(share.lanes for share in active) <= max(self.whole.pace.lanes, len(active))

    @invariant()
    def no_dead_end(self):
        """An empty share can always take its floor; with nothing held at all, its whole quota too."""
        for share in self.shares:
            if not share.held:
                refused = share.refused
                assert share.fits(share.floor)
                if not any(map(sum, self.pieces)):
                    assert share.fits(share.quota)
                assert share.refused == refused


TestAllotment = AllotmentMachine.TestCase


def test_a_channel_alone_has_everything():
    share = allotment(1).share()
    assert (share.floor, share.quota) == (BUDGET, BUDGET)
    assert share.fits(BUDGET)
    assert not share.fits(BUDGET + 1)
    assert share.lanes == LANES


def test_the_only_channel_that_is_read_has_more_than_half():
    whole = allotment(2)
    read, unread = whole.share(), whole.share()
    read.activate(active=True)
    assert (read.quota, unread.quota) == (75, 25)
    assert read.lanes == LANES
    unread.activate(active=True)
    assert (read.quota, unread.quota) == (50, 50)
    assert (read.lanes, unread.lanes) == (4, 4)


def test_what_was_taken_while_alone_is_missing_from_nobodys_floor():
    """A reader that comes has its floor at once, and its equal part when the other has delivered."""
    whole = allotment(2)
    early, late = whole.share(), whole.share()
    told = []
    late.on_room = lambda: told.append("late")
    early.activate(active=True)
    early.take(75)
    late.activate(active=True)
    assert late.fits(25)
    late.take(25)
    assert not late.fits(10)
    assert told == []
    early.give(10)
    assert told == ["late"]
    assert late.fits(10)


def test_a_lane_more_is_offered_and_one_that_is_no_more_is_not():
    """A channel has as many lanes as it has, whatever the others leave; only the limit of all gives more."""
    whole = allotment(2, lanes=2)
    one, other = whole.share(), whole.share()
    told = []
    other.on_room = lambda: told.append("other")
    other.activate(active=True)
    one.activate(active=True)
    other.begin()
    assert not other.lane_free()
    one.begin()
    one.end()
    assert told == []
    one.begin()
    whole.pace.lanes = 4
    one.end()
    assert told == ["other"]


def test_a_refused_channel_is_looked_at_when_there_is_something_for_it():
    """Of a thousand channels each looked again whenever a request ended: 9 s of CPU for their end alone."""
    count = 1000
    whole = allotment(count, lanes=64, budget=2 * count)
    shares = [whole.share() for _ in range(count)]
    looks = []
    for share in shares:
        share.on_room = lambda: looks.append(1)
        share.take(1)
        share.begin()
        assert not share.lane_free()
        assert not share.fits(1)
    for share in shares:
        share.end()
        share.give(1)
    assert not looks


def test_no_more_members_than_agreed():
    whole = allotment(1)
    whole.share()
    with pytest.raises(ValueError, match="for 1 channels"):
        whole.share()


@pytest.mark.parametrize(("budget", "members"), [(0, 1), (1, 0), (-1, 1)])
def test_an_allotment_of_nothing_is_refused(budget, members):
    with pytest.raises(ValueError, match="needs a budget"):
        allotment(members, budget=budget)


def test_a_budget_that_changes():
    """Raised, it is there at once for those refused; lowered, nothing is taken until enough is given."""
    whole = allotment(1)
    share = whole.share()
    told = []
    share.on_room = lambda: told.append(share.fits(50))
    share.take(100)
    assert not share.fits(50)
    whole.change_budget(200)
    assert told == [True]
    whole.change_budget(60)
    assert not share.fits(1)
    share.give(60)
    assert share.fits(20)
    assert not share.fits(21)
    assert whole.least_budget == 4
    with pytest.raises(ValueError, match="at least 4 bytes"):
        whole.change_budget(3)


def test_the_least_budget_holds_a_part_in_whole_buffers():
    """Lowered to it, a part of 64 KiB could never be admitted, and the channel ended with ValueError."""
    pace = Pace(1, 64 * KIB, fixed_part=True)
    whole = Allotment(8 * MIB, pace, members=2, unit=BUFFER_SIZE)
    stages = MemoryStages(whole.share(), BufferPool())
    whole.change_budget(whole.least_budget)
    ref = ObjectRef("b", "k", 64 * KIB, "e")
    assert stages.share.fits(stages.room(Part(0, ref, 0, 64 * KIB, 0)))


def test_lanes_that_change():
    whole = allotment(1, lanes=2)
    share = whole.share()
    for _ in range(2):
        share.begin()
    assert not share.lane_free()
    whole.change_lanes(3)
    assert share.lane_free()
    whole.change_lanes(None)
    assert (whole.pace.lanes, whole.pace.fixed) == (3, False)
