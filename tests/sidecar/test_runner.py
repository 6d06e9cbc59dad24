"""What the runner of a command makes of the errors that end it."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
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


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSYS, "Function not implemented"), "a system call of the sidecar failed"),
        (OSError(errno.ESTALE, "Stale file handle"), "a system call of the sidecar failed"),
        (OSError(errno.EFBIG, "File too large"), "a system call of the sidecar failed"),
        (RuntimeError("can't start new thread"), "no thread can be started: raise "),
    ],
)
def test_a_refusal_of_this_machine_is_a_local_error(error: Exception, text: str) -> None:
    async def refused() -> None:
        raise ExceptionGroup("tasks", [error])

    with pytest.raises(SinkError, match=text):
        run(refused())


async def meets_a_bug() -> None:
    raise OSError(errno.EBADF, "a descriptor that was closed twice")


def test_a_bug_stays_a_bug() -> None:
    with pytest.raises(OSError, match="closed twice"):
        run(meets_a_bug())


async def reports_a_write_to_a_closed_connection(*, of_that_connection: bool) -> None:
    """Do what uvloop's TLS does: write to a TCP connection that is closed, and report the error."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    transports = [(await loop.create_connection(asyncio.Protocol, sock=each))[0] for each in (ours, theirs)]
    for each in transports:
        each.abort()
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="the handler is closed") as raised:
        transports[0].write(b"the end of a handshake")
    loop.call_exception_handler(
        {
            "message": "Fatal error on SSL protocol",
            "exception": raised.value,
            "transport": transports[0 if of_that_connection else 1],
        }
    )


@pytest.mark.parametrize(("error", "names"), [(ssl.SSLError(1, "expired"), []), (OSError(), ["asyncio"])])
def test_a_handshake_that_nobody_waits_for_is_no_error_of_the_log(
    caplog: pytest.LogCaptureFixture, error: OSError, names: list[str]
) -> None:
    """Its request was cancelled, as by GiveUpAfter."""

    async def leaves_an_error() -> None:
        asyncio.get_running_loop().create_future().set_exception(error)

    run(leaves_an_error())
    assert [record.name for record in caplog.records] == names


@pytest.mark.parametrize("of_that_connection", [True, False])
def test_a_connection_that_closed_in_its_handshake_is_no_error_of_the_log(
    caplog: pytest.LogCaptureFixture, of_that_connection: bool
) -> None:
    """The request on it has failed; an error of any other object stays in the log."""
    run(reports_a_write_to_a_closed_connection(of_that_connection=of_that_connection))
    assert [record.name for record in caplog.records] == ([] if of_that_connection else ["asyncio"])
