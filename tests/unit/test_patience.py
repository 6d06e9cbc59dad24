"""Deadlines end a test that hangs, and none that is slow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.kit.patience import LEAST_SHARE, MOST_PERIODS, Patience, cpu_seconds

ROOT = Path(__file__).parents[2]
BUSY = [sys.executable, "-c", "while True: pass"]


def advanced(before: float) -> None:
    """Wait until the processes have used enough CPU time for the wall time that has passed."""
    began = time.monotonic()
    while cpu_seconds() - before < 0.1 + 2 * LEAST_SHARE * (time.monotonic() - began):
        time.sleep(0.05)


def test_a_busy_child_is_progress_and_has_an_end() -> None:
    with subprocess.Popen(BUSY) as child:
        try:
            patience = Patience(0)
            for _ in range(MOST_PERIODS - 1):
                advanced(cpu_seconds())
                assert not patience.exhausted()
            advanced(cpu_seconds())
            assert patience.exhausted()
        finally:
            child.kill()


def test_a_child_that_has_ended_has_progressed() -> None:
    """Each of many short processes is gone when its CPU time is looked at."""
    patience, before = Patience(0), cpu_seconds()
    began = time.monotonic()
    while cpu_seconds() - before < 0.1 + 2 * LEAST_SHARE * (time.monotonic() - began):
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert not patience.exhausted()


def test_silence_is_no_progress() -> None:
    patience = Patience(1)
    assert not patience.exhausted()
    while not patience.exhausted():
        threading.Event().wait(1)
    assert patience.exhausted()


TESTS = """
import asyncio, subprocess, sys, threading, time

BUSY = [sys.executable, "-c", "from time import *\\nend = time() + 1.5\\nwhile time() < end: pass"]

def test_slow():
    subprocess.run(BUSY, check=True)

async def test_slow_too():
    assert await (await asyncio.create_subprocess_exec(*BUSY)).wait() == 0

def test_hangs():
    threading.Event().wait()

async def test_hangs_too():
    await asyncio.get_running_loop().create_future()
"""


def test_the_timer_of_every_test(tmp_path: Path) -> None:
    """A second and a half of work within a deadline of one passes; a wait for nothing fails."""
    (tmp_path / "test_all.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--timeout=1", "-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert "3 failed, 3 passed" in done.stdout, done.stdout
    for name in ("test_hangs", "test_hangs_too[asyncio]", "test_hangs_too[uvloop]"):
        assert re.search(rf"test_all\.py::{re.escape(name)}(\n| - )", done.stdout), done.stdout
