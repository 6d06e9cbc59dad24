"""Tells two versions of an object apart: by their ETags, or by their times of modification.

A *validator* (RFC 9110 §8.8) is a text, which `ObjectRef.etag` has:

    9dd4e461268c8034f5c8564e155c67a6      an ETag, without quotes and `W/`
    modified 2026-11-23T21:56:26Z         a time, of an object that the server lists without an ETag

No ETag has a space, so the two cannot be confused. A listing names the time in ISO 8601, often with fractions
of a second, and a response in the form of RFC 9110 §5.6.7, whose unit is a second. So fractions are dropped,
and an object that is replaced twice within a second, by as many bytes, is not noticed.
"""

from __future__ import annotations

import re

_ETAG = re.compile(r"[!#-~]+")
_MODIFIED = "modified "
_TIME = "([0-9]{2}:[0-9]{2}:[0-9]{2})"
_LISTED = re.compile(rf"([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}})[T ]{_TIME}(?:\.[0-9]{{1,9}})?(?:Z|\+00:00)")
_SENT = re.compile(rf"(?:[A-Z][a-z]{{2}}), ([0-9]{{2}}) ([A-Z][a-z]{{2}}) ([0-9]{{4}}) {_TIME} GMT")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def is_etag(bare: str) -> bool:
    """Return whether a bare ETag is valid in a request's header (RFC 9110 §8.8.3, ASCII alone)."""
    return _ETAG.fullmatch(bare) is not None


def bare_etag(etag: str) -> str:
    """Return `etag` without the quotes and weakness mark of RFC 9110 §8.8.3, for comparison."""
    return etag.removeprefix("W/").strip('"')


def is_modified(validator: str) -> bool:
    """Return whether a validator is a time of modification."""
    return validator.startswith(_MODIFIED)


def modified(time: str | None) -> str:
    """Return the validator for a time as a listing or `Last-Modified` names it; empty if it is none."""
    if time and (match := _LISTED.fullmatch(time)):
        return f"{_MODIFIED}{match[1]}T{match[2]}Z"
    if time and (match := _SENT.fullmatch(time)) and match[2] in _MONTHS:
        day = f"{match[3]}-{_MONTHS.index(match[2]) + 1:02}-{match[1]}"
        return f"{_MODIFIED}{day}T{match[4]}Z"
    return ""


def validator_of(etag: str | None, last_modified: str | None) -> str:
    """Return the bare ETag; without one the time of modification; empty if neither is there."""
    return bare_etag(etag or "") or modified(last_modified)


def is_validator(text: str) -> bool:
    """Return whether the text is an ETag or a time of modification."""
    return is_etag(text) or (is_modified(text) and modified(text.removeprefix(_MODIFIED)) == text)


def described(validator: str) -> str:
    """Return the validator as errors name it."""
    return (
        f"Last-Modified {validator.removeprefix(_MODIFIED)}"
        if is_modified(validator)
        else f"ETag {validator}"
    )
