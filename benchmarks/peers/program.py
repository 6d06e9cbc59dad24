"""Runs foreign programs, one per stream, each with a FIFO as its standard output.

`program.py COMMANDS`: a JSON file with a list of {"fifo", "argv"}. Run by path in a bare interpreter, so that
its own size (about 10 MB) is less than the peak memory that it reports for its children. The kernel accounts
their peak memory and CPU time when they end; the program prints both as a line of JSON. Otherwise the
protocol is that of the other peers. SIGTERM ends the children first.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        commands = json.load(file)
    children: list[int] = []

    def stop(*_: object) -> None:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    _say("ready")
    if not sys.stdin.readline():
        return
    for command in commands:
        out = os.open(command["fifo"], os.O_WRONLY | os.O_CLOEXEC)
        children.append(
            os.posix_spawn(
                command["argv"][0],
                command["argv"],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)],
                setsigdef=[signal.SIGPIPE],
            )
        )
        os.close(out)
    cpu, memory, codes = 0.0, 0, []
    for pid in list(children):
        _, status, usage = os.wait4(pid, 0)
        children.remove(pid)
        cpu += usage.ru_utime + usage.ru_stime
        memory += usage.ru_maxrss * 1024
        codes.append(os.waitstatus_to_exitcode(status))
    _say(json.dumps({"cpu": cpu, "peak_rss": memory, "exit": codes}))
    sys.stdin.read()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
