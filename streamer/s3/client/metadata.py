"""Disables redirects of aiobotocore's requests to metadata services of containers and instances.

aiobotocore sends these requests through separate HTTP sessions, which follow redirects. The requests carry
the container's authorization token or the instance's session token. A redirect would send the token to
another server and use that server's credentials. `refuse_redirects` gives the fetchers a session that follows
none, so a redirect counts as any other response that is not 200.
"""

from __future__ import annotations

from aiobotocore.utils import AioContainerMetadataFetcher, AioIMDSFetcher

from streamer.s3.client.redirects import UnfollowingSession


class _ContainerSession(AioContainerMetadataFetcher._ref_counted_session_cls, UnfollowingSession):  # type: ignore[misc] # noqa: SLF001
    """The container fetcher's session, which follows no redirect."""


class _InstanceSession(AioIMDSFetcher._ref_counted_session_cls, UnfollowingSession):  # type: ignore[misc] # noqa: SLF001
    """The instance fetchers' session, which follows no redirect."""


def refuse_redirects() -> None:
    """Make every fetcher that this process creates from now on follow no redirect."""
    AioContainerMetadataFetcher._ref_counted_session_cls = _ContainerSession  # noqa: SLF001
    AioIMDSFetcher._ref_counted_session_cls = _InstanceSession  # noqa: SLF001
