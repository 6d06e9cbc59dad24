"""Logs how the plan of one channel is made: progress, waits for storage, the plan, and odd objects."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sidecar.observe.state import PlanningStep
from sidecar.process.logs import WaitLog, log
from sidecar.records.endmarks import channel_advice, end_mark_advice, unjoined, warn_of_strays
from sidecar.records.line_ends import remedy, without_line_feed
from streamer.plan.record_plan import RecordPlan

if TYPE_CHECKING:
    from typing import Self

    from sidecar.config.request import ChannelConfig
    from sidecar.observe.state import JobState
    from streamer.errors import SourceError
    from streamer.plan import Growth, Plan
    from streamer.s3.client.session import Clients

PROGRESS_EVERY = 10.0
"""Seconds between log lines while a plan is made."""


class PlanningLog:
    """The log lines of one channel's plan, and its entry in `JobState.planning`.

    A context manager: while its block runs, the plan is being made, and a timer of the event loop logs how
    far it is every `PROGRESS_EVERY` seconds, whether it advances or not.
    """

    def __init__(self, state: JobState, channel: ChannelConfig) -> None:
        self._state = state
        self._channel = channel
        self._name = channel.channel_name
        self._source = ", ".join(map(str, channel.sources))
        prefix = channel.source.s3_data_type == "S3Prefix"
        self._step = PlanningStep("listing" if prefix else "manifest")
        self._waits = WaitLog(give_up_after=state.job.penstock.give_up_after, channel=self._name)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._state.planning[self._name] = self._step
        self._begin_timer()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._state.planning.pop(self._name, None)

    def _begin_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY, self._report)

    def _report(self) -> None:
        self._begin_timer()
        log.info("planning", channel=self._name, doing=self._step.doing, entries=self._step.entries)

    def progress(self, entries: int) -> None:
        """Note the number of entries so far."""
        self._step.entries, self._step.waiting = entries, ""

    def record_index(self) -> None:
        """Note that all entries are known, and the record index is read and compared with the objects."""
        self._step.doing, self._step.waiting = "record index", ""

    def digest(self) -> None:
        """Note that all entries are known, and the digest is computed."""
        self._step.doing, self._step.waiting = "digest", ""

    def waiting(self, error: SourceError) -> None:
        """Note and log that storage or credentials are unavailable."""
        self._step.waiting = f"waiting for {error.awaited}: {error}"
        self._waits.waiting(error)

    def listing(self, plan: Plan) -> None:
        """Log that the channel streams `plan`, which is open, while its listing goes on."""
        log.info(
            "listing goes on",
            channel=self._name,
            source=self._source,
            objects=plan.objects(0),
        )

    def listing_failed(self, growth: Growth) -> None:
        """Log that the listing of an open plan has failed."""
        log.error("listing failed", channel=self._name, objects=growth.known, error=str(growth.error))

    def planned(self, whole: Plan, epoch: int = 0) -> None:
        """Log the plan of the channel on this host. `epoch`: its first one."""
        state, name = self._state, self._name
        ranks = {"ranks": len(state.job.fifos(self._channel))} if name in state.job.ranks else {}
        log.info(
            "planned",
            channel=name,
            source=self._source,
            objects=whole.objects(epoch),
            bytes=whole.total_bytes(epoch),
            digest=whole.digest[:16],
            **ranks,
            **figures_by_record(whole),
        )
        warn_of_strays(whole.strays, advice=channel_advice, channel=name)

    def end_marks(self, whole: Plan) -> None:
        """Warn of objects with end marks, after which a program may stop reading."""
        if (form := unjoined(self._channel, whole)) is None:
            return
        do = end_mark_advice(self._channel, form)
        self._state.unjoined |= dict.fromkeys(self._state.job.fifos(self._channel), do)
        log.warning("objects carry end marks", channel=self._name, format=form, do=do)

    async def line_ends(self, whole: Plan, clients: Clients) -> None:
        """Warn of objects of text that do not end with a line feed, by a sample."""
        if (ref := await without_line_feed(self._channel, whole.refs(0), clients)) is None:
            return
        self._state.unjoined |= dict.fromkeys(self._state.job.fifos(self._channel), "")
        log.warning(
            "an object does not end with a line feed",
            channel=self._name,
            object=f"s3://{ref.bucket}/{ref.key}",
            do=remedy(),
        )


def figures_by_record(plan: Plan) -> dict[str, Any]:
    """Return records, steps, padding, all ranks, and digest of the order; nothing for ranks of objects."""
    if not isinstance(plan, RecordPlan):
        return {}
    return {
        "records": plan.records(0),
        "steps": plan.steps,
        "padding": plan.padding,
        "all_ranks": plan.deal.ranks,
        "order": plan.order_digest[:16],
    }
