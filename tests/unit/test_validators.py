"""Validators: ETags, and the times of modification that stand for them."""

from __future__ import annotations

import pytest

from streamer.plan.validators import described, is_etag, is_modified, is_validator, modified, validator_of

TIME = "modified 2026-11-03T21:56:26Z"


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-03T21:56:26Z",
        "2026-11-03T21:56:26.000Z",
        "2026-11-03T21:56:26.999999999Z",
        "2026-11-03T21:56:26+00:00",
        "2026-11-03T21:56:26.120000+00:00",
        "Tue, 03 Nov 2026 21:56:26 GMT",
        "Tuesday, 03-Nov-26 21:56:26 GMT",
        "Tue Nov  3 21:56:26 2026",
    ],
)
def test_a_listing_and_a_response_name_the_same_time(text: str) -> None:
    assert modified(text) == TIME


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "yesterday",
        "2026-11-03",
        "2026-11-03T21:56:26",
        "2026-11-03T21:56:26+01:00",
        "Tue, 03 Foo 2026 21:56:26 GMT",
        "Tue, 03 Nov 2026 21:56:26 CET",
        "Tue, 3 Nov 2026 21:56:26 GMT",
        "Tuesday, 03-Foo-26 21:56:26 GMT",
        "Tue Nov 3 21:56:26 2026",
        "Tue, 03 Nov 2026 21:56:26 GMT\r\nX: y",
    ],
)
def test_other_texts_are_no_times(text: str | None) -> None:
    assert modified(text) == ""


def test_years_of_two_digits() -> None:
    assert modified("Sunday, 06-Nov-94 08:49:37 GMT") == "modified 1994-11-06T08:49:37Z"


def test_an_etag_goes_before_a_time() -> None:
    assert validator_of('W/"e-2"', "2026-11-03T21:56:26Z") == "e-2"
    assert validator_of('""', "2026-11-03T21:56:26Z") == TIME
    assert validator_of(None, None) == ""


def test_a_time_is_no_etag() -> None:
    assert (is_etag(TIME), is_modified(TIME), is_validator(TIME)) == (False, True, True)
    assert (is_etag("e"), is_modified("e"), is_validator("e")) == (True, False, True)
    assert not is_validator("modified yesterday")
    assert not is_validator("modified 2026-11-03T21:56:26.5Z")
    assert not is_validator("e e")
    assert not is_validator("")


def test_errors_name_it() -> None:
    assert described(TIME) == "Last-Modified 2026-11-03T21:56:26Z"
    assert described("e-2") == "ETag e-2"
