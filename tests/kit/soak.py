"""A soak: channels on real sockets and FIFOs under seeded faults, every delivered byte against the truth.

    python -m tests.kit.soak --seed 1 --minutes 10      # until the time is over, or the first broken promise
    python -m tests.kit.soak --seed 4711 --runs 1       # one run again, as it was drawn
    python -m tests.kit.soak --seed 1 --log soak.jsonl  # a line of JSON for every run

A run draws everything from its seed alone (`trials`). Readers are `PipeStream`s in threads. For every epoch
one of these must hold, and anything else ends the soak with the seed:

    complete    the stream is that of the objects (as changed, where the policy allows it)
    abandoned   its reader left early, as drawn; what it got is a prefix of the truth
    failed      a fault that cannot be mended struck; the error names it; what was delivered is a prefix of
                the truth; the reader got an error, not an end
    refused     a listing that cannot be believed: no channel begins

Afterwards no descriptor, no thread and no process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import stamina.instrumentation
import trustme
import uvloop

from tests.kit.killed import run_killed
from tests.kit.proxy import TcpProxy, random_lines
from tests.kit.stub import S3Stub, StubThread
from tests.kit.trials import Trial
from tests.kit.verdicts import Account, Broken, Scene
from tests.kit.within import Run


@contextlib.contextmanager
def served(trial: Trial, directory: Path) -> Iterator[tuple[S3Stub, str, str | None]]:
    """A stub, behind a proxy if the trial has one; its address, and the certificate to trust."""
    context = bundle = None
    if trial.tls:
        authority = trustme.CA()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        bundle = str(directory / "ca.pem")
        authority.cert_pem.write_to_path(bundle)
    thread = StubThread(context)
    stub = thread.start()
    try:
        url = stub.url
        if not trial.proxied:
            yield stub, url, bundle
            return
        scheme, port = url.split("://")[0], int(url.rsplit(":", 1)[1])
        proxy = TcpProxy("127.0.0.1", port, lines=random_lines(trial.seed))
        proxy.start()
        try:
            yield stub, f"{scheme}://127.0.0.1:{proxy.port}", bundle
        finally:
            proxy.stop()
    finally:
        thread.stop()


def open_files() -> dict[str, str]:
    """This process's descriptors and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def run_trial(trial: Trial) -> Account:
    """One run; raises Broken, or what should never be raised."""
    files, threads = open_files(), threading.active_count()
    account = Account()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        directory = Path(name)
        with served(trial, directory) as (stub, url, bundle):
            scene = Scene(trial, stub, url, bundle, account)
            factory = uvloop.new_event_loop if trial.loop == "uvloop" else asyncio.new_event_loop
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(run_killed(scene, directory) if trial.kills else Run(scene).run(directory))
    account.runs += 1
    account.faults.update(scene.struck)
    gc.collect()  # a transport that was cut off is closed with its last reference
    now = open_files()
    if len(now) > len(files) or threading.active_count() > threads:
        left = {fd: what for fd, what in now.items() if files.get(fd) != what}
        raise Broken(f"descriptors {left} and {threading.active_count() - threads} threads are left")
    return account


def prepare() -> None:
    """What any process that runs trials needs: credentials, and no developer's settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "AKIDTEST",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
    stamina.instrumentation.set_on_retry_hooks([])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as first:
        first.run(asyncio.sleep(0))  # libuv makes one pipe for signals per process, at its first loop


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one is the next")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=sys.maxsize, help="at most")
    parser.add_argument("--log", help="append a line of JSON for every run to this file")
    parser.add_argument("--go-on", action="store_true", help="after a broken promise too; the exit code is 1")
    options = parser.parse_args()
    prepare()
    account, started, told = Account(), time.monotonic(), time.monotonic()
    seed, broken = options.seed, []
    while seed - options.seed < options.runs and time.monotonic() - started < 60 * options.minutes:
        trial, begun = Trial.draw(seed), time.monotonic()
        outcome, found = "kept", Account()
        try:
            found = run_trial(trial)
            account += found
        except BaseException as error:
            print(f"seed {seed}: {trial}", file=sys.stderr)
            if not options.go_on or not isinstance(error, Exception):
                raise
            print(f"seed {seed}: {error!r}", file=sys.stderr, flush=True)
            broken.append(seed)
            outcome = repr(error)
        if options.log:
            line = {"seed": seed, "outcome": outcome, "seconds": round(time.monotonic() - begun, 2)}
            with open(options.log, "a", encoding="utf-8") as file:
                file.write(json.dumps(line | vars(found) | {"features": trial.features}) + "\n")
        seed += 1
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{told - started:.0f} s: {account}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"seeds {options.seed} to {seed - 1}: {account}; peak memory {peak} MiB, test server included")
    if broken:
        print(f"promises broken by seeds {broken}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
