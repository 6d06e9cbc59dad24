"""The documentation as a site, and the pages that the program itself writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts import diagrams, docs_site, reference
from sidecar.config.job import Job
from streamer.errors import ConfigError
from tests.kit.browser import browser
from tests.test_docs import DOCS, PAGES, ROOT, blocks

SCHEMA = json.loads((DOCS / "reference/job.schema.json").read_text())


def test_the_generated_pages_are_those_of_the_program() -> None:
    stale = [
        name for name, text in reference.pages().items() if (reference.TARGET / name).read_text() != text
    ]
    assert not stale, "run: python -m scripts.reference"


def test_the_diagrams_are_those_of_the_script() -> None:
    """Light and dark of each, and the chart with the figures that the page has now."""
    stale = [
        name for name, text in diagrams.pictures().items() if (diagrams.TARGET / name).read_text() != text
    ]
    assert not stale, "run: python -m scripts.diagrams"


def test_a_picture_follows_the_switch_of_the_site() -> None:
    picture = (
        '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="../pictures/a-dark.svg">\n'
        '  <img alt="x" src="../pictures/a-light.svg">\n</picture>'
    )
    assert docs_site.switched(picture) == (
        "![x](../pictures/a-light.svg#only-light) ![x](../pictures/a-dark.svg#only-dark)"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: every page in the navigation, every link and anchor there."""
    site = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return site


@pytest.fixture(scope="module")
def pages(site: Path) -> Iterator[Any]:
    """A browser's page for sites on this machine's disk, and everything that went wrong in it."""
    with browser() as chromium:
        page, wrong = chromium.new_page(viewport={"width": 1280, "height": 800}), []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url[:5] == "file:" else wrong.append(request.url))
        yield page, wrong
        page.close()


def test_the_site_builds_without_a_warning(site: Path) -> None:
    for page in (*docs_site.ALSO, "how-to/kubernetes.md", "reference/command-line.md"):
        assert (site / page).with_suffix(".html").exists()
    assert (site / "reference/job.schema.json").exists()


def test_search_works_from_a_disk_and_asks_nobody(site: Path, pages: Any) -> None:
    page, wrong = pages
    page.goto((site / "reference/configuration.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("keeper")
    page.locator(".md-search-result__item a").first.wait_for()
    assert "architecture.html" in page.locator(".md-search-result__item a").first.get_attribute("href")
    assert wrong == []


NO_INDEX = 'var __index = {"config": {"lang": ["en"], "separator": " ", "pipeline": []}, "docs": []}'


def test_every_page_fits_a_telephone(site: Path, pages: Any) -> None:
    """What is too wide scrolls within the page, and every picture is there."""
    page, wrong = pages
    # Each page would index the whole site for its search, which nothing here needs.
    page.route("**/search/search_index.js", lambda route: route.fulfill(body=NO_INDEX))
    page.set_viewport_size({"width": 400, "height": 800})
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, path.name
            assert page.evaluate("[...document.images].every((each) => each.naturalWidth)"), path.name
    assert wrong == []


@pytest.mark.parametrize(
    ("target", "page", "becomes"),
    [
        ("reference/metrics.md#logs", "index.md", "[x](reference/metrics.md#logs)"),
        ("../../CHANGELOG.md#added", "reference/errors.md", "[x](../changelog.md#added)"),
        ("../../dashboards/README.md", "reference/metrics.md", "[x](../how-to/dashboards.md)"),
        ("../examples", "index.md", "[x](tutorials/demo.md)"),
        ("../how-to/tuning.md", "reference/configuration.md", "[x](../how-to/tuning.md)"),
        ("../LICENSE", "index.md", "x"),
        ("design/measured.md", "index.md", "x"),
        ("../docs/none.md", "index.md", "[x](none.md)"),
        ("none.md", "index.md", "[x](none.md)"),
        ("https://example.com/", "index.md", "[x](https://example.com/)"),
        ("#logs", "reference/metrics.md", "[x](#logs)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(target: str, page: str, becomes: str) -> None:
    assert docs_site.link("x", target, page=page) == becomes


def test_names_in_tables_may_break_within() -> None:
    text = (
        "<p><code>a.b</code></p><table><td><code>a.b_c/d</code> x.y</td></table><pre><code>e.f</code></pre>"
    )
    assert docs_site.breakable(text) == text.replace("a.b_c/d", "a.<wbr>b_<wbr>c/<wbr>d")


def shown() -> list[Any]:
    found = [(page.name, yaml.safe_load(body)) for page in PAGES for body in blocks(page, "yaml")]
    found += [(page.name, json.loads(body)) for page in PAGES for body in blocks(page, "json")]
    found += [(path.name, yaml.safe_load(path.read_text())) for path in ROOT.glob("deploy/**/penstock.yaml")]
    return [(name, document) for name, document in found if "InputDataConfig" in document]


def test_the_schema_takes_every_job_file_that_is_shown() -> None:
    documents = shown()
    assert len(documents) >= 8
    for name, document in documents:
        errors = list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(document))
        assert not errors, f"{name}: {errors[0].message}"


@pytest.mark.parametrize(
    "change",
    [
        {"Penstok": {}},
        {"InputDataConfig": []},
        {"Penstock": {"FifoMode": "9999"}},
        {"Penstock": {"RequestsInFlight": 0}},
        {"TrainingJobName": ""},
    ],
)
def test_the_schema_refuses_what_the_program_refuses(
    change: dict[str, dict[str, str]] | dict[str, dict[str, int]] | dict[str, str],
) -> None:
    document = dict(shown()[0][1]) | change
    with pytest.raises((ConfigError, ValueError)):
        Job.model_validate(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)
