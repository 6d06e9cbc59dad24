"""What the runner of a command makes of the errors that end it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sidecar.process.runner import run
from streamer.errors import SinkError


async def lacks_a_module() -> None:
    raise ModuleNotFoundError("No module named 'absent'", name="absent")


async def lacks_a_module_in_a_group() -> None:
    try:
        await lacks_a_module()
    except ImportError as error:
        raise ExceptionGroup("tasks", [error]) from None


@pytest.mark.parametrize("work", [lacks_a_module, lacks_a_module_in_a_group])
def test_a_module_that_cannot_be_loaded_is_a_local_error(
    work: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    with pytest.raises(SinkError, match="cannot load a module .*'absent'"):
        run(work())


async def meets_a_bug() -> None:
    raise OSError(errno.EBADF, "a descriptor that was closed twice")


def test_a_bug_stays_a_bug() -> None:
    with pytest.raises(OSError, match="closed twice"):
        run(meets_a_bug())
