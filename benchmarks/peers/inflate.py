"""Inflates what a peer writes: `inflate.py FROM TO`, two FIFOs. ISA-L, in a thread beside the writing one.

Prints `ready` and goes on when it is told to. It stops when the reader of TO leaves, and waits for the end of
its standard input, so that its CPU time can be read.
"""

from __future__ import annotations

import contextlib
import sys

from isal import igzip_threaded

BLOCK = 1 << 20


def main() -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    with (
        contextlib.suppress(BrokenPipeError),
        open(sys.argv[2], "wb", buffering=0) as target,
        igzip_threaded.open(sys.argv[1], "rb", threads=1) as source,  # type: ignore[no-untyped-call] # isal
    ):
        while data := source.read(BLOCK):
            left = memoryview(data)
            while left:
                left = left[target.write(left) :]
    sys.stdin.read()


if __name__ == "__main__":
    main()
