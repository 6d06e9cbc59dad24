"""Looks over the prose of the pages: `python -m scripts.prose`, a part of `make lint`.

    a sentence of more than 45 words          nobody reads it once
    a word of `WORDS`                         the glossary has another, or the thing has a name
    a word twice in a row                     "the the"

Code, tables, links' targets and what programs have written between `begin` and `end` marks are left out.
codespell checks the spelling, tests/test_names.py the retired public names.
"""

from __future__ import annotations

import re
import sys
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


def main() -> int:
    """Print every fault; the exit code is 1 if there is one."""
    found = [
        f"{page.relative_to(ROOT)}:{line}: {fault}"
        for page in PAGES
        for line, fault in faults(page.read_text())
    ]
    print("\n".join(found) or f"prose of {len(PAGES)} pages: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
