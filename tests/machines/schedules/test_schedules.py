"""The first seeds of the search, and that a seed is a run.

More of them: `python -m tests.machines schedules`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
from typing import Any, get_args

import pytest

from streamer.schedule.budget import ChannelQuota
from tests.kit.virtual import Hang, virtual
from tests.machines.machine import Ticket, home
from tests.machines.pool import run_cases
from tests.machines.report import Report
from tests.machines.schedules.run import Broken, run_trial
from tests.machines.schedules.trial import FAULTS, Action, SeedTrial

SEEDS = range(24)
AGAIN = range(1, 24, 6)
"""Seeds that a second process runs, with other hashes of strings and other addresses of objects."""


@pytest.mark.timeout(180)
def test_no_order_of_events_breaks_a_promise_and_a_seed_is_a_run() -> None:
    traces: list[dict[Ticket, str]] = [{}, {}]
    report = Report("schedules")
    for trace, seeds in zip(traces, (SEEDS, AGAIN), strict=True):
        for outcome in run_cases(home("schedules"), seeds, workers=1, trace=True):
            report.add(outcome)
            trace[outcome.ticket] = outcome.trace
    assert not report.broken, report
    ends = {name for name in report.counts if name.startswith("epoch ")}
    assert ends == {"epoch whole", "epoch left", "epoch error"}
    assert sum(count for name, count in report.counts.items() if name.startswith("retry ")) > 20
    assert report.counts["hedge won"] > 0
    for seed, again in traces[1].items():
        assert again == traces[0][seed] != "", f"seed {seed} is another run"


def test_seeds_draw_every_fault_and_action() -> None:
    """What no seed draws is not searched."""
    drawn = [SeedTrial.draw(seed) for seed in range(400)]
    assert {kind for trial in drawn for kind in trial.faults} == {*FAULTS}
    actions = {what for trial in drawn for _, what in trial.actions}
    assert actions == {*get_args(Action)}
    assert {each.when_failed for trial in drawn for each in trial.channels} == {"hold", "close"}
    shared = [trial.shared for trial in drawn if trial.shared is not None]
    assert {(each.ranks > 1, each.copies > 1, each.shuffle is None) for each in shared} == {
        *itertools.product((False, True), repeat=3)
    }
    assert {each.workers for each in shared} == {1, 2, 3}


async def wake_order() -> tuple[Any, ...]:
    """The order in which two sockets that are ready together are told."""
    loop = asyncio.get_running_loop()
    reported, done = [], loop.create_future()

    def noticed(name: int, sock: socket.socket) -> None:
        reported.append(name)
        loop.remove_reader(sock.fileno())
        if len(reported) == 2:
            done.set_result(None)

    with contextlib.ExitStack() as stack:
        for name in range(2):
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            theirs.send(b"x")
            loop.add_reader(ours.fileno(), noticed, name, ours)
        await done
    return tuple(reported)


def test_the_order_of_readiness_is_drawn_and_calls_stay_in_order() -> None:
    orders = set()
    for seed in range(20):
        with virtual(seed) as loop:
            orders.add(loop.run_until_complete(wake_order()))
    assert orders == {(0, 1), (1, 0)}
    with virtual(1) as loop:
        called: list[int] = []
        for number in range(5):
            loop.call_soon(called.append, number)
        loop.run_until_complete(asyncio.sleep(1e6))  # and takes no time
        assert called == [0, 1, 2, 3, 4]


def test_a_low_water_mark_is_heeded_on_a_pair() -> None:
    async def wait() -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            epoll = select.epoll()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 3)
            epoll.register(ours.fileno(), select.EPOLLIN)
            found = []
            for _ in range(2):
                theirs.send(b"ab")
                found.append(epoll.poll(0))
            epoll.close()
            return found, ours.fileno()

    with virtual(1) as loop:
        found, _ = loop.run_until_complete(wait())
    assert [len(each) for each in found] == [0, 1]


def test_a_run_without_end_is_a_finding() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with virtual(1) as loop, pytest.raises(Hang, match="nothing is left to wait for"):
        loop.run_until_complete(wait())


def test_a_byte_of_room_that_is_not_given_back_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is judged: what holds breaks as soon as the product does."""
    run_trial(SeedTrial.draw(0))
    give = ChannelQuota.give
    monkeypatch.setattr(
        ChannelQuota, "give", lambda quota, reserved_bytes: give(quota, max(0, reserved_bytes - 1))
    )
    with pytest.raises(Broken, match="at its end|hangs"):
        run_trial(SeedTrial.draw(0))
