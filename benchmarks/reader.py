"""The reader of one FIFO, the same for every client: `reader.py OPTIONS`, OPTIONS being JSON.

The reader reads into one reused buffer of 1 MiB and discards the bytes. With `hash` it hashes them first;
with `rate` (bytes per second) it waits between reads. It enlarges the pipe to 1 MiB for every client, so that
no client loses by not doing so. After `limit` seconds it stops and closes its end. It prints `ready`, takes
the FIFO's path from standard input, and prints its result as one line of JSON. Times are CLOCK_MONOTONIC,
which all processes share. Run by path in a bare interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import sys
import time

BUFFER = 1 << 20


def main() -> None:
    options = json.loads(sys.argv[1])
    rate = options.get("rate")
    digest = hashlib.sha256() if options.get("hash") else None
    buffer = bytearray(BUFFER)
    view = memoryview(buffer)
    _say("ready")
    path = sys.stdin.readline().rstrip("\n")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    started = time.monotonic()
    with contextlib.suppress(PermissionError):  # this user's pipes have all the pages that they may have
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, BUFFER)
    cut = False

    def time_up(*_: object) -> None:
        # Python repeats the interrupted read, which could wait for ever without O_NONBLOCK.
        nonlocal cut
        cut = True
        os.set_blocking(fd, False)

    signal.signal(signal.SIGALRM, time_up)
    signal.setitimer(signal.ITIMER_REAL, options["limit"])
    total = 0
    try:
        while not cut and (count := os.readv(fd, [buffer])):
            total += count
            if digest is not None:
                digest.update(view[:count])
            if rate and (ahead := total / rate - (time.monotonic() - started)) > 0:
                time.sleep(ahead)
    except BlockingIOError:
        pass  # the time limit has passed, and no byte had arrived
    signal.setitimer(signal.ITIMER_REAL, 0)
    ended = time.monotonic()
    os.close(fd)
    answer = {"bytes": total, "ended": ended, "cut": cut, "sha256": digest and digest.hexdigest()}
    _say(json.dumps(answer))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
