"""Renews credentials that S3 refuses, for streams that run for days.

botocore renews credentials that have an expiry time: those of a process, a container, an instance, a web
identity. It does not renew a key in a file, which has no expiry time, and S3 may refuse credentials before
they expire. So the transport reports each request that S3 refuses for its credentials. Before the next
request a new session resolves botocore's whole chain and reads its files again. Requests that are refused
together resolve the chain once.

A chain that fails now may succeed later (a metadata service restarts, a file is being replaced). So a failed
renewal raises `Expired`, which is retried. Credentials that S3 refuses before it has accepted any are Denied;
`credential_sources` decides about those that are missing at the start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from streamer.errors import Denied, Expired, PenstockError, SourceError
from streamer.retry import note_failure
from streamer.s3.client.faults import error_text
from streamer.secrets import quoted, remember

REWRITTEN = (
    "the signature of this request is refused, though S3 has accepted the same keys: a proxy or a load "
    "balancer drops or rewrites signed headers (Host, Range, If-Match); have it pass them on, or name the "
    "store itself in Penstock.Endpoint.Url"
)
"""Text of the error of a request whose keys are right."""
PAUSE = 1.0
"""Least seconds between two resolutions of the chain."""
MANDATORY = 60.0
"""Seconds before credentials expire at which they must be renewed; before that a renewal may fail. Also the
seconds between two attempts to read files that could not be read."""


class RenewableCredentials:
    """A proxy for the session's credentials that renews them; it passes other attributes through."""

    def __init__(
        self,
        initial: Any,
        load: Callable[[], Awaitable[Any]],
        *,
        limit: float,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`initial`: aiobotocore's credentials. `load`: resolves the chain. `limit`: seconds per renewal.

        `check`: reads the files that a renewal reads; a renewal fails with its error.
        """
        self._limit = limit
        self._check = check
        self._current = initial
        self._load = load
        self._lock = asyncio.Lock()
        self.accepted = False
        """Whether S3 has accepted the credentials of a request."""
        self._accepted: Any = None
        """Key, secret and token of the last request that S3 has accepted."""
        self._stale = False
        self._loaded_at = self._failed_at = self._checked_at = float("-inf")
        self._failure = ""
        self._remembered: tuple[str | None, ...] = ()
        self._last: Any = None
        """Key, secret and token of the last request."""
        self._static: Any = None
        """Key, secret and token, once they are known, of a source that does not refresh them."""

    def __repr__(self) -> str:
        return f"<RenewableCredentials by {self._current.method}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current, name)

    def note_accepted(self) -> None:
        """Note that S3 has accepted the last request's credentials."""
        self.accepted, self._accepted = True, self._last

    @property
    def right(self) -> bool:
        """Whether S3 has accepted the very keys of the last request before."""
        return self.accepted and bool(self._accepted == self._last)

    def refused(self, sent_at: float) -> bool:
        """Note that S3 refused a request sent at `sent_at` (`time.monotonic`); return whether to repeat it.

        Repeating cannot help if the keys are environment variables, because those of a running process cannot
        be changed from outside, nor if S3 has never accepted any.
        """
        if not self.accepted or (
            self._current.method == "env" and not hasattr(self._current, "refresh_needed")
        ):
            return False
        if sent_at > self._loaded_at:
            self._stale = True
        return True

    def frozen(self) -> Any:
        """Return key, secret and token if no wait is needed, else None: three coroutines less a request."""
        return None if self._stale else self._static

    async def get_frozen_credentials(self) -> Any:
        """Return key, secret and token for one request. Raises Expired if a renewal fails."""
        if time.monotonic() < self._failed_at + PAUSE:
            raise Expired(self._failure)
        begun = time.monotonic()
        if self._check is not None and not await self._files_readable(self._check):
            return self._last
        try:
            if self._stale or hasattr(self._current, "refresh_needed"):
                async with asyncio.timeout(self._limit):
                    if self._stale:
                        await self._renew()
                    frozen = await self._current.get_frozen_credentials()
            else:
                frozen = await self._current.get_frozen_credentials()
        except PenstockError:
            raise
        except asyncio.CancelledError:
            late = f"their source did not respond in {time.monotonic() - begun:.0f} s"
            note_failure(Expired(self._not_renewed(late)))  # for the caller's own time limit
            raise
        except Exception as error:
            # Processes, files, STS and metadata services each have their own classes of errors.
            self._failed_at = time.monotonic()
            timed_out = f"their source did not respond in {self._limit:g} s"
            reason = (
                timed_out
                if isinstance(error, TimeoutError)
                else f"{type(error).__name__}: {quoted(error_text(error))}"
            )
            self._failure = self._not_renewed(reason)
            raise Expired(self._failure) from error
        if (secrets := (frozen.access_key, frozen.secret_key, frozen.token)) != self._remembered:
            if all(isinstance(each, str) for each in secrets if each is not None):
                remember(*secrets)
            if not _can_sign(*secrets):
                raise Expired(
                    "the credentials have a line end, a control character or a letter beyond ASCII, which no "
                    f"key has; correct their source, which is {self._current.method}"
                )
            self._remembered = secrets
        self._last = frozen
        self._static = None if hasattr(self._current, "refresh_needed") else frozen
        return frozen

    async def _files_readable(self, check: Callable[[], Awaitable[None]]) -> bool:
        """Return False if a renewal cannot read its files, but the credentials are still valid.

        Raises Expired if they are not.
        """
        refreshable = hasattr(self._current, "refresh_needed")
        if not (self._stale or (refreshable and self._current.refresh_needed())):
            return True
        valid = not self._stale and self._last is not None and not self._current.refresh_needed(MANDATORY)
        if valid and time.monotonic() < self._checked_at + MANDATORY:
            return False
        try:
            await check()
        except Denied as error:
            if valid:
                self._checked_at = time.monotonic()
                return False
            self._failed_at = time.monotonic()
            self._failure = f"the credentials cannot be renewed: {error.message}"
            raise Expired(self._failure) from error
        return True

    def _not_renewed(self, reason: str) -> str:
        return f"the credentials cannot be renewed ({reason}); check their source, which is {self.method}"

    async def _renew(self) -> None:
        async with self._lock:
            if not self._stale or time.monotonic() < self._loaded_at + PAUSE:
                return
            if time.monotonic() < self._failed_at + PAUSE:
                raise Expired(self._failure)  # another request's renewal failed while this one waited
            credentials = await self._load()
            if credentials is None:
                raise LookupError("no source has credentials any more")
            self._current, self._stale, self._loaded_at = credentials, False, time.monotonic()


def _can_sign(access_key: Any, secret_key: Any, token: Any) -> bool:
    """Return whether a request can be signed with these: headers have the key and the token as ASCII."""
    sent = (access_key, token or "")
    return all(isinstance(each, str) and each.isascii() for each in sent) and all(
        isinstance(each, str) and each.isprintable() for each in (*sent, secret_key)
    )


class renewing:  # noqa: N801 - used as a context manager; as a generator it costs 1 µs more a request
    """Wrap one request; if S3 refuses its credentials, they are renewed before the next request.

    Raises Denied instead of Expired if a renewal cannot help.
    """

    __slots__ = ("_credentials", "_sent_at")

    def __init__(self, credentials: RenewableCredentials | None) -> None:
        self._credentials = credentials

    def __enter__(self) -> None:
        self._sent_at = time.monotonic()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if (
            isinstance(error, Denied)
            and (final := renewed(error, self._credentials, self._sent_at)) is not error
        ):
            raise final


def renewed(error: SourceError, credentials: RenewableCredentials | None, sent_at: float) -> SourceError:
    """Return the error of a request; if S3 refused its credentials, they are renewed before the next request.

    Returns Denied instead of Expired if a renewal cannot help. `sent_at`: time at which the request was sent
    (time.monotonic()).
    """
    if error.code == "SignatureDoesNotMatch" and credentials is not None and credentials.right:
        error.message = f"{REWRITTEN} (S3 responded 403 {error.code})"
    if not isinstance(error, Expired):
        return error
    source = "" if credentials is None else f"; their source is {credentials.method}"
    if error.code and not error.message.endswith(source):
        error.message += source
    if credentials is not None and credentials.refused(sent_at):
        return error
    denied = Denied(error.message, error.context)
    denied.code = error.code
    return denied


class FixedProvider:
    """A session's component `credential_provider` that returns given credentials."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    async def load_credentials(self) -> Any:
        return self._credentials
