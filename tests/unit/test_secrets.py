"""Every form that a request gives a secret is blanked, whatever stands around it."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from streamer import secrets

VALUE = "PLANTED/key+with=signs, and spaces"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One value, which is forgotten with the test."""
    monkeypatch.setattr(secrets, "_forms", {})
    monkeypatch.setattr(secrets, "_values", None)
    secrets.remember(VALUE)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "form",
    [
        VALUE,
        quote(VALUE),
        quote(VALUE, safe=""),
        base64.b64encode(VALUE.encode()).decode(),
        VALUE.encode().hex(),
    ],
)
def test_every_form_of_a_known_value_is_blanked(form: str) -> None:
    assert secrets.redact(f"said {form}.") == "said ***."


@pytest.mark.usefixtures("known")
def test_the_longest_form_goes_first() -> None:
    """A value that another begins with leaves no rest of it."""
    secrets.remember(VALUE + "-and-more")
    assert secrets.redact(f"{VALUE}-and-more") == "***"
