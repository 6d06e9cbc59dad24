"""Feeds a FIFO from a file by splice(2): `feeder.py FILE FIFO TIMES`. Run by path in a bare interpreter.

splice(2) moves pages of the page cache into the pipe without a copy, so that mostly the reader is measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

STEP = 1 << 20


def main() -> None:
    path, fifo, times = sys.argv[1:]
    target = os.open(fifo, os.O_WRONLY | os.O_CLOEXEC)
    with contextlib.suppress(PermissionError):  # the user's other pipes have all that the kernel allows him
        fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, STEP)
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(BrokenPipeError):
        for _ in range(int(times)):
            os.lseek(source, 0, os.SEEK_SET)
            while os.splice(source, target, STEP):
                pass


if __name__ == "__main__":
    main()
