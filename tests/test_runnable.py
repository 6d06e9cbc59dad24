"""Commands that the pages show, run as they are.

A block under `<!-- file: NAME -->` is that file; one under `<!-- run -->` is run by bash, which must end with
0 and leave no process behind. All blocks of a page share one directory, in order. There are a bucket
`my-bucket` and credentials in the environment, as the pages presuppose. `<!-- run: repository -->` runs in
the repository itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig

import pytest

from examples.demo.dataset import channels
from tests.test_docs import PAGES, ROOT

BLOCK = re.compile(
    r"^<!-- (?P<mark>file|run)(?:: (?P<name>\S+))? -->\n```\w+\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"^<!-- (?:file|run)\b", re.MULTILINE)
RUNNABLE = [page for page in PAGES if MARK.search(page.read_text())]


def test_there_are_pages_to_run():
    assert {"README.md", "first-ten-minutes.md", "kubernetes.md"} <= {page.name for page in RUNNABLE}


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_every_marked_block_runs(page, stub, tmp_path, monkeypatch):
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(MARK.findall(text)), "a mark without its block"
    for channel in channels(megabytes=2, objects=2, seed=1):
        stub.objects |= {
            f"my-bucket/{channel.key(i)}": bytes(channel.shard(i)) for i in range(channel.objects)
        }
    monkeypatch.setenv("AWS_ENDPOINT_URL", stub.url)
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for block in blocks:
        if block["mark"] == "file":
            text = block["body"].replace("/tmp/penstock-first", str(tmp_path / "first"))
            (tmp_path / block["name"]).write_text(text)
            continue
        # The page's own directory, so that runs side by side do not meet.
        body = block["body"].replace("/tmp/penstock-first", str(tmp_path / "first"))
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f'{body}\n[ -z "$(jobs -r)" ]'],
            cwd=ROOT if block["name"] == "repository" else tmp_path,
            capture_output=True, text=True, check=False, timeout=50,
        )  # fmt: skip
        assert ran.returncode == 0, f"{body}{ran.stdout}{ran.stderr}"
        assert ran.stdout
