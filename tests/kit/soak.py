"""A soak: channels on real sockets and FIFOs under seeded faults, every delivered byte against the truth.

    python -m tests.kit.soak --seed 1 --minutes 10      # until the time is over, or the first broken promise
    python -m tests.kit.soak --seed 4711 --runs 1       # one run again, as it was drawn

A run draws, from its seed alone: transport, loop, TLS, objects, channels, epochs, window, policy, and the
weather. Readers are `PipeStream`s in threads. For every epoch one of these must hold, and anything else ends
the soak with the seed:

    complete    the stream's SHA-256 is that of the objects (as changed, where the policy allows it)
    failed      a fault that cannot be mended struck; the error names it; what was delivered is a prefix of
                the truth; the reader got an error, not an end
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gc
import hashlib
import os
import random
import resource
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import stamina.instrumentation
import trustme
import uvloop
from awscrt import checksums

from streamer.errors import StreamError
from streamer.plan import S3Uri
from streamer.readers.stream import PipeStream
from streamer.relay.changes import Changes, WhenChanged
from streamer.relay.channel import Channel
from streamer.relay.retry import RetryPolicy
from streamer.relay.transport import Wish, open_transport
from streamer.source.heads import PortableHeads
from streamer.source.integrity import Sums
from streamer.source.listing import plan_prefix
from streamer.source.session import Endpoint, open_clients
from streamer.units import MIB
from tests.kit.faults import PASSING, SPOILT, WRONG, Weather
from tests.kit.proxy import TcpProxy, random_lines
from tests.kit.stub import S3Stub, StubThread

LONGEST_RUN = 60.0
"""Seconds after which a run counts as hung."""

POLICY = RetryPolicy(give_up_after=30, first_wait=0.002, longest_wait=0.05)

STORED = "not those that were stored"

CAUSES = {
    "range": ("sent bytes", "Content-Range"),
    "no range": ("Content-Range",),
    "etag": ("replaced",),
    "gone": ("gone", "no such object"),
    "denied": ("access denied",),
    "replaced": ("replaced",),
    "newer": ("replaced",),
    "bit flip": (STORED,),
    "deleted for good": ("gone", "no such object"),
    "overwritten for good": ("replaced",),
}
"""What an error must say after a fault of that kind."""


@dataclass(frozen=True)
class Trial:
    """One run, drawn from its seed."""

    seed: int
    transport: Wish
    loop: str
    tls: bool
    proxied: bool
    sizes: tuple[tuple[int, ...], ...]
    """Of every channel's objects, bytes."""
    part_size: int
    connections: int | None
    budget: int
    epochs: int
    rates: dict[str, float]
    wrong: dict[str, float]
    policy: WhenChanged
    check: bool
    """Whether whole objects are compared with their checksums."""
    change: str
    """What happens to an object of the first channel in mid-job: nothing, deleted or overwritten."""

    @classmethod
    def draw(cls, seed: int) -> Trial:
        dice = random.Random(seed)
        tls = dice.random() < 0.25
        transport: Wish = dice.choice(
            ["portable", "copying"] if tls else ["portable", "copying", "kernel", "kernel"]
        )
        part_size = dice.choice([64 << 10, 100_000, 1 << 20, 3_000_000])
        channels = dice.choice([1, 1, 2, 3])
        whole = dice.choice([300_000, 2_000_000, 12_000_000])
        sizes = []
        for _ in range(channels):
            count = dice.randrange(1, 30)
            sizes.append(
                tuple(dice.choice([0, 1, dice.randrange(1 + 2 * whole // count)]) for _ in range(count))
            )
        rate = dice.choice([0.0, 0.02, 0.1, 0.3])
        kinds = dice.sample(sorted(PASSING), dice.randrange(1, len(PASSING)))
        check = transport != "kernel" and dice.random() < 0.4
        wrong = sorted(WRONG | (SPOILT if check else {}))
        return cls(
            seed=seed,
            transport=transport,
            loop=dice.choice(["asyncio", "uvloop"]),
            tls=tls,
            proxied=dice.random() < 0.4,
            sizes=tuple(sizes),
            part_size=part_size,
            connections=dice.choice([None, 1, 4, 16]),
            budget=channels * dice.choice([2, 3, 8]) * max(part_size, MIB) + channels * MIB,
            epochs=dice.randrange(1, 4),
            rates=dict.fromkeys(kinds, rate / len(kinds)),
            wrong={dice.choice(wrong): 0.01} if dice.random() < 0.3 else {},
            check=check,
            policy=dice.choice(["fail", "refetch", "skip"]),
            change=dice.choice(["nothing", "nothing", "deleted", "overwritten"]),
        )


@dataclass
class Account:
    """What runs have come to."""

    runs: int = 0
    bytes: int = 0
    epochs: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.bytes / 1e9:.2f} GB checked, epochs {dict(self.epochs)}, "
            f"faults {dict(self.faults)}, retries {dict(self.retries)}"
        )


class Broken(Exception):
    """A promise was not kept."""


def read_epoch(path: Path, dice: random.Random) -> tuple[bytes, str | None]:
    """The stream's bytes, and the reader's error if there was one."""
    got = bytearray()
    step = dice.choice([4096, 65536, 1 << 20])
    try:
        with PipeStream(path) as stream:
            while data := stream.read(step):
                got += data
    except StreamError as error:
        return bytes(got), str(error)
    return bytes(got), None


class Run:
    """One trial, on a stub."""

    def __init__(self, trial: Trial, stub: S3Stub, url: str, ca: str | None, account: Account) -> None:
        self.trial = trial
        self.stub = stub
        self.url = url
        self.ca = ca
        self.account = account
        self.dice = random.Random(f"{trial.seed} readers")
        self.truth: list[dict[str, bytes]] = []
        for number, sizes in enumerate(trial.sizes):
            content = random.Random(f"{trial.seed} {number}")
            self.truth.append(
                {f"b/c{number}/{i:03d}": content.randbytes(size) for i, size in enumerate(sizes)}
            )
            stub.objects |= self.truth[-1]
        stub.objects["b/c0/last"] = self.truth[0]["b/c0/last"] = b"end"
        self.good = Weather(trial.seed, trial.rates)
        self.bad = Weather(trial.seed + 1, trial.wrong, WRONG | SPOILT, spells=10**6)
        stub.weather = lambda *asked: self.bad(*asked) or self.good(*asked)
        self.changed: str | None = None
        self.now: bytes | None = None

    async def run(self, directory: Path) -> None:
        trial = self.trial
        endpoint = Endpoint(url=self.url, path_style=True, ca_bundle=self.ca)
        async with contextlib.AsyncExitStack() as stack:
            clients = await stack.enter_async_context(open_clients(endpoint, connections=64, stall_timeout=1))
            transport = await stack.enter_async_context(
                open_transport(
                    clients,
                    wish=trial.transport,
                    buckets={"b"},
                    channels=len(trial.sizes),
                    budget=trial.budget,
                    connections=trial.connections,
                    part_size=trial.part_size,
                    check=trial.check,
                )
            )
            heads = PortableHeads(clients.control)
            channels = []
            for number in range(len(trial.sizes)):
                plan = await plan_prefix(clients.control, S3Uri("b", f"c{number}/"))
                changes = Changes(trial.policy, heads.find)
                channel = Channel(
                    f"c{number}",
                    plan,
                    transport.source,
                    transport.stages(),
                    directory=str(directory),
                    policy=POLICY,
                    on_verdict=lambda trailer: self.account.epochs.update([trailer.verdict]),
                    changes=changes,
                    sums=Sums(clients.control, clients.credentials) if trial.check else None,
                )
                stack.callback(channel.close)
                channel.prepare()
                channels.append(channel)
            self._change()
            for name, data in self.stub.objects.items() if trial.check else ():
                said = base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()
                self.stub.checksums[name] = {"x-amz-checksum-crc64nvme": said}
            tasks = [asyncio.create_task(channel.run(), name=channel.name) for channel in channels]
            try:
                async with asyncio.timeout(LONGEST_RUN), asyncio.TaskGroup() as readers:
                    for number, channel in enumerate(channels):
                        readers.create_task(self._read(number, channel, directory))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for task in tasks:
                    if not task.cancelled() and (error := task.exception()) is not None:
                        raise Broken(f"{task.get_name()} ended with what no channel may raise") from error
            for channel in channels:
                self.account.retries.update(channel.statistics().retries)

    def _change(self) -> None:
        """Replace or delete an object of the first channel, before anything of it is read."""
        if self.trial.change == "nothing":
            return
        names = sorted(name for name, data in self.truth[0].items() if data)
        self.changed = self.dice.choice(names)
        if self.trial.change == "deleted":
            del self.stub.objects[self.changed]
        else:
            self.now = self.dice.randbytes(self.dice.randrange(400_000))
            self.stub.objects[self.changed] = self.now

    def _expected(self, number: int) -> bytes:
        """The whole epoch, as the channel's policy has it."""
        objects = dict(self.truth[number])
        if number == 0 and self.changed is not None and self.trial.policy != "fail":
            if self.trial.policy == "skip":
                del objects[self.changed]
            elif self.now is not None:
                objects[self.changed] = self.now
        return b"".join(data for _, data in sorted(objects.items()))

    async def _read(self, number: int, channel: Channel, directory: Path) -> None:
        truth = self._expected(number)
        for epoch in range(self.trial.epochs):
            got, error = await asyncio.to_thread(read_epoch, directory / f"c{number}_{epoch}", self.dice)
            self.account.bytes += len(got)
            lenient = self.trial.policy != "fail" and any(self.bad.struck.values())
            if error is None:
                if hashlib.sha256(got).digest() != hashlib.sha256(truth).digest() and not (
                    lenient and self._is_made_of_objects(number, got)
                ):
                    raise Broken(f"c{number}_{epoch} is complete with {len(got)} wrong bytes of {len(truth)}")
                continue
            if (
                STORED not in error
                and not truth.startswith(got)
                and not (lenient and self._is_made_of_objects(number, got))
            ):
                raise Broken(f"c{number}_{epoch} failed after bytes that are not the truth's")
            self._judge(number, channel, error)
            return

    def _is_made_of_objects(self, number: int, got: bytes) -> bool:
        """Whether it is whole objects in order, some skipped, and at its end a piece of one.

        Faults strike at random, so which objects a policy left out is not known beforehand.
        """
        names = sorted(self.truth[number])
        reachable = {0}
        for name in names:
            bodies = [self.truth[number][name]]
            if name == self.changed and self.now is not None:
                bodies.append(self.now)
            for at in tuple(reachable):
                for body in bodies:
                    if got.startswith(body, at):
                        reachable.add(at + len(body))
                    elif body.startswith(got[at:]):
                        return True
        return len(got) in reachable

    def _judge(self, number: int, channel: Channel, error: str) -> None:
        """A failure must be deserved, and must say by what."""
        causes = [CAUSES[kind] for kind in self.bad.struck]
        if (
            number == 0
            and self.changed is not None
            and (self.trial.policy == "fail" or (self.trial.policy == "refetch" and self.now is None))
        ):
            causes.append(CAUSES[f"{self.trial.change} for good"])
        if not any(word in error for words in causes for word in words):
            raise Broken(f"{channel} failed for no reason that was given to it: {error}")


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


def run_trial(trial: Trial, account: Account) -> None:
    """Raises Broken, or what should never be raised."""
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        directory = Path(name)
        with served(trial, directory) as (stub, url, bundle):
            run = Run(trial, stub, url, bundle, account)
            factory = uvloop.new_event_loop if trial.loop == "uvloop" else asyncio.new_event_loop
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(run.run(directory))
    account.runs += 1
    account.faults.update(run.good.struck)
    account.faults.update(run.bad.struck)
    if trial.change != "nothing":
        account.faults[trial.change] += 1
    gc.collect()  # a transport that was cut off is closed with its last reference
    left = len(os.listdir("/proc/self/fd")) - descriptors
    if left > 0 or threading.active_count() > threads:
        raise Broken(f"{left} descriptors and {threading.active_count() - threads} threads are left")


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
    options = parser.parse_args()
    prepare()
    account, started, told = Account(), time.monotonic(), time.monotonic()
    seed = options.seed
    while account.runs < options.runs and time.monotonic() - started < 60 * options.minutes:
        trial = Trial.draw(seed)
        try:
            run_trial(trial, account)
        except BaseException:
            print(f"seed {seed}: {trial}", file=sys.stderr)
            raise
        seed += 1
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{told - started:.0f} s: {account}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"seeds {options.seed} to {seed - 1}: {account}; peak memory {peak} MiB, test server included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
