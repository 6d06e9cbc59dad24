"""Lists prefixes, or reads a manifest, into an open plan, which streams meanwhile (`streamer.plan.growth`).

    OpenPlan.list      one task: run after run of the sources into the growth; then complete, or failed
    OpenPlan.first     waits until an entry is known, `ended` for the end; both raise the listing's error

An error before the first entry is the listing's own. After it the epoch may have begun: the error then names
the number of objects listed, and the epoch fails with it after the last of their bytes. The event loop hashes
some entries at a time, because a thread that holds the interpreter would delay delivery for longer.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from streamer.errors import ConfigError, ErrorContext, Missing, OutOfOrder, PlanRefused, SourceError
from streamer.plan import Growth, Plan
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from streamer.plan import Arrangement, Entries, S3Uri
    from streamer.plan.strays import Strays
    from streamer.retry import RetryPolicy


class RunSource(Protocol):
    """Finds objects in runs, as `Sources` of a channel's prefixes and `Manifest` do."""

    @property
    def base(self) -> S3Uri | None:
        """See `Plan.base`. Known once the first run has come."""

    @property
    def objects_each(self) -> int:
        """Number of objects in each entry."""

    @property
    def strays(self) -> Strays | None:
        """See `Plan.strays`. Covers the objects listed so far."""

    def runs(
        self, policy: RetryPolicy, on_wait: Callable[[SourceError], None] | None = None
    ) -> AsyncGenerator[Entries, None]:
        """Yield the entries of the plan in runs, in plan order. Raises SourceError, ConfigError."""


class OpenPlan:
    """A plan of prefixes, in the order given, and the task that lists them."""

    def __init__(self, arrangement: Arrangement, sources: RunSource) -> None:
        """Raises ValueError if the arrangement needs all entries."""
        entries = arrangement.entries(objects_each=sources.objects_each)
        self.growth = Growth(entries)
        self.plan = Plan(entries, arrangement, growth=self.growth)
        self._sources = sources
        self._begun, self._ended = asyncio.Event(), asyncio.Event()

    async def list(
        self, policy: RetryPolicy, *, on_wait: Callable[[SourceError], None] | None = None
    ) -> None:
        """List the prefixes to the end, as `Sources.runs` does. The growth keeps an error."""
        growth = self.growth
        try:
            async with aclosing(self._sources.runs(policy, on_wait)) as listing:
                async for run in listing:
                    self.plan.base, self.plan.strays = self._sources.base, self._sources.strays
                    for _ in growth.add(run):
                        await asyncio.sleep(0)
                    # Not set at once: the listing may end here, and the plan is whole then.
                    asyncio.get_running_loop().call_soon(self._begun.set)
        except (SourceError, ConfigError) as error:
            growth.fail(self._while_streaming(error))
        else:
            growth.close()
        self._begun.set()
        self._ended.set()

    async def first(self) -> None:
        """Wait until an entry is known. Raises the error of a listing that has failed."""
        await self._wait(self._begun)

    async def ended(self) -> None:
        """Wait until the listing has ended. Raises its error."""
        await self._wait(self._ended)

    async def _wait(self, event: asyncio.Event) -> None:
        await event.wait()
        if self.growth.error is not None:
            raise self.growth.error

    def _while_streaming(self, error: SourceError | ConfigError) -> SourceError:
        """Return the error to fail the epoch with."""
        known, base = self.growth.known, self._sources.base
        kind: type[SourceError] = PlanRefused
        text, context = str(error), ErrorContext() if base is None else ErrorContext(*base)
        if not known and not isinstance(error, SourceError):
            return kind(text, context)
        if isinstance(error, SourceError):
            if isinstance(error, Missing) or not known:
                return error
            kind, text, context = type(error), error.message, error.context
        if kind is OutOfOrder:
            text += "; name the objects in a manifest (S3DataType: ManifestFile), which needs no order"
        found = kind(f"the listing failed after {counted(known, 'object')}: {text}", context)
        found.__cause__ = error.__cause__ or error
        return found
