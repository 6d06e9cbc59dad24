"""One job of a seed: sidecars and trainer, killed again and again, each time at another number of ranks.

    seed ─▶ order, kills, runs    one S3 server and the record indexes for all seeds
    each run ─▶ `penstock run --resume` on each host ─ FIFOs ─▶ trainer, a process ─ global batches ─▶ here
    SIGKILL of trainer and sidecars after a drawn number of global batches, in a drawn order
    some sidecars get no state, or the one before the readers' own, as after a kill between checkpoint and
    state file
    the steps before the saved state are the job's; those after it are taken again

At the end the job's global batches must be those of the specification, each exactly once.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import asdict
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from streamer.formats import recordio, tfrecord
from tests.kit.processes import job, penstock, sidecar, write_job
from tests.kit.stepping import FILE, Training
from tests.kit.stub import S3Stub
from tests.machines.elastic.drawn import KINDS, RARE, TRAIN, Batches, Job, Run, keys


def made(kind: str, entry: int, count: int) -> bytes:
    """An object with the records `ENTRY/NUMBER/`, of many sizes."""
    names = [b"%d/%d/" % (entry, number) for number in range(count)]
    filled = [name + bytes(number * 7 % 90) for number, name in enumerate(names)]
    match kind:
        case "TFRecord":
            return b"".join(map(tfrecord.encode, filled))
        case "RecordIO":
            return b"".join(map(recordio.encode, filled))
        case "lines":
            return b"".join(each.replace(b"\0", b".") + b"\n" for each in filled)
        case "tar":
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode="w") as archive:
                for name, each in zip(names, filled, strict=True):
                    member = tarfile.TarInfo(name.decode() + FILE)
                    member.size = len(each)
                    archive.addfile(member, io.BytesIO(each))
            return file.getvalue() if count else b""
    return b"".join(name.ljust(64, b"\0") for name in names)


class Data:
    """The objects of many seeds, on a server, with their record indexes."""

    def __init__(self, stub: S3Stub, directory: Path) -> None:
        self.directory, self.url = directory, stub.url
        self.sizes: dict[str, list[int]] = {}
        for kind in KINDS:
            objects = [made(kind, entry, count) for entry, count in enumerate(TRAIN + RARE)]
            self.sizes[kind] = [*map(len, objects)]
            stub.objects |= {f"b/{key}": data for key, data in zip(keys(kind), objects, strict=True)}
            if kind.startswith("fixed"):
                continue
            document = job(self.url, None, f"b/{kind}/train/")
            document["InputDataConfig"][0]["Penstock"] = {"AlsoFrom": [f"s3://b/{kind}/rare/"]}
            path = write_job(directory / "index.yaml", document)
            options = "--to", self.index(kind), "--format", kind
            done = penstock("index", "build", "-c", path, *options)
            assert done.returncode == 0, done.stderr

    def index(self, kind: str) -> str:
        """The folder of the index of a format."""
        return str(self.directory / "index" / kind)


def run_job(drawn: Job, data: Data) -> Counter[str]:
    """Run a job to its end, through all its kills. Raises AssertionError if a global batch is not as due."""
    draw = random.Random(~drawn.seed)
    with tempfile.TemporaryDirectory(prefix=f"{drawn.seed}-", dir=data.directory) as directory:
        runner = _Runner(data, drawn, Path(directory))
        due, kept = drawn.due(data.sizes[drawn.kind]), Batches()
        for number, run in enumerate(drawn.runs):
            last = number + 1 == len(drawn.runs)
            limit = None if last else draw.randint(0, len(due) - len(kept))
            batches = runner.run(run, limit, draw)
            assert batches == due[len(kept) : len(kept) + len(batches)]
            kept += batches[: runner.saved(due) - len(kept)] if not last else batches
    assert kept == due, f"{len(kept)} global batches of {len(due)}, or others"
    ranks = [run.ranks for run in drawn.runs]
    resizes = sum(1 for before, after in pairwise(ranks) if before != after)
    records = sum(len(batch) for _, _, batch in due)
    counts = {"kills": len(ranks) - 1, "resizes": resizes, "late states": runner.late}
    counts |= {"global batches": len(due), "records": records}
    return drawn.names() + Counter(counts)


class _Runner:
    """Runs sidecars and trainer of one job."""

    def __init__(self, data: Data, drawn: Job, directory: Path) -> None:
        self._data, self._drawn, self._directory = data, drawn, directory
        self._state = directory / "state.json"
        self.late = 0
        """Runs whose sidecars got an older state than the readers."""

    def saved(self, due: Batches) -> int:
        """The number of global batches that the saved state has."""
        if not self._state.exists():
            return 0
        state = json.loads(self._state.read_text())
        return sum(1 for epoch, step, _ in due if (epoch, step) < (state["epoch"], state["step"]))

    def _job(self, run: Run, host: int) -> str:
        """Write the job file of a host; return its path."""
        drawn, kind = self._drawn, self._drawn.kind
        fields = {"MemoryBudget": "64MiB", "PartSize": "64KiB"}
        prefix = f"b/{kind.partition(':')[0]}/train/"
        document = job(self._data.url, self._directory / f"ml-{host}", prefix, **fields)
        channel = document["InputDataConfig"][0]
        channel["DataSource"]["S3DataSource"]["S3DataDistributionType"] = "ShardedByS3Key"
        ranks: dict[str, Any] = {"Count": run.ranks // run.hosts, "Copies": run.copies}
        ranks |= {"Workers": run.workers, "Fetch": run.fetch}
        records = {"Format": kind} | ({} if kind == "fixed:64" else {"Index": self._data.index(kind)})
        channel["Penstock"] = drawn.channel() | {"Ranks": drawn.ranks() | ranks, "Records": records}
        if run.joined:
            channel["Penstock"]["Join"] = "tar"
        if drawn.shuffle is not None:
            channel["ShuffleConfig"] = {"Seed": drawn.shuffle}
        return write_job(self._directory / f"job-{host}.yaml", document)

    def _late(self, run: Run, training: Training) -> Path:
        """The file that the sidecars get: the readers' own, or an older one if these load a state."""
        late = random.Random(f"{self._drawn.seed} {run} {training.saver} {training.save_every}").choice(
            ["", "", ".before", ".none"]
        )
        reads_state = training.load and not training.kind.endswith("tar")
        self.late += bool(late and reads_state and self._state.exists())
        return self._state.with_name(self._state.name + late) if reads_state else self._state

    def run(self, run: Run, limit: int | None, draw: random.Random) -> Batches:
        """Return the global batches that the trainer took: `limit` until the kill, or all to the end."""
        kind = {"lines": "TextLine"}.get(self._drawn.kind, self._drawn.kind)
        training = Training(
            str(self._state),
            epochs=self._drawn.epochs,
            save_every=draw.randint(1, 4),
            saver=draw.randrange(run.ranks * run.copies) * run.workers,
            load=draw.random() < 0.5,
            kind="Join: tar" if run.joined else kind,
            copies=run.copies,
            workers=run.workers,
            bases=[str(self._directory / f"ml-{host}") for host in range(run.hosts)],
        )
        trainer = [sys.executable, "-m", "tests.kit.stepping", json.dumps(asdict(training))]
        resumed = "--resume", str(self._late(run, training)), "--host-count", str(run.hosts)
        with contextlib.ExitStack() as stack:
            serving = [
                stack.enter_context(sidecar(self._job(run, host), *resumed, "--host-index", str(host)))
                for host in range(run.hosts)
            ]
            for each in serving:
                each.wait_for("ready")
            with subprocess.Popen(trainer, stdout=subprocess.PIPE, text=True) as training_run:
                assert training_run.stdout is not None
                lines = list(islice(training_run.stdout, limit))
                if limit is None:
                    assert training_run.wait() == 0, "the trainer failed"
                kills = [*(each.process.kill for each in serving), training_run.kill]
                draw.shuffle(kills)
                for kill in kills:
                    kill()
                lines += training_run.stdout  # of batches that were taken before the kill
        whole = (json.loads(line) for line in lines if line.endswith("\n"))
        return [(epoch, step, [*chain(*shares)]) for epoch, step, shares in whole]
