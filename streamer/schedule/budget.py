"""Divides memory, requests and bandwidth between the channels of a process. Pure and synchronous.

Memory. Every channel has a guaranteed minimum, its floor: half of an equal part of the budget, or all of it
for a single channel. The rest is divided equally among the channels with a reader. A channel without a reader
may reserve at most its floor; a channel whose reader pauses keeps the bytes it has reserved. So a single
active channel may use nearly the whole budget. When a reader arrives, its channel has its floor at once, and
its equal part as soon as other channels have delivered.

Several channels may have one quota together, as long as they share a stream: floor, equal part and requests
of all of them. `split` then gives each its own. No other channel's floor changes by that.

Requests. The concurrency limit is divided equally among the channels with a reader, without a floor. Requests
of a channel whose reader pauses put no load on the server, so they do not count against the other channels.

Inflating. A part of the budget is set aside in which channels inflate objects ahead of delivery.

Refusals. A refused channel is called back only when it can succeed: its own limit has grown, or other
channels have returned the bytes that it lacks. Calling back a thousand channels after every request cost more
than the requests.

Bandwidth. Each channel may have a limit, and all channels together may have one.

Invariants, held by property tests: the sum of reserved bytes never exceeds the budget; a channel below its
floor is never refused. A budget that is lowered in mid-job applies once the excess has been delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.schedule.bandwidth import Bandwidth
from streamer.schedule.hedging import Hedging
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.schedule.concurrency import ConcurrencyController


LEAST_AHEAD, MOST_AHEAD = 4 * MIB, 16 * MIB
"""Bounds of the memory in which a channel inflates objects ahead of delivery: an eighth of its budget."""


class MemoryBudget:
    """Divides `budget` bytes, and the requests that `concurrency` allows, among `members` channels."""

    def __init__(
        self,
        budget: int,
        concurrency: ConcurrencyController,
        *,
        members: int = 1,
        hedging: Hedging | None = None,
        unit: int = 1,
        inflating: int = 0,
    ) -> None:
        """`unit`: bytes of one buffer; a part that is read into buffers reserves whole ones.

        `inflating`: number of channels that inflate objects ahead of delivery, in a part of the budget.
        """
        if budget <= 0 or members <= 0:
            raise ValueError("a memory budget needs bytes and a member")
        self.concurrency = concurrency
        self.hedging = hedging or Hedging(0)
        self.members = members
        self._unit = unit
        self._inflating = 0
        self.ahead = 0
        """Bytes in which each channel that inflates may do so ahead of delivery; parts never have them."""
        self.bandwidth = Bandwidth()
        """Bandwidth limit of all channels together."""
        self.active = 0
        """Number of channels with a reader."""
        self._quotas: dict[ChannelQuota, None] = {}
        self._unclaimed = members
        """Number of channels that have no quota yet."""
        self._without_request: dict[ChannelQuota, None] = {}
        """Channels that were refused a request, in order of refusal."""
        self._without_quota: dict[ChannelQuota, int] = {}
        """By channel that its own quota refused, the bytes refused."""
        self._without_bytes: dict[ChannelQuota, int] = {}
        """By channel that was refused because others had reserved the bytes, the bytes refused."""
        self._least_requests = (0, 0)
        """Lowest `_requests_each` since channels were last called back."""
        ahead = min(MOST_AHEAD, budget // 8 // inflating) if inflating else 0
        if ahead >= LEAST_AHEAD and budget - inflating * ahead >= self.least_budget:
            self._inflating, self.ahead = inflating, ahead
        self._set_budget(budget)

    def __repr__(self) -> str:
        return (
            f"<MemoryBudget {self.committed}/{self.budget} bytes, {self.active} active, {self.concurrency}>"
        )

    def quota(self) -> ChannelQuota:
        """Return the quota of one more channel. Raises ValueError beyond `members`."""
        if not self._unclaimed:
            raise ValueError(f"the memory budget is for {self.members} channels")
        quota = ChannelQuota(self)
        self._quotas[quota] = None
        self._unclaimed -= 1
        return quota

    def _set_budget(self, budget: int) -> None:
        self.budget = budget
        self.of_parts = budget - self._inflating * self.ahead
        """Bytes of the budget that parts may reserve."""
        self.floor = self.of_parts if self.members == 1 else self.of_parts // (2 * self.members)
        """Bytes that a channel can always reserve."""
        self.committed = sum(max(quota.reserved_bytes, self.floor) for quota in self._quotas)
        """Bytes reserved by channels, or kept free for channels below their floor."""
        self.committed += self._unclaimed * self.floor

    @property
    def least_budget(self) -> int:
        """Minimum budget, in bytes, under which every part that is already cut still fits."""
        largest = -(-self.concurrency.largest_part // self._unit) * self._unit
        parts = largest * (1 if self.members == 1 else 2 * self.members)
        return parts + self._inflating * self.ahead

    def change_budget(self, budget: int) -> None:
        """Change the budget. Raises ValueError below `least_budget`."""
        if budget < self.least_budget:
            raise ValueError(f"the budget must be at least {self.least_budget} bytes")
        self._set_budget(budget)
        self._offer_quotas(None)

    def change_requests(self, requests: int | None) -> None:
        """Fix the concurrency limit; None: adapt it."""
        self.concurrency.fix_limit(requests)
        self.offer_requests(None)

    def reader_changed(self, giver: ChannelQuota, *, active: bool) -> None:
        """Note that a channel's reader has come or gone; call back channels whose limits have grown."""
        self.active += 1 if active else -1
        self.offer_requests(giver)
        self._offer_quotas(giver)

    @property
    def _requests_each(self) -> tuple[int, int]:
        """Request limits of a channel with a reader, and of one without."""
        requests = self.concurrency.limit
        return requests // (self.active or 1) or 1, requests // self.members or 1

    def refuse(self, quota: ChannelQuota, count: int | None) -> None:
        """Note that `quota` was refused `count` bytes; None: a request."""
        if count is None:
            self._without_request[quota] = None
            (read, unread), least = self._requests_each, self._least_requests
            if read < least[0] or unread < least[1]:
                self._least_requests = min(least[0], read), min(least[1], unread)
        elif quota.reserved_bytes + count > quota.byte_limit:
            self._without_quota[quota] = count
        else:
            self._without_bytes[quota] = count

    def _forget(self, quota: ChannelQuota) -> None:
        self._without_request.pop(quota, None)
        self._without_quota.pop(quota, None)
        self._without_bytes.pop(quota, None)

    def is_refused(self, quota: ChannelQuota) -> bool:
        """Return whether the channel was refused and has not been called back."""
        return quota in self._without_request or quota in self._without_quota or quota in self._without_bytes

    def offer_requests(self, giver: ChannelQuota | None) -> None:
        """Call back channels that were refused a request, if request limits have grown."""
        least, self._least_requests = self._least_requests, self._requests_each
        if self._least_requests[0] > least[0] or self._least_requests[1] > least[1]:
            for quota in [
                quota for quota in self._without_request if quota.requests_in_flight < quota.requests_limit
            ]:
                self._call_back(quota, giver)

    def _offer_quotas(self, giver: ChannelQuota | None) -> None:
        """Call back channels that their own quota refused, if it is large enough now."""
        for quota in [
            quota
            for quota, count in self._without_quota.items()
            if quota.reserved_bytes + count <= quota.byte_limit
        ]:
            self._call_back(quota, giver)
        self._offer_bytes(giver)

    def returned(self, giver: ChannelQuota) -> None:
        """Call back channels that can reserve the bytes that `giver` has returned."""
        if self._without_bytes and self.committed < self.of_parts:
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
    """Memory, requests and bandwidth of one channel, or of the FIFOs of a shared stream."""

    def __init__(self, whole: MemoryBudget) -> None:
        self._whole = whole
        self.concurrency = whole.concurrency
        self.hedging = whole.hedging
        self.bandwidth = Bandwidth()
        """Bandwidth limit of this channel alone."""
        self.reserved_bytes = 0
        """Bytes that the channel's parts have reserved."""
        self.requests_in_flight = 0
        self.active = False
        """Whether the channel has a reader."""
        self.on_available: Callable[[], None] | None = None
        """Called when refused bytes or a refused request may be available."""

    def __repr__(self) -> str:
        requests = f"{self.requests_in_flight}/{self.requests_limit} requests"
        return f"<ChannelQuota {self.reserved_bytes}/{self.byte_limit} bytes, {requests}>"

    @property
    def budget(self) -> int:
        """Memory budget of the parts of all channels together, in bytes."""
        return self._whole.of_parts

    @property
    def ahead(self) -> int:
        """Bytes in which the channel may inflate objects ahead of delivery, if it inflates."""
        return self._whole.ahead

    @property
    def floor(self) -> int:
        """Bytes that this channel can always reserve."""
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
            return self.floor
        waiting = whole.members - whole.active
        return max(self.floor, (whole.of_parts - waiting * whole.floor) // whole.active)

    @property
    def requests_limit(self) -> int:
        """Requests that this channel may have in flight now."""
        whole = self._whole
        others = whole.active if self.active else whole.members
        return self.concurrency.limit // others or 1

    def activate(self, *, active: bool) -> None:
        """Note that the channel's reader has come or gone."""
        if active != self.active:
            self.active = active
            self._whole.reader_changed(self, active=active)

    def landed(self, now: float, *, received: int, first_byte: float, seconds: float) -> None:
        """Report a successful request to `ConcurrencyController` and `Hedging`.

        `now`: time of its end. `first_byte` and `seconds`: seconds to its first byte, and to its end.
        """
        self.concurrency.landed(now, received=received, first_byte=first_byte, seconds=seconds)
        self.hedging.landed(received=received, first_byte=first_byte, seconds=seconds)

    def throttled(self, now: float) -> None:
        """Report a request that S3 answered with SlowDown to `ConcurrencyController`."""
        self.concurrency.throttled(now)

    def wait(self, now: float) -> float:
        """Return the seconds that delivery must wait for bandwidth limits; 0: none."""
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
        self.concurrency.starved(seconds / max(1, self._whole.active))

    def may_request(self, count: int = 1) -> bool:
        """Return whether `count` more requests may begin; note a refusal."""
        if self.requests_in_flight + count <= self.requests_limit:
            return True
        self.concurrency.full(unread=not self._whole.active)
        self._whole.refuse(self, None)
        return False

    def begin(self, count: int = 1) -> None:
        """Note that `count` requests begin."""
        self.requests_in_flight += count

    def end(self, count: int = 1) -> None:
        """Note that `count` requests have ended."""
        self.requests_in_flight -= count
        self._whole.offer_requests(self)

    def fits(self, count: int) -> bool:
        """Return whether `count` more bytes may be reserved; note a refusal."""
        if self.allows(count):
            return True
        self._whole.refuse(self, count)
        return False

    def allows(self, count: int) -> bool:
        """Return whether `count` more bytes may be reserved."""
        whole, floor, after = self._whole, self.floor, self.reserved_bytes + count
        if after <= floor:
            return True
        return (
            after <= self.byte_limit
            and whole.committed + after - max(self.reserved_bytes, floor) <= whole.of_parts
        )

    def take(self, count: int) -> None:
        """Reserve `count` bytes; the caller has checked that they fit."""
        self._hold(self.reserved_bytes + count)

    def give(self, count: int) -> None:
        """Return `count` reserved bytes."""
        before = self._whole.committed
        self._hold(self.reserved_bytes - count)
        if self._whole.committed < before:
            self._whole.returned(self)

    def _hold(self, after: int) -> None:
        floor = self.floor
        self._whole.committed += max(after, floor) - max(self.reserved_bytes, floor)
        self.reserved_bytes = after
