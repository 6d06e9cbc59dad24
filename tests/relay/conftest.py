"""Every relay test runs over all transports: they must be equal, byte for byte and error for error.

The modules of `BOTH_LOOPS` run over both event loops: the life of an epoch, and spliced sockets. The
others run over the service's own loop, and over the aiobotocore transport on the other one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.relay.transport import Wish
from streamer.s3.pages.pages import PageSource, open_pages
from tests.kit.harness import PagesFrom, RunChannel, Server, clients_of, running_channel
from tests.kit.stub import S3Stub


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore's pauses between two attempts are a hundredth of a second."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0.01)


@pytest.fixture(params=["aiobotocore", "buffered", "splice"])
def run(request: pytest.FixtureRequest) -> RunChannel:
    """`running_channel` over one of the transports."""
    return functools.partial(running_channel, transport=request.param)


@pytest.fixture(params=["spliced", "copied", "decrypted"])
def way(request: pytest.FixtureRequest) -> str:
    """How our own client moves bodies."""
    way: str = request.param
    return way


@pytest.fixture
def server(request: pytest.FixtureRequest, way: str) -> S3Stub:
    """A fresh S3 stub, behind TLS for bodies that are to be decrypted."""
    stub: S3Stub = request.getfixturevalue("tls_stub" if way == "decrypted" else "stub")
    return stub


@pytest.fixture
def run_own(server: S3Stub, way: str, tmp_path: Path) -> RunChannel:
    """`running_channel` from that server, by our own client, in that way."""
    bundle = str(tmp_path / "ca.pem") if way == "decrypted" else None
    transport: Wish = "splice" if way == "spliced" else "buffered"
    return functools.partial(running_channel, server, tmp_path, transport=transport, ca_bundle=bundle)


@pytest.fixture(params=["http", "aiobotocore"])
def pages_from(request: pytest.FixtureRequest) -> PagesFrom:
    """Opens the pages of a server's listings, by our own client or by aiobotocore."""

    @contextlib.asynccontextmanager
    async def opened(server: Server, **options: Any) -> AsyncIterator[PageSource]:
        by_aiobotocore = request.param == "aiobotocore"
        async with clients_of(server, by_aiobotocore=by_aiobotocore, **options) as clients:
            with open_pages(clients) as pages:
                yield pages

    return opened


BOTH_LOOPS = {"test_epochs", "test_object_put", "test_separation", "test_splice"}
"""Modules whose subject a loop can change: who is woken by which event of a socket or a FIFO."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what would run the same code once more."""
    redundant = {item for item in items if _redundant(item)}.union(_further_cases(items))
    config.hook.pytest_deselected(items=list(redundant))
    items[:] = [item for item in items if item not in redundant]


AFTER_A_BODY = {"test_arranged", "test_inflated", "test_integrity", "test_joined"}
"""Modules whose subject is what happens to bytes in memory, after any body has brought them there. Over
aiobotocore each test has its first case only."""


def _further_cases(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield cases over aiobotocore but the first of each test of `AFTER_A_BODY`."""
    seen = set()
    for item in items:
        if item.path.stem in AFTER_A_BODY and "aiobotocore" in item.name and "[asyncio" in item.name:
            test = item.path, item.name.partition("[")[0]
            if test in seen:
                yield item
            seen.add(test)


def _redundant(item: pytest.Item) -> bool:
    by_aiobotocore = "aiobotocore" in item.name
    if "[uvloop" in item.name:
        return by_aiobotocore
    return "[asyncio" in item.name and not by_aiobotocore and Path(item.path).stem not in BOTH_LOOPS
