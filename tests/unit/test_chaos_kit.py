"""The kit that spoils things does what it says, the same for every client, and knows nothing of Penstock."""

from __future__ import annotations

import ast
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kit import faults, proxy, stub
from tests.kit.proxy import Line, random_lines, standing_before
from tests.kit.stub import S3Stub, StubThread

BODY = bytes(range(256)) * 4000


@pytest.mark.parametrize("module", [faults, proxy, stub])
def test_it_knows_nothing_of_what_it_tests(module: ModuleType) -> None:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not {name.split(".")[0] for name in names} & {"streamer", "sidecar"}


@pytest.fixture
def server() -> Iterator[S3Stub]:
    thread = StubThread()
    found = thread.start()
    found.objects["b/x"] = BODY
    yield found
    thread.stop()


@pytest.fixture
def line(server: S3Stub) -> Iterator[Any]:
    """A proxy before it, all of whose connections are the same line; returns how to ask through it."""
    with standing_before(server.url) as found:

        def ask(shape: Line, timeout: float | None = None) -> bytes:
            found.lines = lambda _: shape
            headers = {"Range": f"bytes=0-{len(BODY) - 1}", "Connection": "close"}
            request = urllib.request.Request(f"http://127.0.0.1:{found.port}/b/x", headers=headers)
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                body: bytes = answer.read()
                return body

        ask.proxy = found  # type: ignore[attr-defined]  # the function is the fixture, its proxy rides along
        yield ask


def test_a_good_line_passes_all(line: Any) -> None:
    assert line(Line(latency=0.01, bandwidth=50e6)) == BODY


def test_a_line_is_reset(line: Any) -> None:
    with pytest.raises(ConnectionResetError):
        line(Line(reset_after=300_000))


def test_a_line_is_closed_from_one_side(line: Any) -> None:
    with pytest.raises(http.client.IncompleteRead) as caught:
        line(Line(half_close_after=300_000))
    assert BODY.startswith(caught.value.partial)


def test_a_line_falls_silent(line: Any) -> None:
    with pytest.raises(TimeoutError):
        line(Line(blackhole_after=300_000), timeout=0.5)


def test_a_port_refuses_and_accepts_again(line: Any) -> None:
    line.proxy.refuse()
    with pytest.raises(urllib.error.URLError, match="refused"):
        line(Line())
    line.proxy.accept()
    assert line(Line()) == BODY


def test_lines_are_those_of_their_seed() -> None:
    first, again, other = random_lines(1), random_lines(1), random_lines(2)
    assert [first(i) for i in range(50)] == [again(i) for i in range(50)]
    assert [first(i) for i in range(50)] != [other(i) for i in range(50)]
    assert 5 < sum(first(i).passes is not None for i in range(50)) < 30
