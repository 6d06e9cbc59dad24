"""Runs Penstock's main job from end to end: `python -m examples.demo` or `make demo`.

    weed mini  <--upload--  seed                  a real S3 server, with new random credentials
        |
        | ranged GETs, signed
        v
    penstock run  --FIFOs-->  train               the trainer: a process without credentials
        |                       |
     /status, trailers       result.json          the results that are compared at the end

Every step starts after the one before it has ended: the sidecar's start at its log event `ready`, the
trainer's at its exit. All files are in one temporary directory, which is always removed at the end. The exit
code is 0 if every condition of `report` held, 1 if one did not or a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from examples.demo.processes import (
    ROOT,
    DemoFailed,
    bare_environment,
    penstock,
    run_trainer,
    running_sidecar,
    trainer_environment,
)
from examples.demo.report import Outcome
from examples.demo.seed import add_size_options, sized_channels
from examples.demo.server import S3Server, running_s3
from examples.demo.train import FRAMEWORKS
from streamer.trailer import read_trailer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from examples.demo.dataset import Channel

BUCKET = "demo"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    add_size_options(parser)
    parser.add_argument("--epochs", type=int, default=2, help="times that the trainer reads `train` (2)")
    parser.add_argument("--framework", choices=FRAMEWORKS, default=FRAMEWORKS[0], help="of the trainer")
    parser.add_argument("--keep", action="store_true", help="keep job file, logs and trailers")
    arguments = parser.parse_args()
    wanted = sized_channels(parser, arguments)
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    signal.signal(signal.SIGTERM, _terminated)
    started = time.monotonic()
    try:
        with _directory(keep=arguments.keep) as directory:
            outcome = _demo(directory, wanted, arguments)
            passed = outcome.show()
            print(f"demo: {time.monotonic() - started:.0f} s in all")
            return 0 if passed else 1
    except DemoFailed as failure:
        print(f"demo: FAILED: {failure}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    """End the demo on SIGTERM as on Ctrl-C, so that every `finally` runs."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _directory(*, keep: bool) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="penstock-demo-")
    try:
        yield directory
    finally:
        if keep:
            print(f"demo: job file, logs and trailers are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _demo(directory: str, channels: Sequence[Channel], arguments: argparse.Namespace) -> Outcome:
    base, job = os.path.join(directory, "ml"), os.path.join(directory, "job.yaml")
    epochs = {"train": arguments.epochs, "eval": 1}
    _say("starting S3 (weed mini)")
    with running_s3() as s3:
        megabytes = sum(channel.total_bytes for channel in channels) / 1e6
        _say(f"making {megabytes:,.0f} MB and uploading it to {s3.url}")
        _seed(s3, arguments)
        with open(job, "w", encoding="utf-8") as file:
            yaml.safe_dump(job_document(base, s3, channels), file, sort_keys=False)
        credentials = bare_environment(os.path.join(directory, "sidecar-home")) | s3.environment
        plan = _plan(job, credentials)
        _say("starting the sidecar (penstock run)")
        result = os.path.join(directory, "result.json")
        with running_sidecar(job, credentials, log=os.path.join(directory, "sidecar.log")) as sidecar:
            ready = sidecar.status()
            admin = sidecar.admin.rstrip("/")
            _say(f"watch it at {admin} in a browser, or: {os.path.relpath(penstock()[0])} top --url {admin}")
            _say("starting the trainer, without credentials (loading its framework takes a while)")
            trainer = {"base-directory": base, "epochs": arguments.epochs, "framework": arguments.framework}
            run_trainer(
                [*(f"--{name}={value}" for name, value in trainer.items()), f"--result={result}"],
                trainer_environment(os.path.join(directory, "trainer-home")),
                beside=sidecar,
                log=os.path.join(directory, "trainer.log"),
            )
            done = sidecar.status()
            exit_code = sidecar.stop()
    data = os.path.join(base, "input", "data")
    with open(result, encoding="utf-8") as file:
        training = json.load(file)
    return Outcome(
        channels=channels,
        epochs=epochs,
        plan=plan,
        ready=ready,
        done=done,
        training=training,
        trailers={
            (name, epoch): read_trailer(data, name, epoch)
            for name, times in epochs.items()
            for epoch in range(times)
        },
        exit_code=exit_code,
        left_over=[entry.name for entry in os.scandir(data) if stat.S_ISFIFO(entry.stat().st_mode)],
    )


def job_document(base: str, s3: S3Server, channels: Sequence[Channel]) -> dict[str, Any]:
    """Return the job file: SageMaker's request shape, with this server's endpoint."""
    return {
        "TrainingJobName": "demo",
        "AlgorithmSpecification": {"TrainingInputMode": "Pipe"},
        "HyperParameters": {
            "classes": str(channels[0].classes),
            **{f"{channel.name}-records": str(channel.records) for channel in channels},
        },
        "InputDataConfig": [
            {
                "ChannelName": channel.name,
                "ContentType": "application/x-tfrecord",
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": f"s3://{BUCKET}/{channel.name}/",
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
            }
            for channel in channels
        ],
        "Penstock": {
            "BaseDirectory": base,
            "Endpoint": {"Url": s3.url, "Region": "us-east-1", "PathStyle": True},
            "Admin": {"Port": 0},
        },
    }


def _seed(s3: S3Server, arguments: argparse.Namespace) -> None:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("megabytes", "objects", "seed", "classes")]
    command = [
        sys.executable,
        "-m",
        "examples.demo.seed",
        "--endpoint-url",
        s3.url,
        "--bucket",
        BUCKET,
        *sizes,
    ]
    done = subprocess.run(
        command,
        env=os.environ | s3.environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        process_group=0,
        check=False,
    )
    if code := done.returncode:
        raise DemoFailed(f"the upload ended with exit code {code}")


def _plan(job: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return the plan that the sidecar should stream, from another process."""
    done = subprocess.run(
        penstock("plan", "-c", job, "--json"),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        process_group=0,
        check=False,
    )
    if done.returncode:
        raise DemoFailed(f"penstock plan ended with exit code {done.returncode}:\n{done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _say(what: str) -> None:
    print(f"demo: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
