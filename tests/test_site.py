"""The documentation as a site, and the pages that the program itself writes."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest
import yaml

from scripts import docs_site, reference
from sidecar.config import Job
from streamer.errors import ConfigError
from tests.test_docs import DOCS, PAGES, ROOT, blocks

SCHEMA = json.loads((DOCS / "reference/job.schema.json").read_text())


def test_the_generated_pages_are_those_of_the_program():
    stale = [
        name for name, text in reference.pages().items() if (reference.TARGET / name).read_text() != text
    ]
    assert not stale, "run: python -m scripts.reference"


def test_the_site_builds_without_a_warning(tmp_path):
    """Strictly: every page in the navigation, every link and anchor there."""
    site = tmp_path / "site"
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for page in (*docs_site.ALSO, "kubernetes.md", "reference/command-line.md"):
        assert (site / page).with_suffix(".html").exists()
    assert (site / "reference/job.schema.json").exists()


@pytest.mark.parametrize(
    ("target", "page", "becomes"),
    [
        ("docs/metrics.md#logs", "index.md", "[x](metrics.md#logs)"),
        ("../README.md#exit-codes", "troubleshooting.md", "[x](index.md#exit-codes)"),
        ("../dashboards/README.md", "metrics.md", "[x](dashboards.md)"),
        ("examples", "index.md", "[x](demo.md)"),
        ("../configuration.md", "reference/job-file.md", "[x](../configuration.md)"),
        ("LICENSE", "index.md", "x"),
        ("docs/none.md", "index.md", "[x](none.md)"),
        ("none.md", "index.md", "[x](none.md)"),
        ("https://example.com/", "index.md", "[x](https://example.com/)"),
        ("#logs", "metrics.md", "[x](#logs)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(target, page, becomes):
    assert docs_site.link("x", target, page=page) == becomes


def shown():
    found = [(page.name, yaml.safe_load(body)) for page in PAGES for body in blocks(page, "yaml")]
    found += [(page.name, json.loads(body)) for page in PAGES for body in blocks(page, "json")]
    found += [(path.name, yaml.safe_load(path.read_text())) for path in ROOT.glob("deploy/**/penstock.yaml")]
    return [(name, document) for name, document in found if "InputDataConfig" in document]


def test_the_schema_takes_every_job_file_that_is_shown():
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
        {"Penstock": {"Connections": 0}},
        {"TrainingJobName": ""},
    ],
)
def test_the_schema_refuses_what_the_program_refuses(change):
    document = dict(shown()[0][1]) | change
    with pytest.raises((ConfigError, ValueError)):
        Job.model_validate(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)
