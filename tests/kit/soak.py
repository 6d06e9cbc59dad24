"""A soak: channels on real sockets and FIFOs under seeded faults, every delivered byte against the truth.

    python -m tests.kit.soak --seed 1 --minutes 600     # a night; ends with every seed that broke a promise
    python -m tests.kit.soak --seed 4711 --runs 1       # one run again, as it was drawn
    python -m tests.kit.soak --seed 1 --only TLS        # the seeds that draw a feature, or several
    python -m tests.kit.soak --seed 1 --log soak.jsonl  # a line of JSON for every run

A run draws everything from its seed alone (`trials`). Readers are `PipeStream`s in threads. For every epoch
one of these must hold. Anything else, a run that hangs, and a process that dies is a broken promise; the
soak goes on in a new process (`seeds`) and ends with the list and exit code 1:

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
import itertools
import json
import os
import resource
import ssl
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

import trustme
import uvloop

from tests.kit.killed import run_killed
from tests.kit.outcomes import Account, Broken, Scene
from tests.kit.proxy import TcpProxy, random_lines
from tests.kit.seeds import Outcome, run_seeds, search
from tests.kit.stub import S3Stub, StubThread
from tests.kit.trials import Trial
from tests.kit.warm import warm
from tests.kit.within import Run

LONGEST_SEED = 200.0
"""Seconds after which the process of a run counts as hung: it should have ended the run by itself."""


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


def open_shared() -> None:
    """Open what a process opens once and keeps; `run_trial` would count it as the first trial's leak."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as first:
        first.run(asyncio.sleep(0))  # libuv makes one pipe for signals per process, at its first loop
    warm()


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
    open_shared()


def run_seed(seed: int) -> Account:
    """The trial that `seed` stands for; raises what it breaks."""
    return run_trial(Trial.draw(seed))


def chosen(seed: int, runs: int, features: Collection[str]) -> Iterator[int]:
    """Seeds from `seed` on, `runs` at most, whose trials have all of the features."""
    drawn = (each for each in itertools.count(seed) if {*features} <= {*Trial.draw(each).features})
    return itertools.islice(drawn, runs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one is the next")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=None, help="at most")
    parser.add_argument("--log", help="append a line of JSON for every run to this file")
    parser.add_argument(
        "--only", action="append", default=[], help="a feature that runs must have, such as TLS"
    )
    parser.add_argument("--stop", action="store_true", help="end with the first broken promise")
    options = parser.parse_args()
    seeds = chosen(options.seed, options.runs or sys.maxsize, options.only)
    run = partial(run_seeds, run_seed, limit=LONGEST_SEED, prepare=prepare)
    outcomes = run(seeds)
    searched = search(
        logged(outcomes, options.log) if options.log else outcomes,
        Account(),
        again="--seed {} --runs 1",
        minutes=options.minutes,
        stop=options.stop,
        drawn=Trial.draw,
        run_again=run,
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(f"peak memory {peak} MiB, test server included")
    print(f"exits by signal: {searched.died.total()} {dict(searched.died)}")
    return 1 if searched.broken else 0


def logged(outcomes: Iterable[Outcome], path: str) -> Iterator[Outcome]:
    """The same, each a line of JSON in the file."""
    for outcome in outcomes:
        line = {"seed": outcome.seed, "outcome": outcome.broken or "kept"}
        line |= {"seconds": round(outcome.seconds, 2), "features": Trial.draw(outcome.seed).features}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | vars(outcome.found or Account())) + "\n")
        yield outcome


if __name__ == "__main__":
    sys.exit(main())
