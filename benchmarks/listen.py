"""Opens the origin's listening sockets, then becomes nginx: `listen.py ADDRESS COUNT WORKERS CONFIG`.

nginx takes over listening sockets that its environment names (`NGINX=fd;fd;`, its own binary upgrade).
So ports are free ones of the kernel's choice, and connections are accepted from the moment that the
ports are known: nobody needs to guess when the server is up. Every worker has one of its own for every
port (`reuseport`). Prints the ports as one line of JSON and waits for a line on standard input, by which
time CONFIG must be there. Run by path in a bare interpreter, inside a network namespace where there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
BACKLOG = 1024
CONGESTION_CONTROL = b"cubic"
"""Linux's default. BBR, which some machines have instead, goes by round trips. Over loopback, where they take
microseconds, a connection may be left to wait for a delayed acknowledgement, 40 ms each time."""


def main() -> None:
    address, count, workers, config = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    sockets = []
    ports = []
    for _ in range(count):
        port = 0
        for _ in range(workers):
            one = socket.create_server((address, port), backlog=BACKLOG, reuse_port=True)
            with contextlib.suppress(OSError):  # a kernel without it
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
            port = one.getsockname()[1]
            sockets.append(one)
        ports.append(port)
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return
    for one in sockets:
        one.set_inheritable(True)
        # nginx leaves inherited sockets as they are, and a worker would wait in accept() for a
        # connection that another one has taken, with all its own connections at a standstill.
        one.settimeout(0)
    # An origin must not outlive whoever started it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or "nginx"
    environment = {"NGINX": "".join(f"{one.fileno()};" for one in sockets)}
    os.execve(nginx, [nginx, "-c", config], environment)  # noqa: S606 - no shell wanted


if __name__ == "__main__":
    main()
