"""The server: a process of its own, one thread a connection. A bucket's name says which fault it has.

    good-N                       none
    fault-NUMBER-OPERATION-N     the fault of that number, at each request of that operation
    once-NUMBER-OPERATION-N      the same at the first of them alone

`N` tells cells apart. Ports: plain, TLS, then one for each fault of the TLS handshake; the process prints
them as JSON and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable

import trustme

from tests.kit.raw import requests
from tests.machines.hostile.faults import BELOW, FAULTS
from tests.machines.hostile.wire import Wire, operation_of, right

_struck: Counter[str] = Counter()
_lock = threading.Lock()
NAMES = list(FAULTS)


def _struck_by(bucket: str, operation: str) -> str | None:
    """The fault for this request, if there is one."""
    kind, _, rest = bucket.partition("-")
    if kind not in ("fault", "once"):
        return None
    number, context, _ = rest.split("-")
    if context.lower() != operation.lower():
        return None
    with _lock:
        _struck[bucket] += 1
        if kind == "once" and _struck[bucket] > 1:
            return None
    return NAMES[int(number)]


def serve(sock: socket.socket) -> None:
    """One connection to its end."""
    wire = Wire(sock)
    sock.settimeout(Wire.PATIENCE * 4)
    for request in requests(sock):
        response = right(request)
        name = _struck_by(request.bucket, operation_of(request))
        if name is None:
            wire.send(response.header() + response.sent_body())
            continue
        wire.until = time.monotonic() + Wire.PATIENCE
        if not FAULTS[name](wire, response):
            return


def _accept(listening: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    def one(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ValueError):
            handle(sock)

    while True:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            print(f"accept: {error}", file=sys.stderr, flush=True)
            time.sleep(0.05)
            continue
        threading.Thread(target=one, args=(sock,), daemon=True).start()


def main() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    def over_tls(sock: socket.socket) -> None:
        sock.settimeout(Wire.PATIENCE)
        with context.wrap_socket(sock, server_side=True, suppress_ragged_eofs=True) as secure:
            serve(secure)

    ports = []
    for handle in (serve, over_tls, *BELOW.values()):
        listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        ports.append(listening.getsockname()[1])
        threading.Thread(target=_accept, args=(listening, handle), daemon=True).start()
    with tempfile.NamedTemporaryFile(suffix=".pem") as bundle:
        bundle.write(authority.cert_pem.bytes())
        bundle.flush()
        print(json.dumps({"ports": ports, "bundle": bundle.name}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
