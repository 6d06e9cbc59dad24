"""Opens the origin's listening sockets, then becomes nginx: `listen.py ADDRESS COUNT CONFIG`.

nginx takes over listening sockets that its environment names (`NGINX=fd;fd;`, its own binary upgrade).
So ports are free ones of the kernel's choice, and connections are accepted from the moment that the
ports are known: nobody needs to guess when the server is up. Prints the ports as one line of JSON and
waits for a line on standard input, by which time CONFIG must be there. Run by path in a bare
interpreter, inside a network namespace where there is one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
BACKLOG = 1024


def main() -> None:
    address, count, config = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sockets = [socket.create_server((address, 0), backlog=BACKLOG, reuse_port=True) for _ in range(count)]
    sys.stdout.write(json.dumps([one.getsockname()[1] for one in sockets]) + "\n")
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
