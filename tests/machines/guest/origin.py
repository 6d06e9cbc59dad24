"""Inside the guest: the S3 stub as a process, so that it can have a network namespace and no limits.

    python -m tests.machines.guest.origin ADDRESS DIRECTORY http|https CHANNELS OBJECTS BYTES

It serves channels `c0`, `c1` ... of bucket `b`, writes over TLS its authority's certificate into
DIRECTORY/ca.pem, prints its URL, and ends when its standard input does.
"""

from __future__ import annotations

import random
import ssl
import sys
from pathlib import Path

import trustme

from tests.kit.stub import StubThread


def content(channel: int, number: int, size: int) -> bytes:
    """The bytes of an object: the same in every process."""
    return random.Random(f"{channel} {number}").randbytes(size)


def main(address: str, place: str, scheme: str, *counts: str) -> None:
    directory, context = Path(place), None
    channels, objects, size = map(int, counts)
    if scheme == "https":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(address).configure_cert(context)
    thread = StubThread(context, host=address)
    thread.stub.objects |= {
        f"b/c{channel}/{number:04d}": content(channel, number, size)
        for channel in range(channels)
        for number in range(objects)
    }
    print(thread.start().url, flush=True)
    sys.stdin.read()
    thread.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
