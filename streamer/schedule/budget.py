"""Divides memory, requests and bandwidth between the channels of a process. Pure and synchronous.

Memory. Every channel has a guaranteed minimum, its floor: half of an equal part of the budget, or all of it
for a channel that is alone. Channels with a reader share the rest equally. A channel without a reader may
reserve its floor at most; one whose reader pauses keeps what it has reserved. So a channel that is read alone
may use nearly the whole budget, and one whose reader arrives has its floor at once, and its equal part once
the other channels have delivered.

Requests. Channels share the concurrency limit equally, without a floor. Requests of a channel whose reader
pauses ask nothing of the server, so they do not count against channels that are read.

Retrying a refusal. A refused channel is called back only when it can succeed: its own limit has grown, or
other channels have returned the bytes that it lacks. Calling back a thousand channels after every request
cost more than the requests.

Bandwidth. Each channel may have a limit, and all channels together may have one.

Invariants, held by property tests: the sum of reserved bytes never exceeds the budget; a channel below its
floor is never refused. A budget that is lowered in mid-job applies once the excess has been delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.schedule.bandwidth import Bandwidth
from streamer.schedule.hedging import Hedging

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.schedule.concurrency import ConcurrencyController


class MemoryBudget:
    """`budget` bytes, and the requests that `concurrency` allows, for `members` channels."""

    def __init__(
        self,
        budget: int,
        concurrency: ConcurrencyController,
        *,
        members: int = 1,
        hedging: Hedging | None = None,
        unit: int = 1,
    ) -> None:
        """`unit`: bytes of one buffer; a part that is read into buffers reserves whole ones."""
        if budget <= 0 or members <= 0:
            raise ValueError("a memory budget needs bytes and a member")
        self.concurrency = concurrency
        self.hedging = hedging or Hedging(0)
        self.members = members
        self._unit = unit
        self.bandwidth = Bandwidth()
        """Of all channels together."""
        self.active = 0
        """Channels whose reader is there."""
        self._quotas: list[ChannelQuota] = []
        self._without_request: dict[ChannelQuota, None] = {}
        """Channels that were refused a request, in order of refusal."""
        self._without_quota: dict[ChannelQuota, int] = {}
        """Channels whose own quota refused so many bytes."""
        self._without_bytes: dict[ChannelQuota, int] = {}
        """Channels refused so many bytes that others had reserved."""
        self._least_requests = (0, 0)
        """Lowest `_requests_each` since channels were last called back."""
        self._set_budget(budget)

    def __repr__(self) -> str:
        return (
            f"<MemoryBudget {self.committed}/{self.budget} bytes, {self.active} active, {self.concurrency}>"
        )

    def quota(self) -> ChannelQuota:
        """Return the quota of one more channel. Raises ValueError beyond `members`."""
        if len(self._quotas) == self.members:
            raise ValueError(f"the allotment is for {self.members} channels")
        quota = ChannelQuota(self)
        self._quotas.append(quota)
        return quota

    def _set_budget(self, budget: int) -> None:
        self.budget = budget
        self.floor = budget if self.members == 1 else budget // (2 * self.members)
        self.committed = sum(max(quota.reserved_bytes, self.floor) for quota in self._quotas)
        """Bytes that are reserved, or kept free for channels below their floor."""
        self.committed += (self.members - len(self._quotas)) * self.floor

    @property
    def least_budget(self) -> int:
        """Least budget under which every part that is already cut still fits."""
        largest = -(-self.concurrency.largest_part // self._unit) * self._unit
        return largest * (1 if self.members == 1 else 2 * self.members)

    def change_budget(self, budget: int) -> None:
        """Change the budget. Raises ValueError below `least_budget`."""
        if budget < self.least_budget:
            raise ValueError(f"the budget must be at least {self.least_budget} bytes")
        self._set_budget(budget)
        self._offer_quotas(None)

    def change_requests(self, requests: int | None) -> None:
        """Change the limit of requests in flight; None lets it adapt."""
        self.concurrency.fix_limit(requests)
        self.offer_requests(None)

    def reader_changed(self, giver: ChannelQuota, *, active: bool) -> None:
        """Note that a channel's reader has come or gone, and call back those whose limits have grown."""
        self.active += 1 if active else -1
        self.offer_requests(giver)
        self._offer_quotas(giver)

    @property
    def _requests_each(self) -> tuple[int, int]:
        """Limits of a channel with a reader, and of one without."""
        requests = self.concurrency.limit
        return max(1, requests // max(1, self.active)), max(1, requests // self.members)

    def refuse(self, quota: ChannelQuota, count: int | None) -> None:
        """Note that `quota` was refused so many bytes, or a request if None."""
        if count is None:
            self._without_request[quota] = None
            read, unread = self._requests_each
            self._least_requests = min(self._least_requests[0], read), min(self._least_requests[1], unread)
        elif quota.reserved_bytes + count > quota.byte_limit:
            self._without_quota[quota] = count
        else:
            self._without_bytes[quota] = count

    def _forget(self, quota: ChannelQuota) -> None:
        self._without_request.pop(quota, None)
        self._without_quota.pop(quota, None)
        self._without_bytes.pop(quota, None)

    def is_refused(self, quota: ChannelQuota) -> bool:
        """Whether the channel was refused and has not been called back."""
        return quota in self._without_request or quota in self._without_quota or quota in self._without_bytes

    def offer_requests(self, giver: ChannelQuota | None) -> None:
        """Call back channels that were refused a request, if each may have more now."""
        least, self._least_requests = self._least_requests, self._requests_each
        if any(now > before for now, before in zip(self._least_requests, least, strict=True)):
            for quota in [
                quota for quota in self._without_request if quota.requests_in_flight < quota.requests_limit
            ]:
                self._call_back(quota, giver)

    def _offer_quotas(self, giver: ChannelQuota | None) -> None:
        """Call back channels that their quota refused, if it is large enough now."""
        for quota in [
            quota
            for quota, count in self._without_quota.items()
            if quota.reserved_bytes + count <= quota.byte_limit
        ]:
            self._call_back(quota, giver)
        self._offer_bytes(giver)

    def returned(self, giver: ChannelQuota) -> None:
        """Call back channels that can have the bytes that `giver` has returned."""
        if self._without_bytes and self.committed < self.budget:
            self._offer_bytes(giver)

    def _offer_bytes(self, giver: ChannelQuota | None) -> None:
        for quota, count in list(self._without_bytes.items()):
            if quota.allows(count):
                self._call_back(quota, giver)

    def _call_back(self, quota: ChannelQuota, giver: ChannelQuota | None) -> None:
        if quota is not giver and self.is_refused(quota):
            self._forget(quota)
            if quota.on_available is not None:
                quota.on_available()


class ChannelQuota:
    """What one channel may use of the budget."""

    def __init__(self, whole: MemoryBudget) -> None:
        self._whole = whole
        self.bandwidth = Bandwidth()
        """Of this channel alone."""
        self.reserved_bytes = 0
        """Bytes that its parts have reserved."""
        self.requests_in_flight = 0
        """Requests that are running."""
        self.active = False
        """Whether the channel's reader is there."""
        self.on_available: Callable[[], None] | None = None
        """Called when what was refused can be had."""

    def __repr__(self) -> str:
        requests = f"{self.requests_in_flight}/{self.requests_limit} requests"
        return f"<ChannelQuota {self.reserved_bytes}/{self.byte_limit} bytes, {requests}>"

    @property
    def concurrency(self) -> ConcurrencyController:
        return self._whole.concurrency

    @property
    def hedging(self) -> Hedging:
        return self._whole.hedging

    @property
    def budget(self) -> int:
        """Bytes of all channels together."""
        return self._whole.budget

    @property
    def floor(self) -> int:
        """Bytes that are never refused."""
        return self._whole.floor

    @property
    def refused(self) -> bool:
        """Whether this channel was refused and has not been called back."""
        return self._whole.is_refused(self)

    @property
    def byte_limit(self) -> int:
        """Bytes that this channel may reserve now."""
        whole = self._whole
        if not self.active:
            return whole.floor
        waiting = whole.members - whole.active
        return max(whole.floor, (whole.budget - waiting * whole.floor) // whole.active)

    @property
    def requests_limit(self) -> int:
        """Requests that this channel may have in flight now."""
        whole = self._whole
        return max(1, whole.concurrency.limit // (whole.active if self.active else whole.members))

    def activate(self, *, active: bool) -> None:
        """Note that the channel's reader has come, or gone."""
        if active != self.active:
            self.active = active
            self._whole.reader_changed(self, active=active)

    def landed(self, now: float, *, received: int, first_byte: float, seconds: float) -> None:
        """Pass a request that has ended well on to `ConcurrencyController` and `Hedging`."""
        self.concurrency.landed(now, received=received, first_byte=first_byte, seconds=seconds)
        self.hedging.landed(received=received, first_byte=first_byte, seconds=seconds)

    def wait(self, now: float) -> float:
        """Seconds that delivery must wait for bandwidth limits; 0 for none."""
        return max(self.bandwidth.wait(now), self._whole.bandwidth.wait(now))

    def sent(self, count: int, now: float) -> None:
        """Note that `count` bytes have been delivered."""
        self.bandwidth.sent(count, now)
        self._whole.bandwidth.sent(count, now)

    @property
    def limited(self) -> bool:
        """Whether a bandwidth limit applies."""
        return self.bandwidth.limit is not None or self._whole.bandwidth.limit is not None

    def starved(self, seconds: float) -> None:
        """Note that the channel's reader waited `seconds` for storage."""
        self._whole.concurrency.starved(seconds / max(1, self._whole.active))

    def may_request(self) -> bool:
        """Whether one more request may begin; a refusal is noted."""
        if self.requests_in_flight < self.requests_limit:
            return True
        self.concurrency.full()
        self._whole.refuse(self, None)
        return False

    def begin(self) -> None:
        """Note that a request begins."""
        self.requests_in_flight += 1

    def end(self) -> None:
        """Note that a request has ended."""
        self.requests_in_flight -= 1
        self._whole.offer_requests(self)

    def fits(self, count: int) -> bool:
        """Whether `count` more bytes may be reserved; a refusal is noted."""
        if self.allows(count):
            return True
        self._whole.refuse(self, count)
        return False

    def allows(self, count: int) -> bool:
        """Whether `count` more bytes may be reserved."""
        whole, after = self._whole, self.reserved_bytes + count
        if after <= whole.floor:
            return True
        return (
            after <= self.byte_limit
            and whole.committed + after - max(self.reserved_bytes, whole.floor) <= whole.budget
        )

    def take(self, count: int) -> None:
        """Reserve `count` bytes, which fit."""
        self._hold(self.reserved_bytes + count)

    def give(self, count: int) -> None:
        """Return `count` bytes."""
        before = self._whole.committed
        self._hold(self.reserved_bytes - count)
        if self._whole.committed < before:
            self._whole.returned(self)

    def _hold(self, after: int) -> None:
        floor = self._whole.floor
        self._whole.committed += max(after, floor) - max(self.reserved_bytes, floor)
        self.reserved_bytes = after
