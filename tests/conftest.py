"""Rules for every test: both event loops, no AWS set-up of the developer's, no leaks, no blocking calls."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
import pytest_timeout
import trustme
import uvloop
from blockbuster import blockbuster_ctx

from tests.kit import proxy as proxy_server
from tests.kit import stub as stub_server
from tests.kit.late import group_of, late_imports  # noqa: F401 - a fixture of every module
from tests.kit.order import order_of
from tests.kit.patience import Patience, progress_timeout
from tests.kit.proxy import TcpProxy, standing_before
from tests.kit.skips import refuse_unlisted
from tests.kit.stub import S3Stub, StubThread
from tests.kit.tls import serving


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the garbage collector: nearly all that collection makes stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Set a timer that ends the test when its processes have done nothing for `settings.timeout` seconds."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # pytest-timeout's own timer
    patience = Patience(settings.timeout)

    def strike(_number: int, _frame: FrameType | None) -> None:
        if patience.exhausted():
            # Cleaning up may hang as well; reporting must not be interrupted.
            signal.setitimer(signal.ITIMER_REAL, max(60, settings.timeout))
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, settings.timeout)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the report of a failure, and the cleaning up after it, a deadline of their own."""
    if call.excinfo is not None and signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, 60)
    report = yield
    refuse_unlisted(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_unlisted(report)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute files as `--dist=loadfile` does, but the files of a group (`group_of`) to one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFramework(LoadFileScheduling):  # type: ignore[misc]  # it publishes no types
        def _split_scope(self, nodeid: str) -> str:
            path: str = super()._split_scope(nodeid)
            return group_of(config.rootpath / path) or path

    return ByFramework(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Bound tests on uvloop, and put the files into the order of `tests.kit.order`.

    What waits on uvloop is not ended by pytest-timeout's signal; a timeout of asyncio does it, before.
    """
    if hasattr(config, "workerinput"):
        order = order_of(item.path for item in items)
        items.sort(key=lambda item: order[item.path])
    asked = config.getoption("timeout")
    usual = float(config.getini("timeout")) if asked is None else asked
    for item in items:
        if inspect.iscoroutinefunction(getattr(item, "obj", None)):
            marker = item.get_closest_marker("timeout")
            seconds = marker.args[0] if marker and usual else usual
            if seconds:  # 0 for none, as for a debugger
                item.obj = _within(seconds, item.obj)


def _within(seconds: float, test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def bounded(*args: Any, **kwargs: Any) -> None:
        async with progress_timeout(0.9 * seconds):
            await test(*args, **kwargs)

    return bounded


# Nothing here asserts how long anything takes; machines are slow at times. `make night` draws more examples.
hypothesis.settings.register_profile("patient", deadline=None, max_examples=50)
hypothesis.settings.register_profile("night", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("patient")

# TensorFlow imports JAX if it can, for a fifth of the CPU time of its own import; nothing here uses both.
sys.modules.setdefault("jax", None)  # type: ignore[arg-type]

# OpenMP threads spin while they wait. The tensors of tests need no second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has what it starts in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# libuv makes one pipe for signals per process, at its first loop; make it before leaks are counted.
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _first:
    _first.run(asyncio.sleep(0))


@pytest.fixture(scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that trusts an authority of nobody's."""
    path = tmp_path_factory.getbasetemp() / "one certificate.pem"
    trustme.CA().cert_pem.write_to_path(path)
    return str(path)


@pytest.fixture(autouse=True)
def aws_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, one_certificate: str
) -> None:
    """No AWS setting of the developer's, and no certificate of the machine's, reaches a test.

    Each client of aiobotocore reads the trusted certificates, and so does each import of aiohttp. Those of
    a machine take 20 ms of CPU.
    """
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    nowhere = str(tmp_path_factory.getbasetemp() / "no AWS configuration")
    monkeypatch.setenv("AWS_CONFIG_FILE", nowhere)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", nowhere)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, one_certificate)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    """A private one; `tmp_path/ca.pem` has its certificate."""
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    return made


@pytest.fixture
def tls_stub(credentials: None, authority: trustme.CA) -> Iterator[S3Stub]:
    """A fresh S3 stub behind TLS."""
    with serving(authority) as stub:
        yield stub


@pytest.fixture
def stub(credentials: None) -> Iterator[S3Stub]:
    """A fresh S3 stub."""
    thread = StubThread()
    yield thread.start()
    thread.stop()


@pytest.fixture
def proxy(stub: S3Stub) -> Iterator[TcpProxy]:
    """A proxy before the stub."""
    with standing_before(stub.url) as found:
        yield found


SERVERS = {stub_server.THREAD, proxy_server.THREAD}
"""Names of the kit's servers' threads."""


def _descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def no_leaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The test ends with the descriptors and threads that it began with; those of its servers too.

    No callback of an event loop has raised: a loop logs that, and goes on.

    A server hears in its own thread, some time later, that a client has closed: it must have stopped before
    anything is counted, so it must start after this. `usefixtures` sees to that.
    """
    gc.collect()
    before, threads = _descriptors(), set(threading.enumerate())
    early = {thread.name for thread in threads} & SERVERS
    assert not early, f"take no_leaks by pytest.mark.usefixtures, so that it comes before: {early}"
    yield
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith(("open ", "off loop: ", "inflate", "waitpid-")):
            thread.join(10)  # released, and on its way out
    gc.collect()
    after = _descriptors()
    leaked = {fd: after[fd] for fd in after.keys() - before.keys()}
    assert not leaked, f"leaked descriptors: {leaked}"
    gc.freeze()  # what survives is looked through no more
    left = {
        thread for thread in set(threading.enumerate()) - threads if not thread.name.startswith("asyncio_")
    }
    assert not left, f"leaked threads: {left}"
    output = [each.getMessage() for each in caplog.get_records("call") if each.name == "asyncio"]
    raised = [each for each in output if each.startswith("Exception in callback")]
    assert not raised, raised


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """A blocking call made by our code on the loop fails the test."""
    with blockbuster_ctx(["streamer", "sidecar"]) as watch:
        # Making, renaming and removing names in the FIFO directory takes microseconds, happens once an
        # epoch, and must be in an exact order with the closing of the pipe.
        for call in ("os.unlink", "os.rename", "os.stat", "os.listdir"):
            watch.functions[call].can_block_in(
                "streamer/sink/fifo.py", {"clear", "close", "conclude", "resume", "retire", "withdraw"}
            )
            watch.functions[call].can_block_in("streamer/sink/fifo_names.py", {"kept", "remove_all"})
        # botocore reads its models and the user's profile for the first calls, before any byte moves.
        for function in watch.functions.values():
            function.can_block_in("streamer/s3/client/session.py", {"open_clients"})
            function.can_block_in("streamer/s3/pages/prefix_pages.py", {"page"})
            function.can_block_in("streamer/s3/manifests/manifest.py", {"_read"})
            function.can_block_in("streamer/s3/pages/object_info.py", {"find", "_http"})
            # /proc is no disk; and this socket is non-blocking, which os.read does not show.
            function.can_block_in("streamer/linux.py", {"pipe_allowance"})
            # The base directory's links are resolved once, before anything is streamed.
            function.can_block_in("sidecar/job/layout.py", {"__post_init__"})
            # A trailer is one small file, written and read (here, by tests) whole.
            function.can_block_in("streamer/trailer.py", {"write_trailer", "read_trailer"})
            # `reach` appends to a key list, a few kB at a time. A thread makes the writer.
            function.can_block_in("streamer/sink/key_list.py", {"flush"})
        yield
