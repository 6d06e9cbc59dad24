"""Every relay test runs over all transports: they must be equal, byte for byte and error for error."""

from __future__ import annotations

import functools

import pytest

from tests.kit.harness import running_channel


@pytest.fixture(params=["portable", "copying", "kernel"])
def run(request):
    """`running_channel` over one of the transports."""
    return functools.partial(running_channel, transport=request.param)
