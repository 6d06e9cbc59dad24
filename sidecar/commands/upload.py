"""`penstock upload`: the files of a directory to S3."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from sidecar.process.logs import WaitLog
from sidecar.process.progress import progress_line, transferred
from sidecar.upload.uploads import PARTS_IN_FLIGHT, Uploads
from streamer.aio import in_thread
from streamer.directory import Directory
from streamer.errors import ConfigError
from streamer.linux import keep_free_memory
from streamer.plan import S3Uri
from streamer.s3.client.endpoint import STALL_TIMEOUT
from streamer.s3.client.session import open_clients
from streamer.s3.object_put import PART

if TYPE_CHECKING:
    from streamer.retry import RetryPolicy
    from streamer.s3.client.endpoint import Endpoint


async def upload(
    directory: str, uri: S3Uri, *, endpoint: Endpoint, policy: RetryPolicy, replace: bool, quiet: bool
) -> dict[str, Any]:
    """Upload the files; return the figures. `quiet`: show no progress line.

    Raises SourceError, ConfigError for a directory that cannot be read.
    """
    began, waits = time.monotonic(), WaitLog(give_up_after=policy.give_up_after)
    keep_free_memory(2 * PART, PARTS_IN_FLIGHT * PART)  # the system would zero the pages of each part
    below = S3Uri(uri.bucket, f"{uri.key.removesuffix('/')}/" if uri.key else "")
    try:
        with await in_thread(_opened, directory) as root:
            async with open_clients(
                endpoint,
                connections=1,
                stall_timeout=min(STALL_TIMEOUT, policy.give_up_after),
                give_up_after=policy.give_up_after,
                on_wait=waits.waiting,
            ) as clients:
                uploads = Uploads(root, below, clients.control, policy, waits.waiting, replace)

                def progress() -> str:
                    return transferred(uploads.moved, uploads.total, time.monotonic() - began)

                with progress_line(progress, quiet=quiet):
                    await uploads.run()
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename or directory}: {error.strerror}; name a directory that this user "
            "may read"
        ) from error
    return {
        "objects": uploads.objects,
        "bytes": uploads.bytes,
        "seconds": round(time.monotonic() - began, 3),
        "left_out": len(uploads.left_out),
    }


def _opened(directory: str) -> Directory:
    """Open the directory, which may itself be named by a link; below it no link is followed."""
    return Directory.at(os.path.realpath(directory))
