"""Room and requests, shared by the channels of a process. Pure and synchronous.

Room. Every channel has a floor that nobody else can take: half of an equal part, or all if it is alone.
The rest goes to those whose reader is there, in equal parts. A channel whose reader sleeps keeps what it
holds, which is no more than such a part; one that waits for its reader holds its floor at the most. So a
channel that is read alone has nearly everything, and one whose reader arrives has its floor at once and
its part as soon as the others have delivered.

Requests are shared in equal parts too, but need no floor: a request that waits for a sleeping reader asks
nothing of the server, so it does not count against those that are read.

A channel that is refused is told when it may try again, and only then: when its own limit has grown, or when
others have given back the room that it lacks. With a thousand channels, a look at each of them whenever a
request ends cost more than the requests.

Bandwidth is limited for each channel and for all together, where it is limited at all.

Invariants (held by property tests): the sum of what is held never exceeds the budget; a channel below its
floor is never refused. A budget that is lowered while channels run holds from when what is held has been
delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.schedule.bandwidth import Bandwidth
from streamer.schedule.hedging import Hedging

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.schedule.concurrency import ConcurrencyController


class MemoryBudget:
    """`budget` bytes of room, and the requests that `concurrency` allows, for `members` channels."""

    def __init__(
        self,
        budget: int,
        concurrency: ConcurrencyController,
        *,
        members: int = 1,
        hedging: Hedging | None = None,
        unit: int = 1,
    ) -> None:
        """`unit`: bytes of the buffers that parts are read into; a part takes whole ones."""
        if budget <= 0 or members <= 0:
            raise ValueError("an allotment needs a budget and a member")
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
        """Refused a request; first come, first served."""
        self._without_quota: dict[ChannelQuota, int] = {}
        """Refused so much room by their own quota."""
        self._without_room: dict[ChannelQuota, int] = {}
        """Refused so much room, because others hold it."""
        self._least_requests = (0, 0)
        """Of `_requests_each`, the least since they were last offered."""
        self._settle(budget)

    def __repr__(self) -> str:
        return (
            f"<MemoryBudget {self.committed}/{self.budget} bytes, {self.active} active, {self.concurrency}>"
        )

    def quota(self) -> ChannelQuota:
        """A channel's. Raises ValueError for more than `members` of them."""
        if len(self._quotas) == self.members:
            raise ValueError(f"the allotment is for {self.members} channels")
        quota = ChannelQuota(self)
        self._quotas.append(quota)
        return quota

    def _settle(self, budget: int) -> None:
        self.budget = budget
        self.floor = budget if self.members == 1 else budget // (2 * self.members)
        self.committed = sum(max(quota.reserved_bytes, self.floor) for quota in self._quotas)
        """Bytes that are held, or kept free for those below their floor."""
        self.committed += (self.members - len(self._quotas)) * self.floor

    @property
    def least_budget(self) -> int:
        """Bytes below which a part that is already cut might fit no more."""
        largest = -(-self.concurrency.largest_part // self._unit) * self._unit
        return largest * (1 if self.members == 1 else 2 * self.members)

    def change_budget(self, budget: int) -> None:
        """Another budget from now on. Raises ValueError if it is below `least_budget`."""
        if budget < self.least_budget:
            raise ValueError(f"the budget must be at least {self.least_budget} bytes")
        self._settle(budget)
        self._offer_quotas(None)

    def change_requests(self, requests: int | None) -> None:
        """As many requests as that from now on; None: as many as suit."""
        self.concurrency.fix_limit(requests)
        self.offer_requests(None)

    def activated(self, giver: ChannelQuota, *, active: bool) -> None:
        """A channel's reader has come, or gone: the quotas and requests of the others are smaller, or
        larger.
        """
        self.active += 1 if active else -1
        self.offer_requests(giver)
        self._offer_quotas(giver)

    @property
    def _requests_each(self) -> tuple[int, int]:
        """Ranks of a channel whose reader is there, and of one whose reader is not."""
        requests = self.concurrency.limit
        return max(1, requests // max(1, self.active)), max(1, requests // self.members)

    def refuse(self, quota: ChannelQuota, count: int | None) -> None:
        """Note what `quota` is refused: so many bytes of room, or a request."""
        if count is None:
            self._without_request[quota] = None
            read, unread = self._requests_each
            self._least_requests = min(self._least_requests[0], read), min(self._least_requests[1], unread)
        elif quota.reserved_bytes + count > quota.byte_limit:
            self._without_quota[quota] = count
        else:
            self._without_room[quota] = count

    def _forget(self, quota: ChannelQuota) -> None:
        self._without_request.pop(quota, None)
        self._without_quota.pop(quota, None)
        self._without_room.pop(quota, None)

    def is_refused(self, quota: ChannelQuota) -> bool:
        """Whether something was refused that the share is still to be told of."""
        return quota in self._without_request or quota in self._without_quota or quota in self._without_room

    def offer_requests(self, giver: ChannelQuota | None) -> None:
        """Let those that were refused a request try again, if there are more for each now."""
        least, self._least_requests = self._least_requests, self._requests_each
        if any(now > before for now, before in zip(self._least_requests, least, strict=True)):
            for quota in [
                quota for quota in self._without_request if quota.requests_in_flight < quota.requests_limit
            ]:
                self._tell(quota, giver)

    def _offer_quotas(self, giver: ChannelQuota | None) -> None:
        """Let those that were refused room by their quota try again, if it is large enough now."""
        for quota in [
            quota
            for quota, count in self._without_quota.items()
            if quota.reserved_bytes + count <= quota.byte_limit
        ]:
            self._tell(quota, giver)
        self._offer_room(giver)

    def returned(self, giver: ChannelQuota) -> None:
        """Others may have room that a share held beyond its floor."""
        if self._without_room and self.committed < self.budget:
            self._offer_room(giver)

    def _offer_room(self, giver: ChannelQuota | None) -> None:
        for quota, count in list(self._without_room.items()):
            if quota.allows(count):
                self._tell(quota, giver)

    def _tell(self, quota: ChannelQuota, giver: ChannelQuota | None) -> None:
        if quota is not giver and self.is_refused(quota):
            self._forget(quota)
            if quota.on_available is not None:
                quota.on_available()


class ChannelQuota:
    """One channel's part."""

    def __init__(self, whole: MemoryBudget) -> None:
        self._whole = whole
        self.bandwidth = Bandwidth()
        """Of this channel alone."""
        self.reserved_bytes = 0
        """Bytes of room."""
        self.requests_in_flight = 0
        """Ranks in use."""
        self.active = False
        """Whether the channel's reader is there."""
        self.on_available: Callable[[], None] | None = None
        """Called when what was refused may be had."""

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
        """Bytes of room of all channels together."""
        return self._whole.budget

    @property
    def floor(self) -> int:
        """Bytes that are never refused."""
        return self._whole.floor

    @property
    def refused(self) -> bool:
        """Whether something was refused that this channel is still to be told of."""
        return self._whole.is_refused(self)

    @property
    def byte_limit(self) -> int:
        """Bytes that this channel may hold now."""
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
        """The channel's reader has come, or gone."""
        if active != self.active:
            self.active = active
            self._whole.activated(self, active=active)

    def landed(self, now: float, *, received: int, first_byte: float, seconds: float) -> None:
        """A request has ended well, as `ConcurrencyController.landed` and `Hedging.landed` want to know."""
        self.concurrency.landed(now, received=received, first_byte=first_byte, seconds=seconds)
        self.hedging.landed(received=received, first_byte=first_byte, seconds=seconds)

    def wait(self, now: float) -> float:
        """Seconds that limits of bandwidth hold delivery back; 0 for none."""
        return max(self.bandwidth.wait(now), self._whole.bandwidth.wait(now))

    def sent(self, count: int, now: float) -> None:
        """So many bytes have been delivered."""
        self.bandwidth.sent(count, now)
        self._whole.bandwidth.sent(count, now)

    @property
    def limited(self) -> bool:
        """Whether there is a limit of bandwidth."""
        return self.bandwidth.limit is not None or self._whole.bandwidth.limit is not None

    def starved(self, seconds: float) -> None:
        """The channel's reader has waited for storage so long."""
        self._whole.concurrency.starved(seconds / max(1, self._whole.active))

    def may_request(self) -> bool:
        """Whether a request may begin."""
        if self.requests_in_flight < self.requests_limit:
            return True
        self.concurrency.full()
        self._whole.refuse(self, None)
        return False

    def begin(self) -> None:
        """A request begins."""
        self.requests_in_flight += 1

    def end(self) -> None:
        """A request has ended."""
        self.requests_in_flight -= 1
        self._whole.offer_requests(self)

    def fits(self, count: int) -> bool:
        """Whether `count` more bytes may be taken."""
        if self.allows(count):
            return True
        self._whole.refuse(self, count)
        return False

    def allows(self, count: int) -> bool:
        """As `fits`, for somebody who asks on behalf of this share."""
        whole, after = self._whole, self.reserved_bytes + count
        if after <= whole.floor:
            return True
        return (
            after <= self.byte_limit
            and whole.committed + after - max(self.reserved_bytes, whole.floor) <= whole.budget
        )

    def take(self, count: int) -> None:
        """Take what fits."""
        self._hold(self.reserved_bytes + count)

    def give(self, count: int) -> None:
        """Give back."""
        before = self._whole.committed
        self._hold(self.reserved_bytes - count)
        if self._whole.committed < before:
            self._whole.returned(self)

    def _hold(self, after: int) -> None:
        floor = self._whole.floor
        self._whole.committed += max(after, floor) - max(self.reserved_bytes, floor)
        self.reserved_bytes = after
