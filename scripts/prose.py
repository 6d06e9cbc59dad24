"""Looks over the prose of pages and code: `python -m scripts.prose`, a part of `make lint`.

Of the pages:

    a sentence of more than 45 words          nobody reads it once
    a word of `WORDS`                         the glossary has another, or the thing has a name
    a word twice in a row                     "the the"

Code, tables, links' targets and what programs have written between `begin` and `end` marks are left out.

Of the docstrings, also of fields, and the comments of the code:

    a text that begins with one of `BEGINS`   a fragment: nobody knows of what
    words of `CODE_WORDS`                     the thing, or its number, has a name

codespell checks the spelling, tests/test_names.py the retired public names.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "examples/README.md",
    ROOT / "dashboards/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
MOST = 45
"""Words of a sentence."""
WORDS = {
    r"stragglers?": "a slow request, or a late part",
    r"takeovers?": "hedge",
    r"allotments?": "memory budget or channel quota",
    r"tally|tallies": "counters",
    r"hears?|heard": "epoll reports it; the loop wakes",
    r"dawdle\w*": "idle clients",
    r"behind it": "after it",
    r"of ours": "Penstock's",
    r"in-flight requests?": "requests in flight",
    r"sub-channels?": "rank FIFO",
    r"incumbent\w*": "SageMaker's",
    r"simply|obviously|of course": "nothing: leave it out",
}
"""By pattern, what to write instead."""

ROOMS = ("streamer", "sidecar", "tests", "benchmarks", "scripts", "dashboards", "examples", "compat")
NOT_YET = re.compile(r"streamer/(?:plan/|relay/fetch/|s3/\w+\.py)")
"""Modules that are not looked over yet."""
BEGINS = "As|Do as|Of|The same"
CODE_WORDS = {
    r"[Ss]o many(?! \w+ that)": "the number, by its name",
    r"th(?:at|ose) of those": "the thing itself",
    r"(?:is|are|was|were) at(?! (?:most|least|fault|hand)\b)": "the state, or the place",
    r"c(?:omes?|oming|ame) to": "what happens",
    r"the begin": "the start",
    r"all the same": "still, nevertheless",
    r"(?<!there is )(?<!there are )none (?:is|are|was|were|has|have|does|do|may|can|will|of)": "no X is",
    r"(?<!there )(?:is|are|was|were) none": "is no X",
}
"""By pattern, what to write instead."""

_LEFT_OUT = re.compile(
    r"^```.*?^```$|<!-- (?P<name>\w+): begin.*?<!-- (?P=name): end -->|<!--.*?-->|<picture>.*?</picture>",
    re.MULTILINE | re.DOTALL,
)
_TESTS = re.compile(r"^Tests?: `tests/.*", re.DOTALL | re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)")
_SENTENCE = re.compile(r"(?<=[.:;!?]) +(?=[A-Z`(*])")
_WORD = re.compile(r"\w[\w'-]*")
_TWICE = re.compile(r"\b([a-z]{2,}) \1\b")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every paragraph and item, with code as `X` and links as their text."""
    blanked = _LEFT_OUT.sub(lambda match: "\n" * match[0].count("\n"), text)
    line = 1
    for piece in re.split(f"({_PARAGRAPH.pattern})", blanked):
        start = line + len(piece) - len(piece.lstrip("\n"))
        line += piece.count("\n")
        if not piece.strip() or piece.lstrip().startswith(("|", "#")):
            continue
        plain = _TESTS.sub("", piece)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        yield start, " ".join(re.sub(r"`[^`]*`", "X", plain).split())


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of every fault in a page's text."""
    for line, paragraph in paragraphs(text):
        for sentence in _SENTENCE.split(paragraph):
            if (count := len(_WORD.findall(sentence))) > MOST:
                yield line, f"a sentence of {count} words: {sentence[:60]}…"
        for pattern, instead in WORDS.items():
            if found := re.search(rf"\b(?:{pattern})\b", paragraph, re.IGNORECASE):
                yield line, f"{found[0]!r}: {instead}"
        if found := _TWICE.search(paragraph):
            yield line, f"{found[1]!r} twice"


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, of fields too, and of every comment."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    comment: list[str] = []
    end = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        if comment and not (alone and line == end + 1):
            yield end - len(comment) + 1, " ".join(comment)
            comment = []
        comment.append(token.string.lstrip("#"))
        end = line
    if comment:
        yield end - len(comment) + 1, " ".join(comment)


def code_faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of every fault in a module's docstrings and comments."""
    for line, text in texts(source):
        plain = " ".join(re.sub(r"`[^`]*`", "X", text).split())
        if found := re.match(rf"(?:{BEGINS})\b", plain):
            yield line, f"begins with {found[0]!r}: {plain[:60]}"
        for pattern, instead in CODE_WORDS.items():
            if found := re.search(rf"\b(?:{pattern})\b", plain):
                yield line, f"{found[0]!r}: {instead}"


def modules() -> list[Path]:
    """Return the modules whose prose is looked over."""
    found = sorted(path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py"))
    return [path for path in found if not NOT_YET.match(str(path.relative_to(ROOT)))]


def main() -> int:
    """Print every fault; the exit code is 1 if there is one."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for paths, look in ((PAGES, faults), (modules(), code_faults))
        for path in paths
        for line, fault in look(path.read_text())
    ]
    print("\n".join(found) or f"prose of {len(PAGES)} pages and {len(modules())} modules: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
