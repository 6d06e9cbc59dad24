"""Requests and part size against simulated servers, on a simulated clock."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest

from streamer.schedule.concurrency import (
    BUSY,
    FIRST_HOLD,
    INFLATED,
    LARGEST_PART,
    LONGEST_HOLD,
    QUIET,
    SMALLEST_PART,
    ConcurrencyController,
)
from streamer.units import MIB

PART = 4 * MIB


@dataclass(frozen=True)
class Server:
    """What limits it: the network (bytes per second, shared equally by all bodies), one connection, or its
    workers, beyond which first bytes are late."""

    first_byte: float = 0.025
    connection: float = 90e6
    network: float = 1e15
    workers: float = 1e15
    spread: float = 0.0
    """How far lengths of bodies differ from the mean, as a part of it; without, requests keep step."""

    def first(self, requests_in_flight: int) -> float:
        return self.first_byte * max(1.0, requests_in_flight / self.workers) ** 2

    def rate(self, bodies: int) -> float:
        return min(self.connection, self.network / bodies)


class World:
    """A closed loop: as many requests in flight as the pace allows, each followed by another.

    All bodies move at one rate, so they end in the order of `_moved`, what a body there from the beginning
    would have got by now, plus their length.
    """

    def __init__(
        self, concurrency: ConcurrencyController, server: Server, *, now: float = 0.0, seed: int = 1
    ) -> None:
        self.concurrency = concurrency
        self.server = server
        self.now = now
        self.received = 0
        self.peak = concurrency.limit
        self.limits: list[tuple[float, int]] = [(now, concurrency.limit)]
        self._moved = 0.0
        self._count = itertools.count()
        self._asked: list[tuple[float, int, float]] = []
        self._bodies: list[tuple[float, int, int, float, float]] = []
        self._chance = random.Random(seed)

    def run(
        self,
        until: float,
        *,
        full: bool = True,
        starved: bool = True,
        unread: bool = False,
        storm: bool = False,
    ) -> None:
        """Let requests go on until this moment; in a storm each one that ends is refused."""
        while self.now < until:
            while (requests_in_flight := len(self._asked) + len(self._bodies)) < self.concurrency.limit:
                first = self.server.first(requests_in_flight + 1)
                heapq.heappush(self._asked, (self.now + first, next(self._count), self.now))
            if full:
                self.concurrency.full(unread=unread)
            answer = self._asked[0][0] if self._asked else until
            rate = self.server.rate(len(self._bodies) or 1)
            ending = self.now + (self._bodies[0][0] - self._moved) / rate if self._bodies else until
            then = min(answer, ending, until)
            self._moved += (then - self.now) * rate
            if starved:
                self.concurrency.starved(then - self.now)
            self.now = then
            if then == until:
                return
            if answer <= ending:
                at, number, asked = heapq.heappop(self._asked)
                length = int(PART * self._chance.uniform(1 - self.server.spread, 1 + self.server.spread))
                heapq.heappush(self._bodies, (self._moved + length, number, length, asked, at - asked))
                continue
            _, _, length, asked, first = heapq.heappop(self._bodies)
            self._end(length, asked, first, storm=storm)

    def _end(self, length: int, asked: float, first: float, *, storm: bool) -> None:
        if storm:
            self.concurrency.throttled(self.now)
        else:
            self.concurrency.landed(self.now, received=length, first_byte=first, seconds=self.now - asked)
            self.received += length
        if self.concurrency.limit != self.limits[-1][1]:
            self.limits.append((self.now, self.concurrency.limit))
        self.peak = max(self.peak, self.concurrency.limit)


LATENCY_BOUND = Server()
"""More connections, more throughput."""


@pytest.mark.parametrize("worth", [0.0, 0.4])
def test_requests_grow_while_throughput_follows(worth: float) -> None:
    concurrency = ConcurrencyController(4, PART, worth=worth)
    World(concurrency, LATENCY_BOUND).run(20)
    assert concurrency.limit == 256


@pytest.mark.parametrize("server", [LATENCY_BOUND, Server(connection=9e9)], ids=["by trial", "at once"])
@pytest.mark.parametrize("busy", [0.85, 0.95])
def test_no_requests_are_added_while_the_process_itself_is_the_limit(server: Server, busy: float) -> None:
    """From 16 requests on its thread works so much of the time; without that, any number would be taken."""

    def worked() -> float:
        write_ends = [*[since for since, _ in world.limits[1:]], world.now]
        return sum(
            (end - since) * (busy if limit >= 16 else 0.5)
            for end, (since, limit) in zip(write_ends, world.limits, strict=True)
        )

    concurrency = ConcurrencyController(4, PART, worked=worked)
    world = World(concurrency, server)
    world.run(20)
    assert concurrency.limit == (256 if busy < BUSY else 16)


def test_requests_never_exceed_the_most() -> None:
    concurrency = ConcurrencyController(4, PART, most=50)
    world = World(concurrency, LATENCY_BOUND)
    world.run(20)
    assert concurrency.limit == world.peak == 50


@pytest.mark.parametrize("unwanted", [{"full": False}, {"starved": False}])
def test_requests_do_not_grow_without_need(unwanted: dict[str, bool]) -> None:
    """Requests that are not all taken, or a delivery that never waits, ask for no more."""
    concurrency = ConcurrencyController(4, PART)
    world = World(concurrency, LATENCY_BOUND)
    world.run(20, **unwanted)
    assert world.peak == 4


def test_a_vain_trial_is_reverted_and_the_next_waits_longer() -> None:
    concurrency = ConcurrencyController(8, PART)
    world = World(concurrency, Server(first_byte=0.002, connection=1e9, network=1e9))
    world.run(300)
    begun = [at for at, limit in world.limits if limit > 8]
    ended = [at for at, limit in world.limits[1:] if limit == 8]
    assert {limit for _, limit in world.limits} == {8, 10, 16}  # the first doubles, later ones add a quarter
    waits = [later - end for end, later in zip(ended, begun[1:], strict=False)]
    assert len(waits) >= 6
    for number, wait in enumerate(waits):
        due = min(LONGEST_HOLD, FIRST_HOLD * 2**number)
        assert due <= wait <= due + 1


@pytest.mark.parametrize(("worth", "kept"), [(0.1, True), (0.4, False)])
def test_a_gain_must_be_worth_its_requests(worth: float, kept: bool) -> None:
    """A sixth more throughput for twice the requests."""
    concurrency = ConcurrencyController(2, PART, worth=worth)
    world = World(concurrency, Server(first_byte=0.0001, connection=430e6, network=1e9))
    world.run(100)
    changes = [*world.limits, (100.0, concurrency.limit)]
    held = {limit for (at, limit), (until, _) in itertools.pairwise(changes) if until - at > FIRST_HOLD / 2}
    assert (max(held) > 2) == kept
    assert world.peak > 2


def test_requests_that_wait_more_than_they_carry_double_at_once() -> None:
    """100 kB at 25 ms: no trial is needed, so a few round trips are enough."""
    concurrency = ConcurrencyController(64, PART)
    world = World(concurrency, Server(connection=40e9))
    world.run(0.2)
    assert concurrency.limit == 256


@pytest.mark.parametrize(("server", "limit"), [(Server(connection=40e9), 256), (LATENCY_BOUND, 64)])
def test_requests_that_wait_double_before_a_reader_comes(server: Server, limit: int) -> None:
    concurrency = ConcurrencyController(64, PART)
    World(concurrency, server).run(0.2, starved=False, unread=True)
    assert concurrency.limit == limit


def test_slowdown_before_a_reader_comes_ends_the_doubling() -> None:
    concurrency = ConcurrencyController(8, PART)
    world = World(concurrency, Server(connection=40e9))
    world.run(0.12, starved=False, unread=True)
    reached = concurrency.limit
    concurrency.throttled(world.now)
    assert concurrency.limit == reached // 2 > 8
    world.run(0.5, starved=False, unread=True)
    assert concurrency.limit == reached // 2


def test_requests_that_wait_do_not_double_where_first_bytes_queue() -> None:
    concurrency = ConcurrencyController(8, PART)
    server = Server(first_byte=0.03, connection=40e9, workers=8)
    World(concurrency, server).run(60)
    assert concurrency.limit <= 32


def test_short_waits_of_the_delivery_ask_for_nothing() -> None:
    concurrency = ConcurrencyController(4, PART)
    world = World(concurrency, LATENCY_BOUND)
    for step in range(1, 200):
        world.run(step * 0.1 - 0.003, starved=False)
        world.run(step * 0.1)
    assert world.peak == 4


@pytest.mark.parametrize("seed", range(8))
def test_growth_stops_where_the_network_is_full(seed: int) -> None:
    """Not many more requests than the twelve or so that fill it, and nearly all of its bandwidth."""
    concurrency = ConcurrencyController(4, PART)
    world = World(concurrency, Server(network=1e9, spread=0.5), seed=seed)
    world.run(20)
    assert 12 <= concurrency.limit <= 64
    before = world.received
    world.run(40)
    assert world.received - before > 0.85 * 20 * 1e9


def test_first_bytes_that_come_much_later_stop_the_growth() -> None:
    """Bodies so quick that throughput still rises a little, while requests queue for a worker."""
    concurrency = ConcurrencyController(4, PART)
    server = Server(first_byte=0.03, connection=1e7, workers=8)
    World(concurrency, server).run(60)
    assert server.first(concurrency.limit) <= INFLATED * 0.03 * 1.5
    assert concurrency.limit < 32


def test_a_storm_halves_once_for_each_burst() -> None:
    concurrency = ConcurrencyController(64, PART)
    for delay in (10.0, 10.01, 10.3, 10.6, 10.9):  # one after the other without half a second of quiet
        concurrency.throttled(delay)
    assert concurrency.limit == 32
    concurrency.throttled(10.9 + QUIET)
    assert concurrency.limit == 16


def test_a_storm_never_takes_the_last_request() -> None:
    concurrency = ConcurrencyController(2, PART)
    for second in range(10, 30):
        concurrency.throttled(float(second))
    assert concurrency.limit == 1


@pytest.mark.parametrize("limit", [4, 16, 64, 256])
def test_ten_seconds_after_a_storm_the_limit_is_back(limit: int) -> None:
    concurrency = ConcurrencyController(limit, PART)
    world = World(concurrency, LATENCY_BOUND)
    world.run(5, starved=False)
    assert concurrency.limit == limit
    world.run(35, storm=True)
    assert 1 <= concurrency.limit <= limit // 2
    world.run(45, starved=False)
    assert concurrency.limit >= 0.95 * limit


def test_bursts_that_halve_again_and_again_are_recovered_from_too() -> None:
    """Refusals a second apart are a burst each; the limit to return to is that before the first."""
    concurrency = ConcurrencyController(64, PART)
    world = World(concurrency, LATENCY_BOUND)
    world.run(5, starved=False)
    for second in range(5, 35):
        concurrency.throttled(second + 0.001)
    assert concurrency.limit == 1
    world = World(concurrency, LATENCY_BOUND, now=35.0)
    world.run(45, starved=False)
    assert concurrency.limit >= 0.95 * 64


def test_a_storm_in_a_trial_returns_to_what_was_before_the_trial() -> None:
    concurrency = ConcurrencyController(8, PART)
    world = World(concurrency, LATENCY_BOUND)
    while concurrency.limit == 8:
        world.run(world.now + 0.01)
    assert concurrency.limit == 16
    concurrency.throttled(world.now)
    assert concurrency.limit == 8
    world.run(world.now + 10, starved=False)
    assert concurrency.limit == 8


def test_after_a_storm_the_limit_may_grow_beyond_it() -> None:
    concurrency = ConcurrencyController(8, PART)
    concurrency.throttled(1.0)
    world = World(concurrency, LATENCY_BOUND, now=1.0)
    world.run(40)
    assert concurrency.limit > 8


def test_what_is_fixed_stays() -> None:
    concurrency = ConcurrencyController(12, 3 * MIB, fixed_limit=True, fixed_part=True)
    world = World(concurrency, LATENCY_BOUND)
    world.run(10)
    world.run(12, storm=True)
    world.run(20)
    assert world.peak == concurrency.limit == 12
    assert concurrency.part_size(100 * MIB) == concurrency.part_size(1) == 3 * MIB


def learnt(*, first_byte: float, rate: float, **options: Any) -> ConcurrencyController:
    concurrency = ConcurrencyController(4, PART, **options)
    for number in range(100):
        concurrency.landed(
            number / 10, received=PART, first_byte=first_byte, seconds=first_byte + PART / rate
        )
    return concurrency


@pytest.mark.parametrize(
    ("first_byte", "rate", "size"),
    [
        (0.001, 100e6, PART),  # never smaller than it began, for a quick server
        (0.03, 100e6, 8 * MIB),  # 6 MB of body take twice the first byte
        (0.06, 100e6, 16 * MIB),
        (1.0, 1e9, LARGEST_PART),
    ],
)
def test_a_body_takes_twice_as_long_as_its_first_byte(first_byte: float, rate: float, size: int) -> None:
    assert learnt(first_byte=first_byte, rate=rate).part_size(1 << 30) == size


def test_a_part_is_no_larger_than_its_transport_wants() -> None:
    assert learnt(first_byte=1.0, rate=1e9, largest_part=8 * MIB).part_size(1 << 30) == 8 * MIB


@pytest.mark.parametrize(
    ("staging", "size"), [(4 * MIB, 4 * MIB), (4 * MIB - 1, 2 * MIB), (MIB, MIB), (1, SMALLEST_PART)]
)
def test_a_part_fits_its_stage_but_is_never_tiny(staging: int, size: int) -> None:
    assert ConcurrencyController(4, PART).part_size(staging) == size
