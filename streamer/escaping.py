"""Escapes control characters in texts of others, such as keys, before a log or an error has them."""

from __future__ import annotations


def escape_control(text: str) -> str:
    r"""Return `text` with control characters as escapes (`\x1b`), so that a key cannot forge a log line.

    Unicode characters that change the direction of text are escaped too.
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
