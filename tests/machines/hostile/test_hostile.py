"""The cells of the hostile servers that once failed, and a few others; `tests.machines hostile` has all."""

from __future__ import annotations

import pytest

from tests.kit.raw import parse
from tests.machines.hostile.cells import Cell, all_cells
from tests.machines.hostile.faults import BELOW, FAULTS
from tests.machines.hostile.wire import right
from tests.machines.machine import home
from tests.machines.report import search

DRAWN = range(70, 74)
ONCE_BROKEN = {
    Cell("interim without end", "body", "splice", tls=False): {"InvalidResponse"},
    Cell("interim without end", "HEAD", "buffered", tls=False): {"InvalidResponse"},
    Cell("interim 100, then silence", "body", "aiobotocore", tls=False): {"GaveUp"},
    Cell("interim 100, then silence", "manifest", "aiobotocore", tls=True): {"GaveUp"},
    Cell("interim dripped", "body", "buffered", tls=False): {"GaveUp"},
    Cell("error body dripped", "body", "splice", tls=False): {"GaveUp"},
    Cell("error body without end", "body", "aiobotocore", tls=False): {"Denied"},
    Cell("Retry-After: 1e300", "HEAD", "buffered", tls=False): {"GaveUp"},
    Cell("Date: wrong", "body", "splice", tls=False): {"Denied"},
    Cell("chunked", "manifest", "aiobotocore", tls=False): {"BadAnswer"},
    Cell("status 502 with the right body", "HEAD", "aiobotocore", tls=False): {"GaveUp"},
    Cell("listing: empty pages without end", "listing", "aiobotocore", tls=False): {"GaveUp", "BadAnswer"},
    Cell("listing: without end", "listing", "aiobotocore", tls=False): {"ConfigError"},
    Cell("listing: quadratic expansion", "listing", "aiobotocore", tls=False): {"InvalidResponse"},
    Cell("listing: many elements", "listing", "aiobotocore", tls=False): {"InvalidResponse"},
    Cell("listing: ETag of 100 KB", "listing", "aiobotocore", tls=False): {"InvalidResponse"},
    Cell("listing: ETag with CR LF", "listing", "aiobotocore", tls=False): {"InvalidResponse"},
}
"""Each hung, took all memory, ended the process or blocked its loop; by the errors that it ends with now."""
SPOILT = Cell("one bit is another", "body", "buffered", tls=False)


@pytest.mark.timeout(240)
def test_every_end_is_right_or_told() -> None:
    report = search(home("hostile"), [*map(str, (*ONCE_BROKEN, SPOILT)), *DRAWN], workers=6)
    spoilt = report.broken.pop(str(SPOILT)).result.broken
    assert "wrong bytes" in spoilt  # no client can tell without a checksum: the judge does judge
    assert not report.broken, report
    outcomes = {cell: report.cells[str(cell)]["outcome"] for cell in ONCE_BROKEN}
    assert {cell: outcome for cell, outcome in outcomes.items() if outcome not in ONCE_BROKEN[cell]} == {}


def test_the_faults_are_of_every_field() -> None:
    assert len(FAULTS) + len(BELOW) >= 100
    sent = right(parse(b"GET /b/data/0 HTTP/1.1\r\nRange: bytes=0-9"))
    fields = {name.decode() for name, _ in sent.headers} | {"Transfer-Encoding", "Retry-After", "Location"}
    assert all(f"{field}: missing" in FAULTS for field in fields)
    assert {cell.operation for cell in all_cells()} == {"body", "HEAD", "listing", "manifest"}
    assert SPOILT not in all_cells()


def test_each_fault_comes_once_before_one_comes_twice() -> None:
    first = all_cells()[: len({cell.fault for cell in all_cells()})]
    assert len({cell.fault for cell in first}) == len(first)
    assert all(Cell.of(str(cell)) == cell for cell in all_cells())
