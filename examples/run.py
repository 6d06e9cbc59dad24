"""Runs one example: `python -m examples.run NAME`.

Starts an S3 server on this machine, uploads the example's data, writes its job file, and runs the program
with `penstock exec`, whose exit code it returns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import botocore.session
import yaml
from botocore.config import Config

from examples.data import BUCKET, EXAMPLES
from examples.demo.processes import ROOT, penstock
from examples.demo.server import running_s3

if TYPE_CHECKING:
    from examples.demo.server import S3Server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.run", description=__doc__)
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("--show-job", action="store_true", help="print the job file before it is run")
    arguments = parser.parse_args()
    example = EXAMPLES[arguments.name]
    with running_s3(BUCKET) as s3, tempfile.TemporaryDirectory(prefix="penstock-example-") as directory:
        upload(s3, example.objects())
        job = os.path.join(directory, "job.yaml")
        text = yaml.safe_dump(job_document(s3, example.channels), sort_keys=False)
        with open(job, "w", encoding="utf-8") as file:
            file.write(text)
        if arguments.show_job:
            print(text, flush=True)
        launcher = ("torch.distributed.run", f"--nproc-per-node={example.ranks}") if example.ranks else ()
        modules = [part for name in (launcher, (example.module,)) if name for part in ("-m", *name)]
        return subprocess.run(
            penstock("exec", "-c", job, "--", sys.executable, *modules),
            env={"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ | s3.environment,
            cwd=ROOT,
            check=False,
        ).returncode


def upload(s3: S3Server, objects: dict[str, bytes]) -> None:
    """Put the objects into the bucket."""
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=s3.url,
        region_name="us-east-1",
        aws_access_key_id=s3.access_key,
        aws_secret_access_key=s3.secret_key,
        config=Config(s3={"addressing_style": "path"}),
    )
    try:
        for key, body in objects.items():
            client.put_object(Bucket=BUCKET, Key=key, Body=body)
    finally:
        client.close()


def job_document(s3: S3Server, channels: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the job file: SageMaker's request shape, with this server's endpoint."""
    return {
        "InputDataConfig": channels,
        "Penstock": {"Endpoint": {"Url": s3.url, "Region": "us-east-1", "PathStyle": True}},
    }


if __name__ == "__main__":
    sys.exit(main())
