"""The log of the channels while they stream: ended epochs, failures with their remedies, and waits.

    EpochLog        the events of one channel, which it reports itself
    remind          FIFOs of failed channels that are held open: their trainer waits until an operator acts,
                    and operators read the end of a log
    log_held_back   FIFOs that other FIFOs of their stream wait for. A program that reads the FIFO of one
                    rank to its end before it opens that of the next one waits for ever: the stream begins an
                    epoch when each FIFO has a reader
    watch_storage   channels whose requests fail, while their trainers wait for bytes. The log has no line
                    for a request
    watch_trainers  channels whose trainers take no byte of a full FIFO for `GiveUpAfter` seconds

All but the first are tasks of the job, and run until cancelled.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sidecar.observe.bottleneck import STUCK_REMEDY, Sample, diagnose
from sidecar.process.logs import WaitLog, log
from streamer.errors import Expired, SinkError
from streamer.relay.channel_spec import ChannelEvents
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.index.learning import IndexLearner
    from sidecar.observe.state import JobState
    from streamer.plan import ObjectRef
    from streamer.relay.channel import Channel
    from streamer.relay.channel_state import FifoFate
    from streamer.relay.statistics import EpochRequests
    from streamer.trailer import Trailer

FATES: dict[FifoFate, str] = {"held": "held open", "closed": "closed"}
"""Log texts for the state of a failed epoch's FIFO."""
REMIND_EVERY = 300.0
"""Seconds between two reminders about a FIFO."""
HELD_BACK_AFTER = 20.0
"""Seconds for which a reader waits for other FIFOs before the log names them. The processes of a job open
their FIFOs within some seconds of each other."""


class EpochLog(ChannelEvents):
    """The observer of one channel, which writes the log lines of its FIFO `name`."""

    def __init__(self, state: JobState, name: str, learner: IndexLearner | None) -> None:
        """`learner`: learns the record index of the FIFO's channel."""
        self._state = state
        self._name = name
        self._learner = learner
        self._before: Sample | None = None
        """Sample at the end of the epoch before."""

    def unverifiable(self, ref: ObjectRef) -> None:
        log.warning(
            "not compared: S3 stores no checksum of the whole object, or the epoch was resumed within it; "
            "logged once for each channel",
            channel=self._name,
            object=f"s3://{ref.bucket}/{ref.key}",
        )

    def shortage(self, error: SinkError) -> None:
        log.warning("waiting for this machine", channel=self._name, error=str(error))

    def fifo_replaced(self, path: str) -> None:
        log.warning(
            "the FIFO was removed or replaced before its reader came, and is offered again",
            channel=self._name,
            path=path,
            do="let no other program remove or make FIFOs of channels",
        )

    def end_believed(self, epoch: int, offset: int) -> None:
        log.warning(
            "the reader left at the end of an object, before the end of the epoch",
            channel=self._name,
            epoch=epoch,
            offset=offset,
            do=self._state.unjoined.get(self._name) or "read the trainer's log: it may have crashed",
        )

    def epoch_ended(self, trailer: Trailer, requests: EpochRequests) -> None:
        failed = trailer.state == "failed"
        (log.error if failed else log.info)(
            f"epoch {trailer.state}",
            channel=trailer.channel,
            epoch=trailer.epoch,
            delivered=decimal_bytes(trailer.bytes_delivered),
            **({} if trailer.bytes_total is None else {"of": decimal_bytes(trailer.bytes_total)}),
            **self._figures(requests),
            **({"error": trailer.error} if trailer.error else {}),
            **(self._failure() if failed else {}),
        )
        if failed:
            self._state.failed.set()
        if self._learner is not None:
            self._learner.epoch_ended(trailer)

    def _figures(self, requests: EpochRequests) -> dict[str, Any]:
        """Return the figures of an ended epoch: since the end of the one before it, without idle time."""
        now = Sample.of(self._state.channels[self._name].statistics(), time.monotonic())
        before, self._before = self._before, now
        if before is None:
            before = Sample.beginning(now.at - sum(now.seconds.values()))
        spent = {state: now.seconds[state] - before.seconds[state] for state in now.seconds}
        seconds = sum(spent.values()) - spent["idle"]
        written = now.written - before.written
        return {
            "seconds": round(seconds, 1),
            "mb_per_second": round(written / seconds / 1e6, 1) if seconds > 0 else 0.0,
            "waited_for_storage": round(spent["starved"], 1),
            "waited_for_trainer": round(spent["blocked"], 1),
            "requests": requests.ended,
            "retries": requests.repeated,
            "summary": diagnose(before, now, when="the epoch").text,
        }

    def _failure(self) -> dict[str, Any]:
        """Return the log fields of a failed epoch: error context, state of the FIFO, remedy."""
        channel = self._state.channels[self._name]
        failure = channel.failure
        if failure is None:
            return {}
        context = {} if isinstance(failure.error, SinkError) else asdict(failure.error.context)
        return {name: value for name, value in context.items() if value is not None} | {
            "fifo": FATES[failure.fifo],
            "do": self._state.advice(channel),
        }


