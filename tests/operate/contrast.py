"""Contrast of what a page shows, by WCAG 2.2 (1.4.3 for text, 1.4.11 for graphics), from computed styles.

The measuring runs in the browser: colours are those that the browser has computed, after media queries,
variables and `color-mix`. Translucent backgrounds are laid over what is below them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).with_name("contrast.js")
TEXT, GRAPHIC = 4.5, 3.0
"""Ratios that level AA demands."""


class Measured(NamedTuple):
    """One text or graphic of the page."""

    what: str
    ratio: float
    needed: float


def measure(page: Any, graphics: dict[str, str]) -> list[Measured]:
    """Measure every visible text and graphic against the background of the element that contains it.

    `graphics`: for each selector the CSS property with its colour.
    """
    found = page.evaluate(SCRIPT.read_text(encoding="utf-8"), graphics)
    return [Measured(what, ratio, TEXT if what.startswith("text ") else GRAPHIC) for what, ratio in found]
