"""Reads what `--resume` names: states of readers, as JSON text, in a file or in an object of S3.

    JSON text     begins with { or [
    s3://BUCKET/KEY, PATH             the states are there; nothing there: the job begins at epoch 0
    s3://BUCKET/PREFIX/, DIRECTORY    the same, of `penstock-state.json` in it; if a directory has none, of
                                      the newest one in its directories, such as those of checkpoints

A job may have the option from its first start on, because before its first checkpoint the file is absent. A
state that is there and cannot be read is an error, never the beginning.
"""

from __future__ import annotations

import glob
import os
import re
from contextlib import aclosing
from typing import TYPE_CHECKING

from sidecar.download.checkpoints import numbers_of
from sidecar.process.logs import log
from streamer.errors import ConfigError, ObjectMissing
from streamer.file_reads import outside
from streamer.plan import S3Uri, parse_address
from streamer.retry import RetryPolicy
from streamer.s3.manifests.body import read_manifest
from streamer.step_state import FILE_NAME

if TYPE_CHECKING:
    from streamer.errors import SourceError
    from streamer.s3.client.session import Clients

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""Begins a URI, also S3's with a slash too few. Such a file would be absent, and the job begin anew."""
LONGEST = 16 << 20
"""Most bytes of a state. One of each of 10,000 FIFOs takes 3 MB."""


async def read_states(value: str, clients: Clients, *, give_up_after: float) -> str | None:
    """Return the text of the states; None if there are none yet. Raises ConfigError, SourceError.

    `give_up_after`: seconds to wait while storage is unavailable.
    """
    if not value.strip():
        raise ConfigError("--resume is empty; name a file, a directory or an S3 URI")
    if value.lstrip().startswith(("{", "[")):
        return value
    if _URI.match(value):
        where, raw = await _object(value, clients, RetryPolicy(give_up_after=give_up_after))
    else:
        try:
            where, raw = await outside(_file, value)
        except TimeoutError as error:
            raise ConfigError(f"cannot read --resume {value}: {error.strerror}") from error
    if raw is None:
        log.info("no state yet, beginning at epoch 0", resume=where)
        return None
    if len(raw) > LONGEST:
        raise ConfigError(
            f"--resume: {where} is longer than {LONGEST} bytes, so it has no states; correct it"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read --resume {where}: {error}") from error


def _file(path: str) -> tuple[str, bytes | None]:
    if path.endswith("/") or os.path.isdir(path):
        places = glob.glob(os.path.join(glob.escape(path), "[!.]*", FILE_NAME))
        steps = [place for place in places if "tmp" not in os.path.basename(os.path.dirname(place))]
        path = os.path.join(path, FILE_NAME)
        if steps and not os.path.lexists(path):
            path = max(steps, key=lambda each: (os.path.getmtime(each), numbers_of(each)))
    try:
        with open(path, "rb") as file:
            return path, file.read(LONGEST + 1)
    except FileNotFoundError:
        return path, None
    except OSError as error:
        raise ConfigError(f"cannot read --resume {path}: {error}") from error


async def _object(value: str, clients: Clients, policy: RetryPolicy) -> tuple[str, bytes | None]:
    uri = parse_address(value)
    if not uri.key or uri.key.endswith("/"):
        uri = S3Uri(uri.bucket, uri.key + FILE_NAME)
    raw = bytearray()

    def waiting(error: SourceError) -> None:
        log.warning("waiting for the state of --resume", error=str(error))

    try:
        async with aclosing(
            read_manifest(clients, uri, policy, on_wait=waiting, what="the state of --resume")
        ) as pieces:
            async for piece in pieces:
                raw += piece
                if len(raw) > LONGEST:
                    break
    except ObjectMissing:
        return str(uri), None
    return str(uri), bytes(raw)