async def remind(state: JobState) -> None:
    """Log every FIFO that is held, each `REMIND_EVERY` seconds."""
    while True:
        await asyncio.sleep(REMIND_EVERY)
        for name, channel in state.channels.items():
            failure = channel.failure
            if failure is not None and failure.fifo == "held":
                log.error(
                    "still held",
                    channel=name,
                    seconds=round(time.monotonic() - failure.at),
                    error=str(failure.error),
                    do=state.advice(channel),
                )


async def log_held_back(channels: Mapping[str, Channel]) -> None:
    """Log which FIFOs a reader has waited for in `HELD_BACK_AFTER` seconds, and repeat it."""
    seen: dict[tuple[str, ...], dict[str, int]] = {}
    """By FIFOs that hold others back, those that wait for them, and the bytes that each has had."""
    due: dict[tuple[str, ...], float] = {}
    while True:
        await asyncio.sleep(HELD_BACK_AFTER / 4)
        now, found = time.monotonic(), _held_back(channels)
        for by, waiting in found.items():
            # A FIFO that has had a byte since was not held back all of that time.
            if not waiting.items() & seen.get(by, {}).items():
                due[by] = now + HELD_BACK_AFTER
            elif now >= due[by]:
                due[by] = now + REMIND_EVERY
                log.warning(
                    "held back",
                    by=list(by),
                    waiting=list(waiting),
                    why="FIFOs of one stream are filled in turn, and these are full or have no reader",
                    do="read them at the same time as the others; if the program reads rank after rank, set "
                    "Fetch: separately in Ranks",
                )
        seen = found


def _held_back(channels: Mapping[str, Channel]) -> dict[tuple[str, ...], dict[str, int]]:
    """Return, by FIFOs that hold others back, the empty FIFOs that wait for them, and their bytes so far."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for name, channel in channels.items():
        if by := channel.held_back_by:
            now = channel.statistics()
            if not now.fifo_bytes:
                found.setdefault(by, {})[name] = now.written_bytes
    return found


async def watch_storage(state: JobState) -> None:
    """Log the channels that wait for storage.

    Since the last snapshot, requests of such a channel have failed, and no request has succeeded.
    """
    before: dict[str, tuple[int, int, float]] = {}
    """By channel, requests that succeeded and that failed, and the seconds that delivery waited for bytes."""
    waits: dict[str, tuple[float, WaitLog]] = {}
    """By channel that waits, since when, and the log of the wait."""
    while True:
        for name, now in state.statistics().items():
            ended, starved = now.counts["requests"], now.seconds["starved"]
            ok = ended["ok"]
            failed = ended.total() - ok - ended["cancelled"]
            ok_before, failed_before, starved_before = before.get(name, (0, 0, 0.0))
            before[name] = ok, failed, starved
            if ok > ok_before:
                if name in waits:
                    seconds = round(time.monotonic() - waits.pop(name)[0])
                    log.info("storage responds again", channel=name, seconds=seconds)
            elif failed > failed_before and starved > starved_before and now.errors and not now.error:
                if name not in waits:
                    wait = WaitLog(give_up_after=state.job.penstock.give_up_after, channel=name)
                    waits[name] = time.monotonic(), wait
                last = now.errors[-1]
                expired = last.kind == Expired.kind
                waits[name][1].note(Expired.awaited if expired else "storage", last.text)
        await state.history.following()


async def watch_trainers(state: JobState) -> None:
    """Log the channels whose trainers take no byte, once for each pause, and its end."""
    stuck: set[str] = set()
    while True:
        for name in state.channels:
            untaken = state.history.untaken(name)
            if name not in stuck and untaken >= state.job.penstock.give_up_after:
                stuck.add(name)
                log.warning(
                    "the trainer takes no byte", channel=name, seconds=round(untaken), do=STUCK_REMEDY
                )
            elif name in stuck and not untaken:
                stuck.remove(name)
                log.info("the trainer takes bytes again", channel=name)
        await state.history.following()
