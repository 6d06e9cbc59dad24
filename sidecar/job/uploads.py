"""What a job uploads: the uploader's spec from the job file, and what stays on the disk after the end."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sidecar.process.exits import Exit
from sidecar.process.logs import log, settings
from sidecar.process.resources import UPLOAD_PARTS
from sidecar.upload.spec import CHECKPOINTS, DATA, MODEL, CheckpointSpec, OutputSpec, UploadSpec
from sidecar.upload.watch import is_own
from streamer.directory import Directory
from streamer.finish import REASON
from streamer.plan import S3Uri
from streamer.retry import RetryPolicy

if TYPE_CHECKING:
    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.job.layout import Layout
    from sidecar.upload.link import Ended

TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' file for the message of a container's end; it exists in a pod only."""


def upload_spec(job: Job, hosts: Hosts, layout: Layout) -> UploadSpec | None:
    """Return what the uploader does for this host; None if it has nothing to do. Raises ConfigError."""
    output, checkpoints = _output(job, hosts), _checkpoints(job, hosts, layout)
    if output is None and checkpoints is None:
        return None
    penstock = job.penstock
    level, as_json = settings()
    return UploadSpec(
        base=layout.root,
        job=job.training_job_name,
        host=hosts.current,
        hosts=hosts.names,
        endpoint=penstock.endpoint.resolved(),
        policy=RetryPolicy(give_up_after=penstock.give_up_after),
        stall_timeout=penstock.longest_silence,
        parts=UPLOAD_PARTS,
        bandwidth=penstock.upload.bandwidth,
        output=output,
        checkpoints=checkpoints,
        level=level,
        as_json=as_json,
    )


def _output(job: Job, hosts: Hosts) -> OutputSpec | None:
    if (config := job.output) is None:
        return None
    name, host = job.training_job_name, hosts.current if hosts.index else None
    bucket, folder = config.folder(name)
    return OutputSpec(
        model=config.target("model", name, host),
        data=config.target("output", name, host),
        folder=S3Uri(bucket, f"{folder}{host}/" if host else folder),
        run=f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}",
        compressed=config.compression_type == "GZIP",
        encryption=config.encryption,
        replaces=job.penstock.output.replace,
    )


def _checkpoints(job: Job, hosts: Hosts, layout: Layout) -> CheckpointSpec | None:
    if (config := job.checkpoints) is None:
        return None
    newest = job.penstock.checkpoints.restore == "newest"
    return CheckpointSpec(path=layout.checkpoints, uri=config.uri, marked=newest or len(hosts.names) > 1)


def failure_reason(layout: Layout) -> str:
    """Return the first characters of what the trainer has written to `output/failure`; empty if nothing."""
    try:
        with (
            Directory.at(layout.root) as base,
            base.enter("output") as output,
            open(output.open("failure", os.O_RDONLY), "rb") as file,
        ):
            data = file.read(4 * REASON)
    except OSError:
        return ""
    return data.decode(errors="replace")[:REASON].strip()


def tell_kubernetes(reason: str) -> None:
    """Write the reason of a failure where Kubernetes reads the message of a container's end."""
    if reason:
        with contextlib.suppress(OSError), open(TERMINATION_LOG, "r+", encoding="utf-8") as file:
            file.write(reason)


def code_after(ended: Ended | None, code: int) -> int:
    """Return the exit code after an upload: `code`, the error before it; `NOT_UPLOADED` in place of 0."""
    left = ended is not None and ended.left
    return Exit.NOT_UPLOADED if left and code == Exit.OK else code


def keep_files(
    layout: Layout, ended: Ended | None, job: Job, *, temporary: bool, trained: bool = True
) -> None:
    """Say where files are that are not in S3. `temporary`: move them out of the base directory, which goes.

    `ended`: None if nothing was uploaded. `trained`: whether the trainer has started; before that, the
    checkpoints are those of S3.
    """
    paths = {name: os.path.join(layout.root, *name.split("/")) for name in (MODEL, DATA)}
    if layout.checkpoints and trained:
        paths[CHECKPOINTS] = layout.checkpoints
    for name, given in paths.items():
        path = os.path.join(os.path.realpath(os.path.dirname(given)), os.path.basename(given))
        kept = os.path.lexists(layout.root)  # else `_moved_out` has renamed it
        path = path if kept else f"{layout.root}-kept{path.removeprefix(layout.root)}"
        if (ended is not None and name in ended.uploaded) or not _holds(path):
            continue
        if temporary and path.startswith(f"{layout.root}/"):  # else a link has led out of it
            path = _moved_out(path, layout.root)
        url = job.penstock.endpoint.url
        options = f"--endpoint-url {shlex.quote(url)} " if url else ""
        log.warning(
            "kept on this machine, because it is not in S3",
            path=path,
            do=f"penstock upload {options}{shlex.quote(path)} s3://BUCKET/PREFIX",
        )


def _moved_out(path: str, base: str) -> str:
    """Move a directory out of the temporary one that it is in, or rename that; return the new path."""
    last = os.path.basename(path)
    try:
        folder = tempfile.mkdtemp(prefix=f"penstock-{last}-", dir=os.path.dirname(base))
        os.rename(path, moved := os.path.join(folder, last))
    except OSError:  # it is a mount point, or the disk is full
        if os.path.lexists(base):
            os.rename(base, f"{base}-kept")
        return f"{base}-kept{path.removeprefix(base)}"
    return moved


def _holds(path: str) -> bool:
    """Return whether there is anything of the trainer's, so also if that is no directory."""
    try:
        return any(not is_own(name) for name in os.listdir(path))
    except FileNotFoundError:
        return False
    except OSError:
        return True
