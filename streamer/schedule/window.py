"""Decides which parts are requested now. Pure and synchronous.

Parts come from one iterator over all epochs, in delivery order. The window admits a part when the channel's
quota has a request and the bytes for it. Admitted parts form a queue; the first is the *head of line*, the
only part that may be delivered. `reserved_bytes` gives the bytes that a part reserves, which depend on the
transport: a whole part in memory, or what a kernel pipe takes of it. The bytes are returned when the part is
delivered, the request when it ends.

Parts of a later epoch than the one being delivered may reserve a quarter of the quota: enough for a reader
that turns the epoch to find bytes waiting, and little to throw away if it does not.

Invariants, held by property tests: reserved bytes never exceed the quota; parts are delivered in the
iterator's order, each byte once; whenever nothing is admitted and parts are left, one can be admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from streamer.plan import Part
from streamer.schedule.budget import ChannelQuota


@dataclass(slots=True, eq=False)
class Slot:
    """An admitted part: its room, how far its delivery is, and whether a request for it is running."""

    part: Part
    reserved_bytes: int
    delivered: int = 0
    in_flight: bool = True
    stands_in: bool = False
    """Whether it belongs to an object that replaces a planned one."""


class Window:
    """Admits parts of `parts` within `quota`, whose sole user it is."""

    def __init__(
        self, parts: Iterator[Part], quota: ChannelQuota, *, reserved_bytes: Callable[[Part], int] = len
    ) -> None:
        self.quota = quota
        self.last_epoch = -1
        """Parts of later epochs are not admitted yet."""
        self._reserve = reserved_bytes
        self._parts = parts
        self._next: Part | None = next(parts, None)
        self._slots: deque[Slot] = deque()
        self._replacement: Iterator[Part] = iter(())
        """What is still to come of an object that stands in for the one that was planned."""
        self._reserved_by_epoch: dict[int, int] = {}
        """Bytes of room by epoch."""

    def __repr__(self) -> str:
        return f"<Window {len(self._slots)} parts, {self.quota}>"

    @property
    def head_of_line(self) -> Slot | None:
        """The part to be delivered next, if it is admitted."""
        return self._slots[0] if self._slots else None

    def admit(self) -> list[Slot]:
        """The parts to request now; each has its room and a request reserved."""
        admitted = []
        while (part := self._next) is not None:
            if part.epoch > self.last_epoch or not self.quota.may_request():
                break
            reserved_bytes = self._reserve(part)
            if self._too_far_ahead(part, reserved_bytes):
                break
            if not self.quota.fits(reserved_bytes):
                if not self._slots:
                    raise ValueError(f"a part of {reserved_bytes} bytes can never fit {self.quota}")
                break
            slot = Slot(part, reserved_bytes)
            self._slots.append(slot)
            admitted.append(slot)
            self.quota.take(reserved_bytes)
            self.quota.begin()
            self._reserved_by_epoch[part.epoch] = self._reserved_by_epoch.get(part.epoch, 0) + reserved_bytes
            self._next = next(self._parts, None)
        return admitted

    def _too_far_ahead(self, part: Part, reserved_bytes: int) -> bool:
        if not self._slots or part.epoch == (current := self._slots[0].part.epoch):
            return False
        ahead = sum(reserved for epoch, reserved in self._reserved_by_epoch.items() if epoch > current)
        return ahead + reserved_bytes > max(self.quota.byte_limit // 4, reserved_bytes)

    def _gone(self, slot: Slot) -> None:
        """The slot's room is free again."""
        epoch = slot.part.epoch
        self._reserved_by_epoch[epoch] -= slot.reserved_bytes
        if not self._reserved_by_epoch[epoch]:
            del self._reserved_by_epoch[epoch]
        self.quota.give(slot.reserved_bytes)

    def landed(self, slot: Slot) -> None:
        """The slot's request has ended, well or not: its request is free."""
        if slot.in_flight:
            slot.in_flight = False
            self.quota.end()

    def relaunch(self, slot: Slot) -> None:
        """The slot's request runs once more; the head of line may do so beyond the requests."""
        slot.in_flight = True
        self.quota.begin()

    def deliver(self, count: int) -> Slot | None:
        """`count` more bytes of the head are with the reader; return the slot if that was all of it."""
        slot = self._slots[0]
        slot.delivered += count
        if slot.delivered > len(slot.part):
            raise ValueError(f"delivered {slot.delivered} bytes of {slot.part}")
        if slot.delivered < len(slot.part):
            return None
        self._slots.popleft()
        if (part := next(self._replacement, None)) is None:
            self._gone(slot)
        else:
            self._slots.appendleft(Slot(part, slot.reserved_bytes, in_flight=False, stands_in=True))
        return slot

    def object_at_head(self) -> list[Slot]:
        """The admitted parts of the object whose first part is the head."""
        found = []
        for slot in self._slots:
            found.append(slot)
            if slot.part.ends_object or slot.stands_in:  # of those, one is admitted at a time
                break
        return found

    def replace_head(self, parts: Iterator[Part], *, reserved_bytes: int = 0) -> tuple[int, list[Slot]]:
        """Put `parts` in the place of the object whose first part is the head; none leave it out.

        Returns the bytes that it had in the plan (of no meaning if the head stands in already), and the slots
        dropped, for their requests. The new parts come one at a time, each in `reserved_bytes`, or the old
        head's if that is more; where it does not fit, the last parts admitted are put back, to be admitted
        again. They are admitted without a request (`in_flight` is false).
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
        while not ended and self._next is not None:
            count, ended = count + len(self._next), self._next.ends_object
            self._next = next(self._parts, None)
        self._replacement = parts
        if (part := next(parts, None)) is None:
            self._gone(head)
            return count, dropped
        if (more := reserved_bytes - head.reserved_bytes) > 0:
            dropped += self._put_back(more)
            self.quota.take(more)
            self._reserved_by_epoch[part.epoch] += more
        self._slots.appendleft(
            Slot(part, max(reserved_bytes, head.reserved_bytes), in_flight=False, stands_in=True)
        )
        return count, dropped

    def _put_back(self, reserved_bytes: int) -> list[Slot]:
        """Until there is so much more room, take the last parts back; returns their slots."""
        dropped: list[Slot] = []
        while self._slots and not self.quota.fits(reserved_bytes):
            slot = self._slots.pop()
            self._gone(slot)
            self.landed(slot)
            dropped.append(slot)
        again = [slot.part for slot in reversed(dropped)]
        if self._next is not None:
            again.append(self._next)
        self._parts = chain(again, self._parts)
        self._next = next(self._parts, None)
        return dropped

    def close(self) -> list[Slot]:
        """Admit nothing any more; return the slots dropped, for their requests."""
        self._next = None
        return self.abandon(self.last_epoch)

    def abandon(self, epoch: int) -> list[Slot]:
        """Forget what is left of `epoch` and earlier; return the slots dropped, for their requests."""
        dropped = []
        self._replacement = iter(())
        while self._slots and self._slots[0].part.epoch <= epoch:
            slot = self._slots.popleft()
            self._gone(slot)
            self.landed(slot)
            dropped.append(slot)
        while self._next is not None and self._next.epoch <= epoch:
            self._next = next(self._parts, None)
        return dropped
