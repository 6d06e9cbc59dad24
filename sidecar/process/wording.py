"""What the user calls a setting: an option, a variable of the environment, or a key of the job file.

Texts name keys of the job file, such as `Penstock.Endpoint.Url`, wherever the value came from. A command
notes that once, and `spelled` puts the user's own names into a text on its way to the terminal or the log.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

VARIABLES = {
    "Endpoint.Url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "Endpoint.Region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "Endpoint.CaBundle": ("AWS_CA_BUNDLE",),
    "Endpoint.Profile": ("AWS_DEFAULT_PROFILE", "AWS_PROFILE"),
}
"""By key, the variables that have its value if the key is left out; the first that is set counts."""
_names: dict[str, str] = {}
"""By key of the job file, the user's own name."""
_settled: set[str] = set()
"""Keys that an option, a variable or the job file has given."""
_KEYS = re.compile(
    r"(?:Penstock\.)?((?:Endpoint\.)?[A-Z][A-Za-z0-9]+)\b"
    r"(: (?:true|false)\b|: (?=omit\b|[a-z]+-[a-z]+-[0-9]))?"
)


def settings_came_from(given: Collection[str], options: Mapping[str, str] | None = None) -> None:
    """Note the keys that the user has given, and the option of each key if there is no job file."""
    _names.clear()
    _names.update(options or {})
    _settled.clear()
    _settled.update(given)
    for key, variables in VARIABLES.items():
        if key not in given and (name := next((each for each in variables if os.environ.get(each)), None)):
            _names[key] = name
            _settled.add(key)


def settings_of_profile(names: Mapping[str, str]) -> None:
    """Note the names of the settings that a profile has, by their keys, unless they are given otherwise."""
    _names.update({key: name for key, name in names.items() if key not in _settled})


def spelled(text: str) -> str:
    """Return the text with the user's own names of settings."""
    return _KEYS.sub(_named, text) if _names else text


def _named(match: re.Match[str]) -> str:
    if (name := _names.get(match[1])) is None:
        return match[0]
    value = match[2] or ""
    if name.startswith("--") and value == ": false":
        return f"--no-{name.removeprefix('--')}"
    if name.startswith("--"):
        return name + value.removeprefix(":").removesuffix(" true")
    return name + value.replace(": ", "=")
