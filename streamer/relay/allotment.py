"""Room and lanes, shared by the channels of a process. Pure and synchronous.

Room. Every channel has a floor that nobody else can take: half of an equal part, or all if it is alone.
The rest goes to those whose reader is there, in equal parts. A channel whose reader sleeps keeps what it
holds, which is no more than such a part; one that waits for its reader holds its floor at the most. So a
channel that is read alone has nearly everything, and one whose reader arrives has its floor at once and
its part as soon as the others have delivered.

Lanes are shared in equal parts too, but need no floor: a lane that waits for a sleeping reader asks
nothing of the server, so it does not count against those that are read.

Bandwidth is limited for each channel and for all together, where it is limited at all.

Invariants (held by property tests): the sum of what is held never exceeds the budget; a channel below its
floor is never refused. A budget that is lowered while channels run holds from when what is held has been
delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.relay.bandwidth import Bandwidth
from streamer.relay.hedge import Hedging

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.relay.pace import Pace


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
        self.offer(None)

    def change_lanes(self, lanes: int | None) -> None:
        """As many lanes as that from now on; None: as many as suit."""
        self.pace.fix_lanes(lanes)
        self.offer(None)

    def offer(self, giver: Share | None) -> None:
        """Let those that were refused try again."""
        for share in self._shares:
            if share.refused and share is not giver:
                share.refused = False
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
        self.refused = False
        """Whether something was refused that others may free."""
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
            self._whole.active += 1 if active else -1
            self._whole.offer(self)

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
        self.refused = True
        return False

    def begin(self) -> None:
        """A request begins."""
        self.in_flight += 1

    def end(self) -> None:
        """A request has ended."""
        self.in_flight -= 1
        self._whole.offer(self)

    def fits(self, room: int) -> bool:
        """Whether `room` more bytes may be taken."""
        whole, after = self._whole, self.held + room
        if after <= whole.floor:
            return True
        if after <= self.quota and whole.committed + after - max(self.held, whole.floor) <= whole.budget:
            return True
        self.refused = True
        return False

    def take(self, room: int) -> None:
        """Take what fits."""
        self._hold(self.held + room)

    def give(self, room: int) -> None:
        """Give back."""
        self._hold(self.held - room)
        self._whole.offer(self)

    def _hold(self, after: int) -> None:
        floor = self._whole.floor
        self._whole.committed += max(after, floor) - max(self.held, floor)
        self.held = after
