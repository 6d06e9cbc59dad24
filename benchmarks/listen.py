"""Opens the origin's listening sockets, then becomes nginx: `listen.py ADDRESS COUNT WORKERS CONFIG`.

nginx takes over the listening sockets that its environment names (`NGINX=fd;fd;`, for binary upgrades). So
the kernel can choose free ports, and connections are accepted as soon as the ports are known. Every worker
has its own socket for every port (`reuseport`). The program prints the ports as one line of JSON and waits
for a line on standard input, before which CONFIG must be written. It is run by path in a bare interpreter, in
a network namespace if there is one.
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
"""Linux's default. BBR, which some machines use instead, measures round trips. Over loopback, where these
take microseconds, BBR may let a connection wait 40 ms for each delayed acknowledgement."""


def main() -> None:
    address, count, workers, config = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    sockets = []
    ports = []
    for _ in range(count):
        port = 0
        for _ in range(workers):
            one = socket.create_server((address, port), backlog=BACKLOG, reuse_port=True)
            with contextlib.suppress(OSError):  # the kernel may lack it
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
        # nginx does not make inherited sockets non-blocking. A worker would wait in accept() for a
        # connection that another worker has taken, and stop all its own connections.
        one.settimeout(0)
    # The origin must end with the process that started it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or "nginx"
    environment = {"NGINX": "".join(f"{one.fileno()};" for one in sockets)}
    os.execve(nginx, [nginx, "-c", config], environment)  # noqa: S606 - no shell wanted


if __name__ == "__main__":
    main()
