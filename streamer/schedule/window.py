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
from itertools import chain

from streamer.plan import Part
from streamer.schedule.budget import ChannelQuota

MOST_REQUESTS_EACH = 16
"""Maximum requests in flight for one span: enough that small objects overlap."""

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
    stands_in: bool = False
    """Whether the part belongs to an object that replaces a planned one."""
    requests: int = 1
    """Requests of the channel's quota that the part takes while it is in flight."""


class Window:
    """Admits parts of `parts` within `quota`, of which it is the only user."""

    def __init__(
        self,
        parts: Iterator[Part | None],
        quota: ChannelQuota,
        *,
        reserved_bytes: Callable[[Part], int] = len,
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
        self._replacement: Iterator[Part] = iter(())
        """Remaining parts of an object that replaces a planned one."""
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

        A span waits until all of them are free: with few, it would be late at the head of line.
        """
        if part.requests == 1:
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
        if slot.delivered > len(slot.part):
            raise ValueError(f"delivered {slot.delivered} bytes of {slot.part}")
        if slot.delivered < len(slot.part):
            return None
        self._slots.popleft()
        if (part := next(self._replacement, None)) is None:
            self._gone(slot)
        else:
            self._slots.appendleft(Slot(part, slot.reserved_bytes, has_request=False, stands_in=True))
        return slot

    def object_at_head(self) -> list[Slot]:
        """Return the admitted parts of the object whose first part is the head of line."""
        found = []
        for slot in self._slots:
            found.append(slot)
            if slot.part.ends_object or slot.stands_in:  # replacement parts are admitted one at a time
                break
        return found

    def replace_head(self, parts: Iterator[Part], *, reserved_bytes: int = 0) -> tuple[int, list[Slot]]:
        """Replace the object whose first part is the head of line by `parts`; no parts: skip the object.

        Return the object's bytes in the plan (meaningless if it is a replacement already), and the dropped
        slots, whose requests the caller cancels. The new parts are admitted one at a time, without a request
        (`has_request` is false). Each reserves `reserved_bytes`, or the old head's bytes if those are more.
        If they do not fit, the last admitted parts are put back and admitted again later.
        """
        head = self._slots[0]
        count, ended = 0, head.stands_in
        dropped = self.object_at_head()
        for slot in dropped:
            self._slots.popleft()
            self.landed(slot)
            if slot is not head:
                self._gone(slot)
            count, ended = count + len(slot.part), ended or slot.part.ends_object
        while not ended and (following := self._peek()) is not None:
            count, ended, self._next = count + len(following), following.ends_object, None
        self._replacement = parts
        if (part := next(parts, None)) is None:
            self._gone(head)
            return count, dropped
        if (more := reserved_bytes - head.reserved_bytes) > 0:
            dropped += self._put_back(more)
            self.quota.take(more)
            self._reserved_by_epoch[part.epoch] += more
        self._slots.appendleft(
            Slot(part, max(reserved_bytes, head.reserved_bytes), has_request=False, stands_in=True)
        )
        return count, dropped

    def _put_back(self, reserved_bytes: int) -> list[Slot]:
        """Put back the last admitted parts until `reserved_bytes` more fit; return their slots."""
        dropped: list[Slot] = []
        while self._slots and not self.quota.fits(reserved_bytes):
            slot = self._slots.pop()
            self._gone(slot)
            self.landed(slot)
            dropped.append(slot)
        again = [slot.part for slot in reversed(dropped)]
        if self._next is not None:
            again.append(self._next)
            self._next = None
        self._parts = chain(again, self._parts)
        return dropped

    def close(self) -> list[Slot]:
        """Admit no further part; return the dropped slots, whose requests the caller cancels."""
        self._next, self._parts = None, iter(())
        return self.abandon(self.last_epoch)

    def abandon(self, epoch: int) -> list[Slot]:
        """Drop the rest of `epoch` and of earlier epochs; return the dropped slots, as `close`."""
        dropped = []
        self._replacement = iter(())
        while self._slots and self._slots[0].part.epoch <= epoch:
            slot = self._slots.popleft()
            self._gone(slot)
            self.landed(slot)
            dropped.append(slot)
        self._abandoned = max(self._abandoned, epoch)
        if self._next is not None and self._next.epoch <= epoch:
            self._next = None
        return dropped
