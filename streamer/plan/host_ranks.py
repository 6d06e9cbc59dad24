"""The ranks of one channel on one host: what their plans share. `streamer.plan.record_plan` has the plans.

    objects, RecordTable, order, deal ─▶ one walk over an epoch ─▶ bytes of every rank, positions on the way
                                     └─▶ digest of the order     the same on all hosts, for any N of ranks

The walk takes seconds for millions of records, so its sums are cached for the last few epochs.
"""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING, Any

from streamer.errors import ConfigError
from streamer.plan.digest import Digests
from streamer.plan.epoch_cache import EpochCache
from streamer.plan.order_columns import sum_columns
from streamer.plan.order_sums import OrderSums, sum_order
from streamer.plan.shards import Shard
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.plan.entries import Entries
    from streamer.plan.order_sums import OnPiece
    from streamer.plan.record_order import Deal, Order
    from streamer.plan.record_table import RecordTable

POSITIONS_EVERY = 1 << 13
"""Runs of the order and slices of ranks between two stored positions: a resume walks over so many in some ten
milliseconds."""

MOST_FILLED = 100_000
"""Records that may always fill up an epoch; more are at most as many as the epoch has. So sums and walks over
the order take at most twice as long as without, or a second or two."""


class HostRanks:
    """The ranks of one channel on this host: objects, order, deal, and the totals of every rank."""

    def __init__(
        self,
        entries: Entries,
        table: RecordTable,
        order: Order,
        deal: Deal,
        *,
        positions_every: int = POSITIONS_EVERY,
    ) -> None:
        """`deal`: of all ranks of this host.

        Raises ConfigError if no rank would have a step, or if a step would repeat the order very often.
        """
        self.entries = entries
        self.table = table
        self.order = order
        self.deal = deal
        self._positions_every = positions_every
        self._sums = EpochCache[OrderSums]()
        self._described: dict[str, Any] | None = None
        self._lock = threading.Lock()
        """Held by the thread that computes totals or the digest, so that others do not compute them too."""
        if 0 < order.records < deal.global_batch and deal.remainder == "drop":
            raise ConfigError(
                f"the channel has {counted(order.records, 'record')}, fewer than one global batch of "
                f"{deal.global_batch}; lower Batch or GlobalBatch, or set Remainder: repeat"
            )
        filled = deal.steps(order.records) * deal.global_batch - order.records
        if filled > (most := max(order.records, MOST_FILLED)):
            raise ConfigError(
                f"the channel has {counted(order.records, 'record')}, and Remainder: {deal.remainder} would "
                f"fill a global batch of {deal.global_batch} with {filled} more; lower Batch or GlobalBatch, "
                f"to a global batch of at most {order.records + most}"
            )

    def sums(self, epoch: int) -> OrderSums:
        """Return the bytes that the ranks of this host have in the epoch, and before some steps of it."""
        key = self.order.key(epoch)
        sums = self._sums.get(key)
        if sums is None:
            with self._lock:
                sums = self._sums.get(key)
                if sums is None:
                    sums = self._sums.put(key, self.sum_up(epoch, self.deal))
        return sums

    def sum_up(self, epoch: int, deal: Deal, on_piece: OnPiece | None = None) -> OrderSums:
        """Compute the sums of some of these ranks in the epoch."""
        order, every, found = self.order, self._positions_every, None
        if on_piece is None:
            found = sum_columns(order, epoch, table=self.table, deal=deal, positions_every=every)
        return found or sum_order(
            order,
            epoch,
            entries=self.entries,
            table=self.table,
            deal=deal,
            positions_every=every,
            on_piece=on_piece,
        )

    @property
    def order_digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the global batches of every epoch."""
        return str(self.described_order["digest"])

    @property
    def described_order(self) -> dict[str, Any]:
        """The digest of the order, and its inputs but the records of each object."""
        if self._described is None:
            with self._lock:
                if self._described is None:
                    self._described = self._describe()
        return self._described

    def _describe(self) -> dict[str, Any]:
        whole = Shard()
        digests = Digests(self.entries, seed=None, shards=[whole], join=None)
        arranged: dict[str, Any] = {
            "objects": digests.of(whole, len(self.entries)),
            "format": self.table.record_format,
            "global_batch": self.deal.global_batch,
            "remainder": self.deal.remainder,
        } | self.order.arranged
        digest = hashlib.sha256(b"penstock records 1\n" + json.dumps(arranged).encode() + b"\n")
        digest.update(b"".join(self.order.lines()))
        return {"digest": digest.hexdigest()} | arranged
