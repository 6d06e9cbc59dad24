"""Final answers (denied, missing, deleted, replaced), which count once a fresh connection has brought them.

A response on a connection that was used before may belong to an earlier request: a late copy, or a refusal
that a proxy sends unasked. So a request that gets a final answer on such a connection is sent once more, on a
fresh one, and the same answer there counts.

    our own client    `Response.reused`; parts ask again by `is_final`, control requests by `FINAL_STATUSES`
    aiobotocore       its session (`redirects`) sets `reused`, reads `fresh`, asks again by `FINAL_STATUSES`
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from streamer.errors import Denied, Missing, SourceChanged, SourceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")
FINAL_STATUSES = (401, 403, 404, 412, 416)
"""Statuses of final answers."""
fresh: ContextVar[bool] = ContextVar("fresh", default=False)
"""Whether aiobotocore's requests of the task need connections that have carried no request."""
reused: ContextVar[bool] = ContextVar("reused", default=False)
"""Whether the connection of the task's last request by aiobotocore had carried another one before."""


def is_final(error: SourceError) -> bool:
    """Return whether the error is final: denied, missing, deleted, replaced."""
    return isinstance(error, (Denied, Missing, SourceChanged)) and not error.retryable


@contextlib.contextmanager
def on_fresh_connection() -> Iterator[None]:
    """Have aiobotocore send the requests of the block on fresh connections."""
    token = fresh.set(True)
    try:
        yield
    finally:
        fresh.reset(token)


async def confirmed(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a request by aiobotocore; ask again if a success shows another version."""
    try:
        return await ask()
    except SourceChanged:
        if not reused.get():
            raise
    with on_fresh_connection():
        return await ask()
