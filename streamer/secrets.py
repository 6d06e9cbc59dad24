"""The last gate for texts that leave the process: what is secret in them is blanked.

No secret is passed to a log call or an error on purpose. But an S3-compatible server may repeat a request's
headers in its answer, a proxy's address may hold its password, and a library puts either into an error. So
what is foreign is looked through where it becomes an error of ours (`streamer.s3.client.faults`, whose texts
then reach trailer, `/status` and log), and every line of log and standard error once more.

Two nets: the values that this process has used (`remember`), in every form that a request gives them, and
the shapes that secrets come in, for those that it never learned. A value of fewer than 8 characters is not
looked for, since it would blank ordinary words.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote, urlsplit

LEAST = 8
"""Characters of a value that is looked for."""
MOST = 256
"""Forms of values that are kept; credentials that are renewed for weeks must not fill memory."""
BLANK = "***"
LONGEST = 1000
"""Characters of a text of somebody else's."""

_NAMES = (
    r"aws_?(?:access_?key_?id|secret_?access_?key|session_?token|security_?token)|accesskeyid|secretaccesskey"
    r"|secret_?key|sessiontoken|securitytoken|webidentitytoken|(?:proxy-)?authorization|password"
    r"|x-amz-(?:security-token|signature|credential|copy-source-server-side-encryption-customer-key"
    r"|server-side-encryption-customer-key)(?:-md5)?|signature"
)
_SHAPES = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        # scheme://user:password@host
        (r"(?<=://)[^/\s@\"'<>]*:[^/\s\"'<>]*@", f"{BLANK}@"),
        # name: value, name=value, "name": "value"; of an Authorization the rest of the line
        (r"(\bauthorization\b\\?[\"']?\s*[:=]\s*)[^\"'<>\r\n\\]{4,}", rf"\1{BLANK}"),
        (rf"(\b(?:{_NAMES})\b\\?[\"']?\s*[:=]\s*\\?[\"']?)[^\s\"'&,;<>\\]{{4,}}", rf"\1{BLANK}"),
        (rf"(<({_NAMES})>)[^<]+(?=</\2>)", rf"\1{BLANK}"),
        # a JSON Web Token (RFC 7519), as web identities and container tokens are
        (r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*", BLANK),
    )
)
_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
)  # fmt: skip
_FILES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LONGEST_FILE = 64 * 1024

_known: dict[str, None] = {}
_values: re.Pattern[str] | None = None


def remember(*values: str | bytes | None) -> None:
    """Have `redact` blank these from now on, also as base64 or a URL has them."""
    global _known, _values  # noqa: PLW0603 - texts leave from everywhere, and secrets are the process's
    forms: dict[str, None] = {}
    for value in values:
        if not value:
            continue
        raw = value.encode() if isinstance(value, str) else value
        text = raw.decode("utf-8", "replace")
        if "\ufffd" not in text:
            forms |= dict.fromkeys((text, quote(text, safe=""), quote(text)))
        forms |= dict.fromkeys((base64.b64encode(raw).decode(), raw.hex()))
    forms = {form: None for form in forms if len(form) >= LEAST}
    if forms.keys() <= _known.keys():
        return
    merged = {form: None for form in _known if form not in forms} | forms
    _known = dict.fromkeys(list(merged)[-MOST:])
    longest_first = sorted(_known, key=len, reverse=True)
    _values = re.compile("|".join(map(re.escape, longest_first)))


def remember_environment(environment: Mapping[str, str] = os.environ) -> None:
    """`remember` what AWS clients and proxies take from variables, or from the files that those name."""
    found: list[str] = [environment.get(name, "") for name in _VARIABLES]
    for name in _FILES:
        try:
            with open(environment.get(name, ""), encoding="utf-8") as file:
                found.append(file.read(_LONGEST_FILE).strip())
        except (OSError, ValueError):
            continue  # what cannot be read is not sent either
    for name in _PROXIES:
        for spelled in (name, name.upper()):
            try:
                password = urlsplit(environment.get(spelled, "")).password or ""
            except ValueError:
                continue
            found += [password, unquote(password)]
    remember(*found)


def redact(text: str) -> str:
    """`text` without what is secret in it."""
    if _values is not None:
        text = _values.sub(BLANK, text)
    for pattern, replacement in _SHAPES:
        text = pattern.sub(replacement, text)
    return text


def quoted(text: str) -> str:
    """What somebody else says, to stand within a text of ours: `redact`, in one line of a bounded length."""
    found = escape_control(" ".join(redact(text[: 4 * LONGEST]).split()))
    return found if len(found) <= LONGEST else f"{found[:LONGEST]}…"


def escape_control(text: str) -> str:
    r"""`text` on one line of a terminal: control characters as `\x1b`, so that a key cannot forge a line.

    Those of Unicode too that turn the direction of text around.
    """
    return "".join(char if _harmless(char) else _escaped(char) for char in text)


def _harmless(char: str) -> bool:
    code = ord(char)
    if code < 0x7F:
        return code >= 0x20
    return not (
        code < 0xA0 or 0x200E <= code <= 0x200F or 0x2028 <= code <= 0x202E or 0x2066 <= code <= 0x2069
        or 0xD800 <= code <= 0xDFFF
    )  # fmt: skip


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
