"""Room and lanes, shared by the channels of a process. Pure and synchronous.

Room. Every channel has a floor that nobody else can take: half of an equal part, or all if it is alone.
The rest goes to those whose reader is there, in equal parts. A channel whose reader sleeps keeps what it
holds, which is no more than such a part; one that waits for its reader holds its floor at the most. So a
channel that is read alone has nearly everything, and one whose reader arrives has its floor at once and
its part as soon as the others have delivered.

Lanes are shared in equal parts too, but need no floor: a lane that waits for a sleeping reader asks
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

    from streamer.schedule.concurrency import Pace


class Allotment:
    """`budget` bytes of room, and the lanes that `pace` allows, for `members` channels."""

    def __init__(
        self,
        budget: int,
        pace: Pace,
        *,
        members: int = 1,
        hedging: Hedging | None = None,
        unit: int = 1,
    ) -> None:
        """`unit`: bytes of the buffers that parts are read into; a part takes whole ones."""
        if budget <= 0 or members <= 0:
            raise ValueError("an allotment needs a budget and a member")
        self.pace = pace
        self.hedging = hedging or Hedging(0)
        self.members = members
        self._unit = unit
        self.bandwidth = Bandwidth()
        """Of all channels together."""
        self.active = 0
        """Channels whose reader is there."""
        self._shares: list[Share] = []
        self._without_lane: dict[Share, None] = {}
        """Refused a request; first come, first served."""
        self._without_quota: dict[Share, int] = {}
        """Refused so much room by their own quota."""
        self._without_room: dict[Share, int] = {}
        """Refused so much room, because others hold it."""
        self._least_lanes = (0, 0)
        """Of `_lanes_each`, the least since they were last offered."""
        self._settle(budget)

    def __repr__(self) -> str:
        return f"<Allotment {self.committed}/{self.budget} bytes, {self.active} active, {self.pace}>"

    def share(self) -> Share:
        """A channel's. Raises ValueError for more than `members` of them."""
        if len(self._shares) == self.members:
            raise ValueError(f"the allotment is for {self.members} channels")
        share = Share(self)
        self._shares.append(share)
        return share

    def _settle(self, budget: int) -> None:
        self.budget = budget
        self.floor = budget if self.members == 1 else budget // (2 * self.members)
        self.committed = sum(max(share.held, self.floor) for share in self._shares)
        """Bytes that are held, or kept free for those below their floor."""
        self.committed += (self.members - len(self._shares)) * self.floor

    @property
    def least_budget(self) -> int:
        """Bytes below which a part that is already cut might fit no more."""
        largest = -(-self.pace.largest_part // self._unit) * self._unit
        return largest * (1 if self.members == 1 else 2 * self.members)

    def change_budget(self, budget: int) -> None:
        """Another budget from now on. Raises ValueError if it is below `least_budget`."""
        if budget < self.least_budget:
            raise ValueError(f"the budget must be at least {self.least_budget} bytes")
        self._settle(budget)
        self._offer_quotas(None)

    def change_lanes(self, lanes: int | None) -> None:
        """As many lanes as that from now on; None: as many as suit."""
        self.pace.fix_lanes(lanes)
        self.offer_lanes(None)

    def activated(self, giver: Share, *, active: bool) -> None:
        """A channel's reader has come, or gone: the quotas and lanes of the others are smaller, or larger."""
        self.active += 1 if active else -1
        self.offer_lanes(giver)
        self._offer_quotas(giver)

    @property
    def _lanes_each(self) -> tuple[int, int]:
        """Lanes of a channel whose reader is there, and of one whose reader is not."""
        lanes = self.pace.lanes
        return max(1, lanes // max(1, self.active)), max(1, lanes // self.members)

    def refuse(self, share: Share, room: int | None) -> None:
        """Note what `share` is refused: so many bytes of room, or a request."""
        if room is None:
            self._without_lane[share] = None
            read, unread = self._lanes_each
            self._least_lanes = min(self._least_lanes[0], read), min(self._least_lanes[1], unread)
        elif share.held + room > share.quota:
            self._without_quota[share] = room
        else:
            self._without_room[share] = room

    def _forget(self, share: Share) -> None:
        self._without_lane.pop(share, None)
        self._without_quota.pop(share, None)
        self._without_room.pop(share, None)

    def is_refused(self, share: Share) -> bool:
        """Whether something was refused that the share is still to be told of."""
        return share in self._without_lane or share in self._without_quota or share in self._without_room

    def offer_lanes(self, giver: Share | None) -> None:
        """Let those that were refused a request try again, if there are more for each now."""
        least, self._least_lanes = self._least_lanes, self._lanes_each
        if any(now > before for now, before in zip(self._least_lanes, least, strict=True)):
            for share in [share for share in self._without_lane if share.in_flight < share.lanes]:
                self._tell(share, giver)

    def _offer_quotas(self, giver: Share | None) -> None:
        """Let those that were refused room by their quota try again, if it is large enough now."""
        for share in [
            share for share, room in self._without_quota.items() if share.held + room <= share.quota
        ]:
            self._tell(share, giver)
        self._offer_room(giver)

    def returned(self, giver: Share) -> None:
        """Others may have room that a share held beyond its floor."""
        if self._without_room and self.committed < self.budget:
            self._offer_room(giver)

    def _offer_room(self, giver: Share | None) -> None:
        for share, room in list(self._without_room.items()):
            if share.allows(room):
                self._tell(share, giver)

    def _tell(self, share: Share, giver: Share | None) -> None:
        if share is not giver and self.is_refused(share):
            self._forget(share)
            if share.on_room is not None:
                share.on_room()


class Share:
    """One channel's part."""

    def __init__(self, whole: Allotment) -> None:
        self._whole = whole
        self.bandwidth = Bandwidth()
        """Of this channel alone."""
        self.held = 0
        """Bytes of room."""
        self.in_flight = 0
        """Lanes in use."""
        self.active = False
        """Whether the channel's reader is there."""
        self.on_room: Callable[[], None] | None = None
        """Called when what was refused may be had."""

    def __repr__(self) -> str:
        return f"<Share {self.held}/{self.quota} bytes, {self.in_flight}/{self.lanes} lanes>"

    @property
    def pace(self) -> Pace:
        return self._whole.pace

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
    def quota(self) -> int:
        """Bytes that this channel may hold now."""
        whole = self._whole
        if not self.active:
            return whole.floor
        waiting = whole.members - whole.active
        return max(whole.floor, (whole.budget - waiting * whole.floor) // whole.active)

    @property
    def lanes(self) -> int:
        """Requests that this channel may have in flight now."""
        whole = self._whole
        return max(1, whole.pace.lanes // (whole.active if self.active else whole.members))

    def activate(self, *, active: bool) -> None:
        """The channel's reader has come, or gone."""
        if active != self.active:
            self.active = active
            self._whole.activated(self, active=active)

    def landed(self, now: float, *, received: int, first_byte: float, seconds: float) -> None:
        """A request has ended well, as `Pace.landed` and `Hedging.landed` want to know."""
        self.pace.landed(now, received=received, first_byte=first_byte, seconds=seconds)
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
        self._whole.pace.starved(seconds / max(1, self._whole.active))

    def lane_free(self) -> bool:
        """Whether a request may begin."""
        if self.in_flight < self.lanes:
            return True
        self.pace.full()
        self._whole.refuse(self, None)
        return False

    def begin(self) -> None:
        """A request begins."""
        self.in_flight += 1

    def end(self) -> None:
        """A request has ended."""
        self.in_flight -= 1
        self._whole.offer_lanes(self)

    def fits(self, room: int) -> bool:
        """Whether `room` more bytes may be taken."""
        if self.allows(room):
            return True
        self._whole.refuse(self, room)
        return False

    def allows(self, room: int) -> bool:
        """As `fits`, for somebody who asks on behalf of this share."""
        whole, after = self._whole, self.held + room
        if after <= whole.floor:
            return True
        return after <= self.quota and whole.committed + after - max(self.held, whole.floor) <= whole.budget

    def take(self, room: int) -> None:
        """Take what fits."""
        self._hold(self.held + room)

    def give(self, room: int) -> None:
        """Give back."""
        before = self._whole.committed
        self._hold(self.held - room)
        if self._whole.committed < before:
            self._whole.returned(self)

    def _hold(self, after: int) -> None:
        floor = self._whole.floor
        self._whole.committed += max(after, floor) - max(self.held, floor)
        self.held = after
