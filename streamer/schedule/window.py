"""Decides which parts are requested now. Pure and synchronous.

Parts come from one iterator over all epochs, in delivery order. The window admits a part when the channel's
quota has a request and the bytes for it. Admitted parts form a queue; the first is the *head of line*, the
only part that may be delivered. `reserved_bytes` returns the bytes that a part reserves, which depend on the
transport. The bytes are returned when the part is delivered, the request when it ends.

The iterator yields None while the plan's next entry is unknown (`streamer.plan.growth`). Then the window is
`dry`, and draws again at the next `admit`. It drops the parts of an abandoned epoch as they become known.

While a reader waits for the first byte of the stream, at most `FIRST_REQUESTS` are in flight: sending more
at the same time would delay that byte.

Parts of later epochs than the current one may reserve a quarter of the quota: enough that the next epoch's
reader finds bytes ready, and little to throw away if no reader comes.

Invariants, held by property tests: reserved bytes never exceed the quota; parts are delivered in the
iterator's order, each byte once; if no part is admitted and parts are left, one can be admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streamer.plan import Part
from streamer.schedule.budget import ChannelQuota

MOST_REQUESTS_EACH = 16
"""Maximum requests in flight for one part: enough that small objects overlap."""

FIRST_REQUESTS = 8
"""Maximum requests in flight before the first byte: few cost little CPU time, and one of several is early."""


@dataclass(slots=True, eq=False)
class Slot:
    """An admitted part, its reserved bytes, and the progress of its request and delivery."""

    part: Part
    reserved_bytes: int
    delivered: int = 0
    has_request: bool = True
    """Whether its request takes some of the channel's quota."""
    requests: int = 1
    """Requests of the channel's quota that the part takes while it is in flight."""


class Window:
    """Admits parts of `parts` within `quota`, of which it is the only user."""

    def __init__(
        self,
        parts: Iterator[Part | None],
        quota: ChannelQuota,
        *,
        reserved_bytes: Callable[[Part], int] = lambda part: part.size,
    ) -> None:
        self.quota = quota
        self.last_epoch = -1
        """Last epoch whose parts may be admitted."""
        self.begun = False
        """Whether a byte is delivered, or a request has ended."""
        self._reserve = reserved_bytes
        self._parts = parts
        self._abandoned = -1
        """Last epoch whose parts are dropped."""
        self._next: Part | None = None
        """Part to admit next, if it is drawn."""
        self._slots: deque[Slot] = deque()
        self._reserved_by_epoch: dict[int, int] = {}
        """Reserved bytes by epoch."""

    def __repr__(self) -> str:
        return f"<Window {len(self._slots)} parts, {self.quota}>"

    @property
    def head_of_line(self) -> Slot | None:
        """Slot of the part to deliver next; None if it is not admitted."""
        return self._slots[0] if self._slots else None

    def slot(self, index: int) -> Slot | None:
        """Return the slot of the part to deliver after `index` others; None if it is not admitted."""
        return self._slots[index] if index < len(self._slots) else None

    def admit(self) -> list[Slot]:
        """Admit and return the parts to request now; reserve the bytes and a request for each.

        Raises ValueError if a part can never fit the quota.
        """
        admitted = []
        while (part := self._peek()) is not None:
            requests = self._requests_for(part)
            if part.epoch > self.last_epoch or not self.quota.may_request(requests):
                break
            if self._delaying and self.quota.requests_in_flight + requests > FIRST_REQUESTS:
                break
            reserved_bytes = self._reserve(part)
            if self._too_far_ahead(part, reserved_bytes):
                break
            if not self.quota.fits(reserved_bytes):
                if not self._slots:
                    raise ValueError(f"a part of {reserved_bytes} bytes can never fit {self.quota}")
                break
            slot = Slot(part, reserved_bytes, requests=requests)
            self._slots.append(slot)
            admitted.append(slot)
            self.quota.take(reserved_bytes)
            self.quota.begin(slot.requests)
            self._reserved_by_epoch[part.epoch] = self._reserved_by_epoch.get(part.epoch, 0) + reserved_bytes
            self._next = None
        return admitted

    @property
    def _delaying(self) -> bool:
        """Whether many requests would delay the first byte, for which a reader waits."""
        return not self.begun and self.quota.active

    def _requests_for(self, part: Part) -> int:
        """Return how many requests a part that is admitted now may have in flight.

        A part of several ranges waits until all are free: with few, it would be late at the head of line.
        """
        if part.requests <= 1:
            return 1
        limit = self.quota.requests_limit
        most = min(limit, FIRST_REQUESTS) if self._delaying else limit
        return min(part.requests, MOST_REQUESTS_EACH, most)

    def _peek(self) -> Part | None:
        """Return the part to admit next, if it is known."""
        if (part := self._next) is None:
            part = next(self._parts, None)
            while part is not None and part.epoch <= self._abandoned:
                part = next(self._parts, None)
            self._next = part
        return part

    @property
    def dry(self) -> bool:
        """Whether every known part is delivered."""
        return not self._slots and self._peek() is None

    def _too_far_ahead(self, part: Part, reserved_bytes: int) -> bool:
        if not self._slots or part.epoch == (current := self._slots[0].part.epoch):
            return False
        ahead = sum(reserved for epoch, reserved in self._reserved_by_epoch.items() if epoch > current)
        return ahead + reserved_bytes > max(self.quota.byte_limit // 4, reserved_bytes)

    def _gone(self, slot: Slot) -> None:
        """Return the slot's reserved bytes."""
        epoch = slot.part.epoch
        self._reserved_by_epoch[epoch] -= slot.reserved_bytes
        if not self._reserved_by_epoch[epoch]:
            del self._reserved_by_epoch[epoch]
        self.quota.give(slot.reserved_bytes)

    def landed(self, slot: Slot) -> None:
        """Return the slot's request, which has ended with or without success, to the quota."""
        if slot.has_request:
            slot.has_request, self.begun = False, True
            self.quota.end(slot.requests)

    def requests_ended(self, slot: Slot, count: int) -> None:
        """Return `count` of the slot's requests to the quota; at least one goes on."""
        if slot.has_request:
            slot.requests -= count
            self.begun = True
            self.quota.end(count)

    def relaunch(self, slot: Slot) -> None:
        """Note that the slot is requested again; the head of line may exceed the request limit."""
        slot.has_request = True
        self.quota.begin(slot.requests)

    def deliver(self, count: int) -> Slot | None:
        """Note that `count` more bytes of the head of line are delivered; return its slot if it is done.

        Raises ValueError if they exceed the part.
        """
        slot = self._slots[0]
        slot.delivered += count
        self.begun = True
        if slot.delivered > slot.part.size:
            raise ValueError(f"delivered {slot.delivered} bytes of {slot.part}")
        if slot.delivered < slot.part.size:
            return None
        self._slots.popleft()
        self._gone(slot)
        return slot

    def close(self) -> list[Slot]:
        """Admit no further part; return the dropped slots, whose requests the caller cancels."""
        self._next, self._parts = None, iter(())
        return self.abandon(self.last_epoch)

    def abandon(self, epoch: int) -> list[Slot]:
        """Drop the rest of `epoch` and of earlier epochs; return the dropped slots, as `close`."""
        dropped = []
        while self._slots and self._slots[0].part.epoch <= epoch:
            slot = self._slots.popleft()
            self._gone(slot)
            self.landed(slot)
            dropped.append(slot)
        self._abandoned = max(self._abandoned, epoch)
        if self._next is not None and self._next.epoch <= epoch:
            self._next = None
        return dropped
