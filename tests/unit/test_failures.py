"""What is said and done about an epoch that has failed: the advice, and the fate of its FIFO."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.doctor.remedies import remedy
from sidecar.observe.advice import advice
from sidecar.observe.metrics import ERRORS
from streamer import errors
from streamer.relay.channel_spec import WhenFailed
from streamer.relay.channel_state import fifo_fate
from streamer.s3.client.faults import EXPLANATIONS, NOT_BY_CREDENTIALS, error_from_response
from streamer.s3.ranges import suggest_omission


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.Denied("x"), "give the credentials s3:GetObject"),
        (errors.ObjectMissing("x"), "put the object back"),
        (errors.SourceChanged("x"), "put the listed version back"),
        (errors.GaveUp("x"), "see to the endpoint"),
        (errors.BadAnswer("x"), "see to the endpoint"),
        (errors.Mismatch("x"), "replace the corrupt object"),
    ],
)
def test_the_operator_is_told_what_to_do(error: Any, words: str) -> None:
    """A restart alone helps where the FIFO is held and its place in the plan known; damage it never mends."""
    assert words in advice(error, mendable=False)
    assert "restart sidecar and trainer" in advice(error, mendable=False)
    mends = not isinstance(error, errors.Mismatch)
    assert ("`penstock restart` goes on" in advice(error, mendable=True)) == mends


@pytest.mark.parametrize("code", sorted(NOT_BY_CREDENTIALS))
def test_an_object_that_nobody_may_read_now_is_no_matter_of_credentials(code: str) -> None:
    """A lifecycle rule has archived it: neither a policy nor If-Match is named, and it is final."""
    error = error_from_response(
        status=400 if code.startswith("KMS") else 403,
        code=code,
        message="",
        fields={},
        context=errors.ErrorContext("b", "k"),
    )
    suggest_omission(error)
    assert isinstance(error, errors.Denied)
    assert not error.retryable
    assert EXPLANATIONS[code] in str(error)
    assert "If-Match" not in str(error)
    assert advice(error, mendable=False) == "do as the error says, and restart sidecar and trainer"
    assert remedy(error, "")[1:-1] in str(error)


def test_every_failure_of_a_channel_is_counted() -> None:
    """PenstockChannelFailed asks for the counter: a full disk that outlasts GiveUpAfter was no alert."""
    kinds = {
        each.kind
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.SourceError) and not each.retryable
    }
    assert kinds - {errors.SourceError.kind} | {errors.SinkError.kind} <= set(ERRORS)


def test_new_keys_in_the_environment_need_a_new_start() -> None:
    """`penstock restart` runs execve(2) with the environment of the process."""
    error = errors.Denied("the session token has expired")
    error.code = "ExpiredToken"
    text = advice(error, mendable=True)
    assert text.startswith("set new keys in the environment")
    assert text.endswith("start the job again")


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("reader_came", [False, True])
def test_a_fifo_ends_only_where_the_policy_can_be_carried_out(local: bool, reader_came: bool) -> None:
    policies: tuple[WhenFailed, ...] = ("hold", "close")
    fates = [fifo_fate(policy, local=local, reader_came=reader_came) for policy in policies]
    assert fates == ["held", "closed" if reader_came and not local else "held"]
