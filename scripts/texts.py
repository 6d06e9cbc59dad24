"""Prints every error text with its cause, its remedy and its exit code: `python -m scripts.texts`.

The table comes from the code: a text and its class from the call that makes the error, the cause from the
docstring of the class, the exit code from `sidecar.process.exits`. The remedy is the imperative in the text,
or the row of docs/reference/errors.md that the text contains. A text without either fails the suite. So a new
text needs nothing here: write what to do into it, or add a row.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sidecar.config.request import NO_FASTFILE
from sidecar.process.exits import Exit, exit_code
from streamer import errors
from streamer.s3.client.faults import EXPLANATIONS, error_from_response

ROOT = Path(__file__).parent.parent
CLASSES: dict[str, type[errors.PenstockError]] = {
    name: found
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, errors.PenstockError)
}
HELPERS = {
    "_refuse": errors.SinkError,
    "_corrupt": errors.CorruptRecord,
    "RuleError": errors.ConfigError,
    "fail": errors.ConfigError,
    "UsageError": errors.ConfigError,
}
"""Functions that raise an error with the text that they are given, and its class or one of the same code."""
SHOWN = ("sidecar", "streamer/readers")
"""Where a ValueError is a user's: pydantic makes errors of the job file of them; elsewhere they are bugs."""
LEAST = 10
"""Characters of its own that a text has, to be one: the rest is quoted from somewhere."""
REMEDY = re.compile(
    r"(?:^|[;:,] )(?:or |and |at most )?(?:if [^,;]*, )?"
    r"(?:add|ask|build|call|check|compress|correct|delete|divide|do|enable|end|free|give|go|install|leave|let|list|load"
    r"|lower|make|mend|name|narrow|pip|put|raise|read|remove|rename|renew|restart|restore|run|save|see|set|shorten"
    r"|split|start|stop|take|try|turn|unset|upload|use|wait|write)\b"
)
"""The imperative of a text that says what to do."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text; `…` stands for a value."""

    place: str
    """File and line of the call."""
    text: str
    kind: type[BaseException]

    @property
    def cause(self) -> str:
        """First sentence about the class."""
        return (inspect.getdoc(self.kind) or "").split("\n")[0].partition(". ")[0].rstrip(".")

    @property
    def remedy(self) -> str:
        """What to do; empty if nothing says it."""
        if own := REMEDY.search(self.text):
            return self.text[own.start() :].lstrip(";:, ")
        return next((do for row, do in explained() if row in self.text), "")

    @property
    def code(self) -> Exit | None:
        """Exit code of a command that the error ends; None for an error of a reader."""
        if issubclass(self.kind, (errors.StreamError, errors.ChannelError)) or "/readers/" in self.place:
            return None
        if not issubclass(self.kind, errors.PenstockError):
            return Exit.CONFIG
        return exit_code(self.kind.__new__(self.kind))


@cache
def explained() -> list[tuple[str, str]]:
    """Return the rows of docs/reference/errors.md: a part of a text, and what to do."""
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \| (.*?) \|$", page, re.MULTILINE)


def texts_of(node: ast.expr, tree: ast.AST) -> list[str]:
    """Return the texts that an expression may be; `…` stands for a value. `tree` assigns its variables."""
    match node:
        case ast.JoinedStr():
            parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            return ["".join(parts)]
        case ast.Constant(value=str() as text):
            return [text]
        case ast.BinOp(op=ast.Add()):
            return [one + more for one in texts_of(node.left, tree) for more in texts_of(node.right, tree)]
        case ast.IfExp():
            return texts_of(node.body, tree) + texts_of(node.orelse, tree)
        case ast.Name():
            assigned = (
                each.value
                for each in ast.walk(tree)
                if isinstance(each, ast.Assign)
                and [target.id for target in each.targets if isinstance(target, ast.Name)] == [node.id]
                and isinstance(each.value, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp))
            )
            return [text for value in assigned for text in texts_of(value, ast.Pass())] or ["…"]
    return ["…"]


def raised() -> Iterator[Text]:
    """Yield every error text of the code."""
    for path in sorted([*ROOT.glob("streamer/**/*.py"), *ROOT.glob("sidecar/**/*.py")]):
        place = str(path.relative_to(ROOT))
        kinds: dict[str, type[BaseException]] = {**CLASSES, **HELPERS}
        kinds |= {"ValueError": ValueError} if place.startswith(SHOWN) else {}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [
            each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        inside = {id(node): function for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            for found in texts_of(node.args[0], inside.get(id(node), ast.Pass())) if name in kinds else ():
                if len(re.sub(r"[…\W]", "", found)) >= LEAST:
                    yield Text(f"{place}:{node.lineno}", found, kinds[name])
    for code, found in EXPLANATIONS.items():
        error = error_from_response(
            status=int(code) if code.isdigit() else 403, code=code, message="", fields={},
            context=errors.ErrorContext("b", "k"),
        )  # fmt: skip
        yield Text(f"S3's {code}", found, type(error))
    yield Text("sidecar/config/request.py", NO_FASTFILE, errors.ConfigError)


def main() -> None:
    """Print the table."""
    print("| Text | Cause | Do | Exit code | Raised at |\n|---|---|---|---|---|")
    for each in raised():
        code = "the trainer's" if each.code is None else f"{each.code:d} {each.code.name}"
        cells = f"`{each.text}`", each.cause, each.remedy, code, each.place
        print(f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in cells)} |")


if __name__ == "__main__":
    main()
