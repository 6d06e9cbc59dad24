"""Logs that storage fails while a trainer waits for bytes, and that it responds again.

The log has no line for a request. A channel waits for storage if, since the last snapshot, requests have
failed, no request has succeeded, and delivery has waited for bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.process.logs import log
from sidecar.process.wait_log import WaitLog

if TYPE_CHECKING:
    from sidecar.observe.state import JobState
    from streamer.relay.statistics import ChannelStatistics


@dataclass(frozen=True, slots=True)
class _Seen:
    """The requests of a channel at a snapshot."""

    ok: int
    failed: int
    starved: float

    @classmethod
    def of(cls, statistics: ChannelStatistics) -> _Seen:
        ended = statistics.counts["requests"]
        ok, cancelled = ended["ok"], ended["cancelled"]
        return cls(ok, ended.total() - ok - cancelled, statistics.seconds["starved"])


class _ChannelWatch:
    """The waits of one channel."""

    def __init__(self, name: str, *, give_up_after: float) -> None:
        self._name = name
        self._give_up_after = give_up_after
        self._before = _Seen(0, 0, 0.0)
        self._log: WaitLog | None = None
        """Log of the wait; None while storage responds."""
        self._since = 0.0

    def look(self, statistics: ChannelStatistics) -> None:
        """Compare the channel with its last snapshot."""
        before, now = self._before, _Seen.of(statistics)
        self._before = now
        if now.ok > before.ok:
            if self._log is not None:
                seconds = round(time.monotonic() - self._since)
                log.info("storage responds again", channel=self._name, seconds=seconds)
            self._log = None
        elif now.failed > before.failed and now.starved > before.starved and statistics.errors:
            if self._log is None:
                self._since = time.monotonic()
                self._log = WaitLog(give_up_after=self._give_up_after, channel=self._name)
            self._log.failed(statistics.errors[-1].text)


async def watch_storage(state: JobState) -> None:
    """Log the waits of all channels until cancelled."""
    watches: dict[str, _ChannelWatch] = {}
    give_up_after = state.job.penstock.give_up_after
    while True:
        for name, statistics in state.statistics().items():
            if name not in watches:
                watches[name] = _ChannelWatch(name, give_up_after=give_up_after)
            watches[name].look(statistics)
        await state.history.following()
