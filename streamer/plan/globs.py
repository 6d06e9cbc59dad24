"""Compiles globs over keys into one regular expression.

A glob is compared with the key after the last `/` of the prefix that was listed, case-sensitively and as a
whole. The rules are those of .gitignore, for keys:

    no `/`          the name, which is the part after the key's last `/`: `*.tar` also selects `a/b/c.tar`
    a `/` within    the whole key after the prefix: `2024/*.tar` selects `2024/a.tar`, and not `x/2024/a.tar`
    `/` in front    likewise: `/*.tar` selects the keys without a further `/`
    `/` at the end  every key below a folder: `_temporary/` at any depth, `/a/` and `a/b/` below the prefix
    `*`, `?`        any characters but `/`; one character but `/`
    `[a-z]` `[!a]`  one character of a set, or outside of it; never `/`
    `**`            between slashes: any number of folders, none included; at the end: everything below
    backslash       takes the next character literally

Matching takes time linear in the length of the key for each glob: what stands between two `*` or two `**` is
matched at the first place where it fits, in an atomic group, which is never tried elsewhere. That finds every
match, since a later place leaves less of the key for the rest.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from streamer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_GLOB = 1024
"""Most characters of a glob; the length of the longest key."""
_TOKEN = re.compile(
    r"(?P<slash>\\?/)|\\(?P<escaped>.)|\[(?P<outside>[!^]?)(?P<set>.[^\]]*)\]|[^\\\[{}]", re.DOTALL
)
_MEMBER = re.compile(r"(.)-(.)|(.)", re.DOTALL)
"""A range of a set, or a single character."""
_REFUSED = {
    "\\": "it ends in a backslash; write two for the character itself",
    "[": "a [ has no ]; write [[] for the character itself",
    "{": "braces are no part of a glob; write one glob for each alternative",
    "}": "braces are no part of a glob; write one glob for each alternative",
}
"""By character that begins no token, why the glob is refused."""
_ANY = object()
"""Token of `*`."""
_Component = list[object]
"""What stands between two slashes: regular expressions of one character each, and `_ANY`."""


def compile_globs(globs: Sequence[str]) -> re.Pattern[str] | None:
    """Return the expression that fully matches what any of the globs selects; None for no glob.

    Raises ConfigError for a glob that breaks a rule.
    """
    if not globs:
        return None
    of_names: list[str] = []
    of_keys: list[str] = []
    for glob in globs:
        by_name, expression = _translate(glob)
        (of_names if by_name else of_keys).append(expression)
    if of_names:
        of_keys.append(f"(?>.*/)?+(?:{'|'.join(of_names)})")
    return re.compile("|".join(of_keys), re.DOTALL)


def _translate(glob: str) -> tuple[bool, str]:
    """Return whether a glob is compared with names alone, and its expression. Raises ConfigError."""
    if glob.startswith(("s3://", "https://")):
        raise _refused(
            glob, "it is compared with the key after the prefix; write it without bucket and prefix"
        )
    if glob.startswith("!"):
        raise _refused(glob, "a glob cannot be negated; put it into Exclude, or write [!] for the character")
    if len(glob) > LONGEST_GLOB:
        raise _refused(f"{glob[:40]}…", f"it has more than {LONGEST_GLOB} characters, and no key has")
    components = _components(glob)
    below = len(components) > 1 and not components[-1]
    if below:
        components.pop()
    anchored = len(components) > 1
    if anchored and not components[0]:
        components.pop(0)
    if not any(components):
        raise _refused(glob, "it names nothing; write ** for every key")
    if not anchored and not below and not _is_folders(components[0]):
        return True, _component(components[0])
    if not anchored and below:
        components.insert(0, [_ANY, _ANY])
    if below and not _is_folders(components[-1]):
        components.append([_ANY, _ANY])
    return False, _path(components)


def _components(glob: str) -> list[_Component]:
    """Split a glob at its slashes into components. Raises ConfigError."""
    components: list[_Component] = [[]]
    position = 0
    while position < len(glob):
        token = _TOKEN.match(glob, position)
        if token is None:
            raise _refused(glob, _REFUSED[glob[position]])
        position = token.end()
        if token["slash"]:
            components.append([])
        else:
            components[-1].append(_ANY if token[0] == "*" else _character(glob, token))
    for component in components:
        if not _is_folders(component) and (_ANY, _ANY) in pairwise(component):
            raise _refused(glob, "** stands between slashes, as in **/*.tar; within a name write *")
    return components


def _character(glob: str, token: re.Match[str]) -> str:
    """Return the expression of one character of a glob. Raises ConfigError."""
    if token[0] == "?":
        return "[^/]"
    members = token["set"]
    if members is None:
        return re.escape(token["escaped"] or token[0])
    if "/" in members:
        raise _refused(glob, "a set of characters cannot hold a slash")
    if "\\" in members or "[:" in members:
        why = (
            "a set has neither backslashes nor named classes; write a ] as its first character, digits as 0-9"
        )
        raise _refused(glob, why)
    expression = ""
    for low, high, single in _MEMBER.findall(members):
        if low > high:
            raise _refused(glob, f"the range {low}-{high} is empty; write {high}-{low}")
        expression += re.escape(single) if single else f"{re.escape(low)}-{re.escape(high)}"
    return f"[^/{expression}]" if token["outside"] else f"(?!/)[{expression}]"


def _is_folders(component: _Component) -> bool:
    """Return whether a component is `**`."""
    return len(component) == 2 and all(token is _ANY for token in component)


def _component(component: _Component) -> str:
    """Return the expression of a component without `**`."""
    runs = [""]
    for token in component:
        if token is _ANY:
            runs.append("")
        else:
            runs[-1] += str(token)
    if len(runs) == 1:
        return runs[0]
    first, *middle, last = runs
    return first + "".join(f"(?>[^/]*?{run})" for run in middle if run) + "[^/]*" + last


def _path(components: list[_Component]) -> str:
    """Return the expression of a whole key. `**` at the end also matches a key that ends in the slash."""
    expression, chunk, floating = "", "", False
    for number, component in enumerate(components):
        last = number == len(components) - 1
        if not _is_folders(component):
            chunk += _component(component) if last else f"(?>{_component(component)}/)"
            if not last:
                continue
        if floating:
            # The last chunk must end with the key; any other is taken at the first place where it fits.
            kind = "?:" if last and not _is_folders(component) else "?>"
            expression += f"({kind}(?:[^/]*/)*?{chunk})" if chunk else ""
        else:
            expression += chunk
        chunk, floating = "", True
    return expression + (".*" if _is_folders(components[-1]) else "")


def _refused(glob: str, why: str) -> ConfigError:
    return ConfigError(f"the glob {glob!r} is refused: {why}")
