"""`python -m tests.servers`: every check on every server over every transport; exits 1 if anything broke."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config

from tests.servers.checks import CHECKS, READ_ONLY, Broken, Site, Told
from tests.servers.servers import SERVERS, Server

TRANSPORTS = ("kernel", "copying", "portable")


def verdict(name: str, site: Site, lacks: frozenset[str]) -> str:
    """`ok`; `told: ...` where the server lacks what is tried; else `BROKEN: ...`."""
    try:
        CHECKS[name](site)
    except Told as told:
        return f"told: {told}" if name in lacks else f"BROKEN: refused, {told}"
    except Broken as broken:
        return f"BROKEN: {broken}"
    except Exception as error:  # noqa: BLE001 - the other checks shall run
        return f"BROKEN: {error!r}"
    return "ok"


def tried(server: Server, checks: list[str], transports: list[str]) -> Iterator[tuple[str, str, str]]:
    """Check, transport and verdict of each."""
    os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    client: Any = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=server.url,
        verify=server.ca_bundle,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 8},
            request_checksum_calculation="when_required",
            max_pool_connections=16,
        ),
    )
    try:
        for check in checks:
            bucket, filled = "", False
            for transport in transports:
                if transport == "kernel" and server.url.startswith("https"):
                    continue
                if not filled:
                    bucket = f"b{random.randrange(10**12)}"
                    client.create_bucket(Bucket=bucket)
                with tempfile.TemporaryDirectory() as directory:
                    site = Site(server, transport, client, bucket, Path(directory), filled)
                    filled = check in READ_ONLY
                    yield check, transport, verdict(check, site, server.lacks)
    finally:
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)}; default: all")
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="default: all")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    chosen = parser.parse_args()
    if unknown := set(chosen.servers) - set(SERVERS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    broken = count = 0
    for name in chosen.servers or SERVERS:
        with SERVERS[name]() as server:
            began = time.monotonic()
            for check, transport, found in tried(
                server, chosen.check or list(CHECKS), chosen.transport or list(TRANSPORTS)
            ):
                print(f"{name:<10} {check:<10} {transport:<9} {found}", flush=True)
                count, broken = count + 1, broken + found.startswith("BROKEN")
            print(f"{name:<10} {time.monotonic() - began:.0f} s", flush=True)
    print(f"{count - broken} passed, {broken} failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
