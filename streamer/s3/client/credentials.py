"""Credentials that outlast their own expiry, for streams that run for days.

botocore renews credentials that have an expiry time by the clock: those of a process, a container, an
instance, a web identity. Two things remain. A key that stands in a file has no such time, and botocore
reads the file once; and a server may refuse what the clock still allows. So when S3 refuses a request for
its credentials, the transport says so here, and before the next request the whole chain is asked again, by
a fresh session that reads its files anew. Many requests that are refused together ask once.

What the chain cannot give now it may give later (a metadata service restarts, a file is being replaced):
failing to renew is `Expired`, which the relay waits out, where having none from the start is `Denied`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from streamer.errors import Denied, Expired, PenstockError
from streamer.s3.client.faults import error_text
from streamer.secrets import quoted, remember

PAUSE = 1.0
"""Seconds between two questions to the chain, however many requests are refused."""


class LastingCredentials:
    """Stands for the session's credentials; gives all that it does not know itself from those."""

    def __init__(self, found: Any, load: Callable[[], Awaitable[Any]], *, limit: float) -> None:
        """`found`: aiobotocore's credentials. `load`: asks the chain anew. `limit`: seconds for either."""
        self._limit = limit
        self._current = found
        self._load = load
        self._lock = asyncio.Lock()
        self._stale = False
        self._loaded_at = self._failed_at = float("-inf")
        self._failure = ""
        self._known: tuple[str | None, ...] = ()

    def __repr__(self) -> str:
        return f"<LastingCredentials by {self._current.method}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current, name)

    def refused(self, asked_at: float) -> bool:
        """S3 refused a request of that time (`time.monotonic`); whether asking again may help.

        It may not where the keys stand in the environment, which nobody can change from outside.
        """
        if self._current.method == "env" and not hasattr(self._current, "refresh_needed"):
            return False
        if asked_at > self._loaded_at:
            self._stale = True
        return True

    async def get_frozen_credentials(self) -> Any:
        """Key, secret and token for one request. Raises Expired if they cannot be renewed now."""
        if time.monotonic() < self._failed_at + PAUSE:
            raise Expired(self._failure)
        try:
            if self._stale or hasattr(self._current, "refresh_needed"):
                async with asyncio.timeout(self._limit):
                    if self._stale:
                        await self._renew()
                    found = await self._current.get_frozen_credentials()
            else:
                found = await self._current.get_frozen_credentials()
        except PenstockError:
            raise
        except Exception as error:
            # Processes, files, STS, metadata services: each fails with errors of its own.
            self._failed_at = time.monotonic()
            late = f"their source did not answer in {self._limit:g} s"
            said = (
                late
                if isinstance(error, TimeoutError)
                else f"{type(error).__name__}: {quoted(error_text(error))}"
            )
            self._failure = (
                f"the credentials cannot be renewed ({said}); "
                f"see to their source, which is {self._current.method}"
            )
            raise Expired(self._failure) from error
        if (secrets := (found.access_key, found.secret_key, found.token)) != self._known:
            remember(*secrets)
            self._known = secrets
        return found

    async def _renew(self) -> None:
        async with self._lock:
            if not self._stale or time.monotonic() < self._loaded_at + PAUSE:
                return
            if time.monotonic() < self._failed_at + PAUSE:
                raise Expired(self._failure)  # somebody has just asked, while this one waited for the lock
            found = await self._load()
            if found is None:
                raise LookupError("the chain has none any more")
            self._current, self._stale, self._loaded_at = found, False, time.monotonic()


@contextlib.contextmanager
def renewing(credentials: LastingCredentials | None) -> Iterator[None]:
    """Around one request: let refused credentials be renewed before the next.

    Raises Denied in place of an Expired that waiting cannot mend.
    """
    asked_at = time.monotonic()
    try:
        yield
    except Expired as error:
        if credentials is None or not credentials.refused(asked_at):
            raise Denied(error.message, error.context) from error
        raise


class OfSession:
    """A session's component `credential_provider` that gives what has been found already."""

    def __init__(self, found: Any) -> None:
        self._found = found

    async def load_credentials(self) -> Any:
        return self._found
