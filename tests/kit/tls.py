"""The S3 stub behind TLS, with an authority of its own."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from datetime import datetime

import trustme

from tests.kit.stub import S3Stub, StubThread


@contextlib.contextmanager
def serving(
    authority: trustme.CA,
    *,
    name: str = "127.0.0.1",
    version: ssl.TLSVersion | None = None,
    not_after: datetime | None = None,
) -> Iterator[S3Stub]:
    """A stub over TLS, of one version alone if given, whose certificate is for `name`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    authority.issue_cert(name, not_after=not_after).configure_cert(context)
    thread = StubThread(context)
    try:
        yield thread.start()
    finally:
        thread.stop()
