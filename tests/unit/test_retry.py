"""When failed requests come back: spread out, never sooner than the server asked, never all at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import BadAnswer, ErrorContext, GaveUp, Shortage, SourceError, Transient, Truncated
from streamer.retry import PART_FAILED, Attempts, RetryPolicy, retry, retry_while_refused
from streamer.s3.client.faults import error_from_response
from streamer.s3.http.response import ResponseHeader

PARTS = 64


def fullest(instants: list[float], width: float) -> int:
    """The most instants in any interval of `width` seconds on a grid of half that."""
    grids = [Counter(int((each + shift) / width) for each in instants) for shift in (0.0, width / 2)]
    return max(max(grid.values()) for grid in grids)


@pytest.mark.parametrize("retry_after", [None, 0.0, 1.0, 5.0])
@pytest.mark.parametrize("failures", [0, 1, 4, 20])
def test_parts_that_failed_together_do_not_return_together(retry_after: float | None, failures: int) -> None:
    """In a twentieth of the time over which they return, there are never more than a sixth of them."""
    random.seed(f"{retry_after} {failures}")
    policy = RetryPolicy()
    instants = [policy.wait(failures, retry_after) for _ in range(PARTS)]
    spread = max(instants) - min(instants)
    assert spread > 0.6 * max(min(0.1 * 2**failures, policy.longest_wait), retry_after or 0)
    assert fullest(instants, spread / 20) <= PARTS / 6


@given(st.integers(0, 10_000), st.floats(0, 1e6))
def test_what_the_server_asks_for_is_a_lower_bound_up_to_a_minute(failures: int, retry_after: float) -> None:
    policy = RetryPolicy()
    wait = policy.wait(failures, retry_after)
    asked = min(retry_after, policy.longest_retry_after)
    assert asked <= wait <= asked + max(policy.longest_wait, asked)


def test_waits_grow_to_their_longest() -> None:
    policy = RetryPolicy(first_wait=0.1, longest_wait=2.0)
    for failures, most in ((0, 0.1), (1, 0.2), (4, 1.6), (5, 2.0), (5000, 2.0)):
        waits = [policy.wait(failures, None) for _ in range(300)]
        assert most * 0.8 < max(waits) <= most


def long_ago() -> float:
    """When an attempt began whose time is over."""
    return time.monotonic() - 10


def test_without_time_the_first_and_the_last_error_are_named() -> None:
    attempts = Attempts(RetryPolicy(give_up_after=5), PART_FAILED, what="a byte")
    attempts.wait_after(Transient("refused", ErrorContext("b", "k", 0, 1, "R1")))
    attempts.since = long_ago()
    with pytest.raises(GaveUp) as failure:
        attempts.wait_after(Truncated("cut", ErrorContext("b", "k", 7, 2)))
    assert str(failure.value) == (
        "gave up after 10 s without a byte; "
        "first error: refused: s3://b/k (offset 0, attempt 1, request id R1); "
        "last error: cut: s3://b/k (offset 7, attempt 2)"
    )


def test_what_no_time_can_mend_is_raised_as_it_is() -> None:
    for error in (BadAnswer("no ETag"), Shortage("no space")):
        attempts = Attempts(RetryPolicy(give_up_after=5), (type(error),), what="a byte", since=long_ago())
        with pytest.raises(type(error), match=str(error)):
            attempts.wait_after(error)


def test_progress_gives_back_all_time_but_the_silence_before_it() -> None:
    attempts = Attempts(RetryPolicy(give_up_after=5), PART_FAILED, what="a byte", since=long_ago())
    attempts.progressed(silent=1)
    assert attempts.wait_after(Transient("reset")) <= 4
    attempts.progressed(silent=6)
    with pytest.raises(GaveUp, match="first and last error: again"):
        attempts.wait_after(Transient("again"))


def test_wrong_answers_are_believed_the_third_time_without_progress() -> None:
    attempts = Attempts(RetryPolicy(), PART_FAILED, what="a byte")
    for _ in range(2):
        for _ in range(2):
            attempts.wait_after(BadAnswer("no ETag"))
        attempts.progressed()
    attempts.wait_after(BadAnswer("no ETag"))
    attempts.wait_after(BadAnswer("no ETag"))
    with pytest.raises(BadAnswer):
        attempts.wait_after(BadAnswer("no ETag"))


def test_the_callers_attempt_counts_and_others_errors_pass_through() -> None:
    waited: list[SourceError] = []
    outcomes: list[Exception] = [Truncated("second"), ValueError("none of ours")]

    async def ask() -> None:
        raise outcomes.pop(0)

    async def all_attempts() -> None:
        attempts = Attempts(RetryPolicy(first_wait=0), PART_FAILED, what="a byte")
        await retry(ask, attempts, failed=Transient("first"), on_wait=waited.append)

    with pytest.raises(ValueError, match="none of ours"):
        asyncio.run(all_attempts())
    assert [error.message for error in waited] == ["first", "second"]


def test_a_refusal_of_this_machine_is_noted_and_so_is_its_end() -> None:
    noted: list[Shortage | None] = []
    outcomes = [Shortage("no space"), Shortage("no space, again")]

    async def step() -> str:
        if outcomes:
            raise outcomes.pop(0)
        return "done"

    policy = RetryPolicy(first_wait=0)
    assert asyncio.run(retry_while_refused(step, policy, noted.append)) == "done"
    assert [str(each) for each in noted] == ["no space", "no space, again", "None"]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0),
        ("1.5", 1.5),
        *[(other, None) for other in ("\u0663", "1e3", "1_0", "nan", "-1", " 2", "", None, "9" * 400)],
    ],
)
def test_numbers_of_a_response_are_ascii_digits(header: str | None, seconds: float | None) -> None:
    error = error_from_response(
        status=503,
        code="SlowDown",
        message="",
        fields={} if header is None else {"retry-after": header},
        context=ErrorContext(),
    )
    assert error.retry_after == seconds
    length = ResponseHeader(200, {"content-length": header or ""}).content_length
    assert length == (2 if header == "2" else None)
