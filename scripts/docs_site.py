"""Hooks of mkdocs: pages from outside docs/, and links that work both in the repository and on the site.

    CHANGELOG.md, examples/README.md ...  -> pages of the site (`ALSO`)
    [text](../examples/README.md#x)       -> the page of that file
    [text](../deploy/base)                -> the text alone, for files that are no pages (docs/design)
    <picture> of a light and a dark file  -> two images; the site's own switch shows one of them

Code in tables breaks only after dots, slashes and underlines (docs/stylesheets/site.css).

A link to a file that does not exist is not changed, so that mkdocs refuses it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ALSO = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "tutorials/demo.md": "examples/README.md",
    "how-to/dashboards.md": "dashboards/README.md",
    "how-to/compatibility.md": "compat/sagemaker_tensorflow/README.md",
}
"""Files outside docs/ that are pages of the site, by page."""
_PAGES = {source: page for page, source in ALSO.items()}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]*)</code>")
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)">\s*</picture>'
)
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def source_of(page: str) -> str:
    """Return the path in the repository of a page's file."""
    return ALSO.get(page, f"docs/{page}")


def link(text: str, target: str, *, page: str) -> str:
    """Return a link in the file of `page` as a link of the site."""
    if re.match(r"[a-z]+:|#", target):
        return f"[{text}]({target})"
    path, mark, anchor = target.partition("#")
    found = os.path.normpath(os.path.join(os.path.dirname(source_of(page)), path))
    if found in _PAGES:
        place = _PAGES[found]
    elif re.fullmatch(r"docs/(?!design/).+\.(md|json|png|svg)", found):
        place = found.removeprefix("docs/")
    elif f"{found}/README.md" in _PAGES:
        place = _PAGES[f"{found}/README.md"]
    elif (ROOT / found).exists():
        return text
    else:
        return f"[{text}]({target})"
    return f"[{text}]({os.path.relpath(place, os.path.dirname(page) or '.')}{mark}{anchor})"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of `ALSO`."""
    for page, source in ALSO.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite the links of a page, but not in blocks of code."""
    place = page.file.src_uri
    pieces = _FENCE.split(markdown)
    pieces[::2] = [
        switched(_LINK.sub(lambda m: link(m[1], m[2], page=place), piece)) for piece in pieces[::2]
    ]
    return "".join(pieces)


def switched(markdown: str) -> str:
    """Make pictures follow the site's light and dark switch; on GitHub they follow the reader's system."""
    return _PICTURE.sub(r"![\g<alt>](\g<light>#only-light) ![\g<alt>](\g<dark>#only-dark)", markdown)


def breakable(html: str) -> str:
    """Return HTML whose code in table cells may break within names, after dots, slashes and underlines."""

    def broken(code: re.Match[str]) -> str:
        return f"<code>{re.sub(r'(?<=[./_:=])(?=[^./_:=])', '<wbr>', code[1])}</code>"

    return _CELL.sub(lambda cell: _CODE.sub(broken, cell[0]), html)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Make the page's tables fit a narrow window."""
    return breakable(html)
