"""Every error says what to do, or docs/reference/errors.md does.

The texts are taken from the code, where they are raised.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

from sidecar.config.request import NO_FASTFILE
from streamer import errors
from streamer.s3.client import faults
from tests.test_docs import DOCS, ROOT, bare, table

RAISED = {
    name for name, found in vars(errors).items() if inspect.isclass(found) and issubclass(found, Exception)
}
HELPERS = {"_refuse", "_corrupt"}
"""Methods that raise one of them, with the text that they are given."""
SHOWN = ("sidecar", "streamer/readers")
"""Where a ValueError is a user's: pydantic makes errors of the job file of them; elsewhere they are bugs."""
LEAST = 10
"""Characters of its own that a text has, to be one: the rest is quoted from somewhere."""


def text(node: ast.expr) -> str:
    """A string's text; `…` stands for a value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def raised() -> Iterator[Any]:
    """(place, text) of every error that the code raises by itself."""
    for path in sorted([*ROOT.glob("streamer/**/*.py"), *ROOT.glob("sidecar/**/*.py")]):
        place = str(path.relative_to(ROOT))
        wanted = RAISED | HELPERS | {"RuleError"} | ({"ValueError"} if place.startswith(SHOWN) else set())
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            found = text(node.args[0])
            if name in wanted and len(re.sub(r"[…\W]", "", found)) >= LEAST:
                yield f"{place}:{node.lineno}", found
    for found in (*faults.EXPLANATIONS.values(), NO_FASTFILE):
        yield "a constant", found


REMEDY = re.compile(
    r"(?:^|[;:,] )(?:or |and |at most )?(?:if [^,;]*, )?"
    r"(?:add|ask|build|call|check|compress|correct|delete|divide|do|enable|end|free|give|go|install|leave|let|list|load"
    r"|lower|make|mend|name|narrow|pip|put|raise|read|remove|rename|renew|restart|restore|run|save|see|set|shorten"
    r"|split|start|stop|take|try|turn|unset|upload|use|wait|write)\b"
)
"""The imperative of a text that says what to do."""


ROWS = [bare(row[0]) for row in table(DOCS / "reference/errors.md", "Text", "Do")]


def test_every_error_has_a_row_or_says_what_to_do() -> None:
    errors_raised = list(raised())
    assert len(errors_raised) > 120
    absent = [
        f"{place}: {found!r}"
        for place, found in errors_raised
        if not REMEDY.search(found) and not any(row in found for row in ROWS)
    ]
    assert not absent, "no remedy in the text, and no row in docs/reference/errors.md"


def test_every_row_says_what_to_do() -> None:
    assert not [row for row, remedy in table(DOCS / "reference/errors.md", "Text", "Do") if not remedy]


def test_no_row_is_there_twice() -> None:
    assert sorted(ROWS) == sorted(set(ROWS))
