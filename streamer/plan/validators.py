"""Tells two versions of an object apart: by their ETags, or by their times of modification.

A *validator* (RFC 9110 §8.8) is a text, which `ObjectRef.etag` has:

    9dd4e461268c8034f5c8564e155c67a6      an ETag, without quotes and `W/`
    modified 2026-11-23T21:56:26Z         a time, of an object that the server lists without an ETag

No ETag has a space, so the two cannot be confused. A listing names the time in ISO 8601, often with fractions
of a second, and a response in one of the three forms of RFC 9110 §5.6.7, whose unit is a second. So fractions
are dropped, and an object that is replaced twice within a second, by as many bytes, is not noticed.
"""

from __future__ import annotations

import re

_ETAG = re.compile(r"[!#-~]+")
_MODIFIED = "modified "
_TIME = "(?P<time>[0-9]{2}:[0-9]{2}:[0-9]{2})"
_LISTED = re.compile(rf"([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}})[T ]{_TIME}(?:\.[0-9]{{1,9}})?(?:Z|\+00:00)")
_SENT = re.compile(
    rf"[A-Z][a-z]{{2}}, (?P<day>[0-9]{{2}}) (?P<month>[A-Z][a-z]{{2}}) (?P<year>[0-9]{{4}}) {_TIME} GMT"
)
_RFC_850 = re.compile(
    rf"[A-Z][a-z]{{5,8}}, (?P<day>[0-9]{{2}})-(?P<month>[A-Z][a-z]{{2}})-(?P<year>[0-9]{{2}}) {_TIME} GMT"
)
_ASCTIME = re.compile(
    rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[0-9 ][0-9]) {_TIME} (?P<year>[0-9]{{4}})"
)
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
    if not time:
        return ""
    if match := _LISTED.fullmatch(time):
        return f"{_MODIFIED}{match[1]}T{match[2]}Z"
    match = _SENT.fullmatch(time) or _RFC_850.fullmatch(time) or _ASCTIME.fullmatch(time)
    if match is None or match["month"] not in _MONTHS:
        return ""
    year = match["year"]
    if len(year) == 2:
        year = f"{'19' if year >= '70' else '20'}{year}"
    month, day = _MONTHS.index(match["month"]) + 1, match["day"].replace(" ", "0")
    return f"{_MODIFIED}{year}-{month:02}-{day}T{match['time']}Z"


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
