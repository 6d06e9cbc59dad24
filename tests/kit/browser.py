"""Debian's Chromium without a screen, for the status page."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

NOWHERE_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A Chromium that may reach nothing but this machine; fails if there is none."""
    from playwright.sync_api import sync_playwright  # late: a third of a second of CPU

    path = shutil.which("chromium")
    assert path, "chromium is missing: run scripts/install-system-tools"
    with sync_playwright() as driver:
        running = driver.chromium.launch(
            executable_path=path,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
        )
        try:
            yield running
        finally:
            running.close()
