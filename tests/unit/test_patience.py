"""Deadlines end a test that hangs, and none that is slow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


SILENT = """
from tests.kit.patience import Patience
from threading import Event

patience = Patience(1)
assert not patience.exhausted()
while not patience.exhausted():
    Event().wait(1)
assert patience.exhausted()
"""


def test_silence_is_no_progress() -> None:
    """In a process of its own: servers that other tests use are children of this one."""
    subprocess.run([sys.executable, "-c", SILENT], cwd=ROOT, check=True)


TESTS = """
import asyncio, subprocess, sys, threading

BUSY = '''
from time import monotonic, process_time, sleep

end = monotonic() + 6
while monotonic() < end:
    until = process_time() + 0.01
    while process_time() < until:
        pass
    sleep(0.05)
'''

def test_slow():
    subprocess.run([sys.executable, "-c", BUSY], check=True)

def test_hangs():
    threading.Event().wait()

async def test_hangs_too():
    await asyncio.get_running_loop().create_future()
"""


def test_the_timer_of_every_test(tmp_path: Path) -> None:
    """Six seconds of work within a deadline of four pass; a wait for nothing fails.

    A machine that stalls for less than four seconds changes neither.
    """
    (tmp_path / "test_all.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--timeout=4", "-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert "3 failed, 1 passed" in done.stdout, done.stdout
    for name in ("test_hangs", "test_hangs_too[asyncio]", "test_hangs_too[uvloop]"):
        assert re.search(rf"test_all\.py::{re.escape(name)}(\n| - )", done.stdout), done.stdout
