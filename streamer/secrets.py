"""Redacts secrets from every text that leaves the process.

The project passes no secret to a log call or an error. But an S3-compatible server may repeat request headers
in its response, a proxy's address may contain its password, and a library may put either into an error. So
foreign texts are redacted when they are wrapped in a Penstock error (`streamer.s3.client.faults`, whose texts
go to trailer, `/status` and log), and again when a line is written to log or standard error.

`redact` blanks the values that this process uses (`remember`), in every encoding that a request may have, and
text in the form of a secret, for secrets that the process does not use. Values of fewer than 8 characters are
not blanked, because they would match ordinary words.
"""

from __future__ import annotations

import base64
import os
import re
from urllib.parse import quote, unquote, urlsplit

from streamer.escaping import escape_control

SHORTEST_VALUE = 8
"""Minimum characters of a value that is blanked."""
MOST_FORMS = 256
"""Maximum number of encoded values kept, so that weeks of renewed credentials do not fill memory."""
BLANK = "***"
LONGEST_QUOTE = 1000
"""Maximum characters of a foreign text quoted in an error."""

_NAMES = (
    r"aws_?(?:access_?key_?id|secret_?access_?key|session_?token|security_?token)|accesskeyid|secretaccesskey"
    r"|secret_?key|sessiontoken|securitytoken|webidentitytoken|(?:proxy-)?authorization|password"
    r"|x-amz-(?:security-token|signature|credential|copy-source-server-side-encryption-customer-key"
    r"|server-side-encryption-customer-key)(?:-md5)?|signature"
)
_PATTERNS = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        # scheme://user:password@host
        (r"(?<=://)[^/\s@\"'<>]*:[^/\s\"'<>]*@", f"{BLANK}@"),
        # name: value, name=value, "name": "value"; after "authorization", the rest of the line
        (r"(\bauthorization\b\\?[\"']?\s*[:=]\s*)[^\"'<>\r\n\\]{4,}", rf"\1{BLANK}"),
        (rf"(\b(?:{_NAMES})\b\\?[\"']?\s*[:=]\s*\\?[\"']?)[^\s\"'&,;<>\\]{{4,}}", rf"\1{BLANK}"),
        (rf"(<({_NAMES})>)[^<]+(?=</\2>)", rf"\1{BLANK}"),
        # JSON Web Token (RFC 7519): the form of web identity and container tokens
        (r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*", BLANK),
    )
)
_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
)  # fmt: skip
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")

_forms: dict[str, None] = {}
_values: re.Pattern[str] | None = None


def remember(*values: str | bytes | None) -> None:
    """Make `redact` blank these values, also in base64, hex and URL encoding."""
    global _forms, _values  # noqa: PLW0603 - texts leave from everywhere, and secrets are the process's
    forms: dict[str, None] = {}
    for value in values:
        if not value:
            continue
        raw = value.encode() if isinstance(value, str) else value
        text = raw.decode("utf-8", "replace")
        if "\ufffd" not in text:
            forms |= dict.fromkeys((text, quote(text, safe=""), quote(text)))
        forms |= dict.fromkeys((base64.b64encode(raw).decode(), raw.hex()))
    forms = {form: None for form in forms if len(form) >= SHORTEST_VALUE}
    if forms.keys() <= _forms.keys():
        return
    merged = {form: None for form in _forms if form not in forms} | forms
    _forms = dict.fromkeys(list(merged)[-MOST_FORMS:])
    longest_first = sorted(_forms, key=len, reverse=True)
    _values = re.compile("|".join(map(re.escape, longest_first)))


def remember_environment() -> None:
    """`remember` the secrets in the variables of AWS clients and proxies.

    Those in files are remembered where the files are read (`streamer.s3.client.aws_files`).
    """
    values: list[str] = [os.environ.get(name, "") for name in _VARIABLES]
    for name in _PROXIES:
        for variable in (name, name.upper()):
            try:
                password = urlsplit(os.environ.get(variable, "")).password or ""
            except ValueError:
                continue
            values += [password, unquote(password)]
    remember(*values)


def redact(text: str) -> str:
    """Return `text` with its secrets blanked."""
    if _values is not None:
        text = _values.sub(BLANK, text)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def quoted(text: str) -> str:
    """Return a foreign text for use in an error: redacted, on one line, at most LONGEST_QUOTE characters."""
    line = escape_control(" ".join(redact(text[: 4 * LONGEST_QUOTE]).split()))
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}…"
