"""Every relay test runs over all transports: they must be equal, byte for byte and error for error.

Over both event loops each, where a test is about transports, epochs and what goes wrong on the way. What
lies above them runs over the service's own loop, and over the portable transport on the other one.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.kit.harness import running_channel


@pytest.fixture(params=["portable", "copying", "kernel"])
def run(request):
    """`running_channel` over one of the transports."""
    return functools.partial(running_channel, transport=request.param)


@pytest.fixture(params=["spliced", "copied", "decrypted"])
def way(request):
    """How our own client moves bodies."""
    return request.param


@pytest.fixture
def server(request, way):
    """A fresh S3 stub, behind TLS for bodies that are to be decrypted."""
    return request.getfixturevalue("tls_stub" if way == "decrypted" else "stub")


@pytest.fixture
def run_own(server, way, tmp_path):
    """`running_channel` from that server, by our own client, in that way."""
    bundle = str(tmp_path / "ca.pem") if way == "decrypted" else None
    transport = "kernel" if way == "spliced" else "copying"
    return functools.partial(running_channel, server, tmp_path, transport=transport, ca_bundle=bundle)


ABOVE = {
    "test_arranged", "test_changes", "test_credentials", "test_failures", "test_inflated", "test_integrity",
    "test_redirects", "test_versions", "test_hostile_listings",
}  # fmt: skip
"""Modules whose subject lies above transports and loops."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what would run the same code once more."""
    redundant = [item for item in items if _redundant(item)]
    config.hook.pytest_deselected(items=redundant)
    items[:] = [item for item in items if item not in set(redundant)]


def _redundant(item: pytest.Item) -> bool:
    name = item.name
    if "[uvloop-portable" in name:
        return True
    return Path(item.path).stem in ABOVE and ("[asyncio-copying" in name or "[asyncio-kernel" in name)
