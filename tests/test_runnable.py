"""Commands that the pages show, run as they are.

A block under `<!-- file: NAME -->` is that file; one under `<!-- run -->` is run by bash, which must end with
0 and leave no process behind. All blocks of a page share one directory, in order. There are a bucket
`my-bucket`, credentials in the environment, and the repository's `deploy`, as the pages presuppose.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from examples.demo.dataset import channels
from examples.demo.server import free_ports
from tests.kit.stub import S3Stub
from tests.kit.warm_python import warm_python
from tests.test_docs import PAGES, ROOT

BLOCK = re.compile(
    r"^<!-- (?:run|file: (?P<file>\S+)) -->\n```\w+\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"^<!-- (?:file|run)\b", re.MULTILINE)
ENDING = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
"""A block that fails ends what it has started, which would hold its output open."""
RUNNABLE = [page for page in PAGES if MARK.search(page.read_text())]


def test_there_are_pages_to_run() -> None:
    assert {"README.md", "first-ten-minutes.md", "first-gpu-job.md", "resuming.md", "kubernetes.md"} <= {
        page.name for page in RUNNABLE
    }


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_every_marked_block_runs(
    page: Path, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(MARK.findall(text)), "a mark without its block"
    for channel in channels(megabytes=2, objects=2, seed=1):
        stub.objects |= {
            f"my-bucket/{channel.key(i)}": bytes(channel.shard(i)) for i in range(channel.objects)
        }
    images = ("images/cat/0", "images/cat/1", "images/dog/0", "val/cat/0", "val/dog/0")
    stub.objects |= {f"my-bucket/{key}.jpg": b"jpeg" for key in images}
    monkeypatch.setenv("AWS_ENDPOINT_URL", stub.url)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/penstock").write_text(f'#!/bin/sh\nexec {warm_python("none")} -m sidecar "$@"\n')
    (tmp_path / "bin/penstock").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    [port] = free_ports(1)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    for block in blocks:
        # A directory and a port of its own, so that runs side by side do not meet.
        body = block["body"].replace("/tmp/penstock-first", str(tmp_path / "first"))
        body = body.replace("9782", str(port))
        if block["file"]:
            (tmp_path / block["file"]).write_text(body)
            continue
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f'{ENDING}\n{body}\n[ -z "$(jobs -r)" ]'],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{body}{ran.stdout}{ran.stderr}"
        assert ran.stdout or ran.stderr
