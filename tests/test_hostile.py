"""The cells of the hostile servers that once failed, and a few others; `python -m tests.hostile` has all."""

from __future__ import annotations

import pytest

from tests.hostile.__main__ import judge_all, sample
from tests.hostile.cells import Cell, all_cells
from tests.hostile.faults import BELOW, FAULTS
from tests.hostile.wire import right
from tests.kit.raw import parse

SEED, DRAWN = 7, 10
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
    account = judge_all([*ONCE_BROKEN, SPOILT, *sample(SEED, DRAWN)], workers=6)
    spoilt = account.states.pop(SPOILT)
    assert "wrong bytes" in spoilt.finding  # no client can tell without a checksum: the judge does judge
    assert not account.findings
    outcomes = {cell: account.states[cell].outcome for cell in ONCE_BROKEN}
    assert {cell: outcome for cell, outcome in outcomes.items() if outcome not in ONCE_BROKEN[cell]} == {}


def test_the_faults_are_of_every_field() -> None:
    assert len(FAULTS) + len(BELOW) >= 100
    sent = right(parse(b"GET /b/data/0 HTTP/1.1\r\nRange: bytes=0-9"))
    fields = {name.decode() for name, _ in sent.headers} | {"Transfer-Encoding", "Retry-After", "Location"}
    assert all(f"{field}: missing" in FAULTS for field in fields)
    assert {cell.operation for cell in all_cells()} == {"body", "HEAD", "listing", "manifest"}
    assert SPOILT not in all_cells()


def test_a_seed_is_a_sample() -> None:
    assert sample(3, 20) == sample(3, 20) != sample(4, 20)
