"""`python -m tests.servers`: every check on every server over every transport.

The last line says what ran, what Penstock refused by name and what failed. The exit status is 1 if a check
failed or a server did not start.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.report import insert_into
from tests.servers.checks import CHECKS, OVER_TLS, READ_ONLY, Broken, Refused, Site
from tests.servers.habits import HABITS, habits, s3
from tests.servers.report import (
    BEGIN,
    END,
    TRANSPORTS,
    Result,
    Tried,
    exit_status,
    keep,
    load,
    summary,
    table,
)
from tests.servers.servers import CACHE, KINDS, SERVERS, TLS, Server, Unavailable, kind, running


def judged(name: str, check: str, site: Site) -> Result:
    """Run one check of server `name`."""
    try:
        CHECKS[check](site)
    except Refused as refused:
        lacking = check in KINDS[kind(name)].lacks
        return Result(name, check, site.transport, "refused" if lacking else "failed", str(refused))
    except Broken as broken:
        return Result(name, check, site.transport, "failed", str(broken))
    except Exception as error:  # noqa: BLE001 - the other checks shall run
        return Result(name, check, site.transport, "failed", repr(error))
    return Result(name, check, site.transport, "passed")


def checked(name: str, server: Server, checks: list[str], transports: list[str]) -> Iterator[Result]:
    """Every check over every transport; checks that change nothing share a bucket."""
    if server.url.startswith("https"):
        transports = [transport for transport in transports if transport != "splice"]
    with closing(s3(server)) as client:
        for check in checks:
            bucket, filled = "", False
            for transport in transports:
                if not filled:
                    bucket = f"b{random.randrange(10**12)}"
                    client.create_bucket(Bucket=bucket)
                with tempfile.TemporaryDirectory() as directory:
                    site = Site(server, transport, client, bucket, Path(directory), filled)
                    filled = check in READ_ONLY
                    yield judged(name, check, site)


def tried(name: str, checks: list[str], transports: list[str]) -> Tried:
    """Start one server, learn its habits and run the checks. Raises Unavailable."""
    with running(name) as server:
        os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        began = time.monotonic()
        found = Tried(server.version, dt.datetime.now(dt.UTC).date().isoformat())
        for row, habit in habits(server):
            found.habits[row] = habit
            print(f"{name:<14} {row}: {habit}", flush=True)
        for result in checked(name, server, checks, transports):
            line = f"{name:<14} {result.check:<10} {result.transport:<9} {result.state} {result.text}"
            print(line.rstrip(), flush=True)
            found.results.append(result)
        print(f"{name:<14} {time.monotonic() - began:.0f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)}; default: all")
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="default: all")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--results", type=Path, default=CACHE / "results.json", metavar="FILE")
    parser.add_argument("--into", metavar="FILE", help="replace the table in this Markdown file")
    chosen = parser.parse_args()
    if unknown := set(chosen.servers) - set(SERVERS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    results: list[Result] = []
    unavailable: dict[str, str] = {}
    for name in chosen.servers or SERVERS:
        try:
            checks = chosen.check or list(OVER_TLS if name.endswith(TLS) else CHECKS)
            found = tried(name, checks, chosen.transport or list(TRANSPORTS))
        except Unavailable as error:
            unavailable[name] = str(error)
            print(f"{name:<14} not started: {error}", flush=True)
            continue
        results += found.results
        keep(chosen.results, name, found)
    if chosen.into:
        page = Path(chosen.into).read_text(encoding="utf-8")
        insert_into(chosen.into, table(load(chosen.results), HABITS, page), begin=BEGIN, end=END)
    print(summary(results, unavailable))
    return exit_status(results, unavailable)


if __name__ == "__main__":
    sys.exit(main())
