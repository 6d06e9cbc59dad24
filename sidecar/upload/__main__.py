"""The uploader's process: `python -P -m sidecar.upload FD`; see `sidecar.upload.process`."""

from __future__ import annotations

import signal
import socket
import sys


def main() -> None:
    """Run the uploader at the socket with the descriptor FD."""
    # A terminal and a service manager send these to all; the sidecar decides when the uploader ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    from sidecar.process.resources import UPLOAD_PARTS
    from sidecar.process.runner import run
    from sidecar.upload.process import serve
    from streamer.linux import keep_free_memory, limit_heaps
    from streamer.s3.object_put import PART

    # Else each thread that reads keeps the memory of parts that it has read, which nobody has counted.
    limit_heaps(1)
    keep_free_memory(2 * PART, UPLOAD_PARTS * PART)
    run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
