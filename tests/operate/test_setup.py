"""The scripts that `make` begins with say what is missing, and what to do."""

from __future__ import annotations

import ensurepip
import os
import shutil
import subprocess
import sys
from pathlib import Path

from examples.demo.server import free_ports
from tests.operate.promql import ROOT


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(command, env=names | environment, capture_output=True, text=True, check=False)


def test_a_pip_that_cannot_be_upgraded_is_an_error_by_name(tmp_path: Path) -> None:
    """The network has a certificate authority of its own; a new pip needs no upgrade."""
    (tmp_path / "scripts").mkdir()
    script = str(shutil.copy(ROOT / "scripts/make-venv", tmp_path / "scripts"))
    index = f"http://127.0.0.1:{free_ports(1)[0]}/simple"
    done = run(script, sys.executable, PIP_INDEX_URL=index, PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull)
    version = tuple(map(int, ensurepip.version().split(".")[:2]))
    assert (done.returncode == 0) is (version >= (25, 1)), done.stderr
    if done.returncode:
        assert "the pip of .venv is older than 25.1" in done.stderr
        assert "PIP_CERT=FILE" in done.stderr
        assert "no such option" not in done.stderr


def test_missing_tools_are_named_with_what_root_installs(tmp_path: Path) -> None:
    """Whoever is not root and has no sudo can install nothing."""
    for name in ("bash", "apt-get", "sed", "paste", "sort", "ldconfig", "grep"):
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        (tmp_path / name).symlink_to(found or "/bin/true")
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    script = (ROOT / "scripts/install-system-tools").read_text().replace("/usr/sbin:/sbin", "/nowhere")
    done = run(str(tmp_path / "bash"), "-c", script, PATH=str(tmp_path))
    assert done.returncode == 1
    missing, remedy = done.stderr.splitlines()
    assert missing.startswith("error: missing: prometheus promtool strace curl jq ip ethtool nginx chromium")
    assert "As root, once: apt-get install chromium fonts-dejavu-core curl ethtool iproute2" in remedy
