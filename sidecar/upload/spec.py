"""What sidecar and uploader tell each other.

    sidecar ─▶ uploader   `UploadSpec`, pickled, its length before it; then lines of JSON: `begin`, `end`
    uploader ─▶ sidecar   lines of JSON: `ready`, or `failed` with the class of its error; `figures`; `ended`

Both are processes of one installation and one user, so a pickle does. It may have a customer's key, and a
socket is read by nobody else.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import streamer.errors
from streamer.errors import PenstockError, SinkError

if TYPE_CHECKING:
    import asyncio

    from sidecar.observe.uploads import UploadFigures
    from streamer.plan import S3Uri
    from streamer.retry import RetryPolicy
    from streamer.s3.client.endpoint import Endpoint

MODEL, DATA, CHECKPOINTS = "model", "output/data", "checkpoints"
"""Names of what is uploaded: two directories below the base, and the checkpoints, wherever they are."""
LENGTH = 8
"""Bytes of the length before the spec, big-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Where model and output data of this host go."""

    model: S3Uri
    """Archive of the model, or the folder of its files, if it is not compressed."""
    data: S3Uri
    """Archive of the output data."""
    folder: S3Uri
    """Folder of all output of this host."""
    run: str
    """Folder in it for an archive whose key another writer's object has; differs in each run."""
    compressed: bool
    """Whether the model is one archive."""
    encryption: dict[str, Any]
    """Parameters of the requests that make an object."""
    replaces: bool
    """Whether another job's objects are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where the checkpoints of this host come from and go."""

    path: str
    """Directory, absolute and without links."""
    uri: S3Uri
    marked: bool
    """Whether a marker says which directories are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSpec:
    """All that the uploader of one host needs to know."""

    base: str
    """The base directory, absolute and without links."""
    job: str
    """TrainingJobName."""
    host: str
    hosts: tuple[str, ...]
    endpoint: Endpoint
    policy: RetryPolicy
    stall_timeout: float
    parts: int
    """Most parts in memory."""
    bandwidth: int | None
    """Bytes a second; None: no limit."""
    output: OutputSpec | None
    checkpoints: CheckpointSpec | None
    level: str
    """Least level of what is logged."""
    as_json: bool
    """Whether lines of the log are JSON."""

    @property
    def metadata(self) -> dict[str, dict[str, str]]:
        """The parameter Metadata of every object, by which a later run knows its own."""
        return {"Metadata": {"penstock-job": self.job, "penstock-host": self.host}}


def packed(spec: UploadSpec) -> bytes:
    """Return the first message to the uploader."""
    data = pickle.dumps(spec)
    return len(data).to_bytes(LENGTH, "big") + data


async def receive_spec(reader: asyncio.StreamReader) -> UploadSpec:
    """Receive the first message. Raises asyncio.IncompleteReadError if the sidecar has ended."""
    length = int.from_bytes(await reader.readexactly(LENGTH), "big")
    spec: UploadSpec = pickle.loads(await reader.readexactly(length))  # noqa: S301 - of our own process
    return spec


def line(**message: object) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def failed_line(error: PenstockError) -> bytes:
    """Return the message of an error that ends the uploader."""
    return line(did="failed", error=type(error).__name__, text=str(error))


def figures_line(figures: UploadFigures) -> bytes:
    """Return the message of a snapshot."""
    return line(did="figures", **asdict(figures))


def error_of(message: dict[str, Any]) -> PenstockError:
    """Return the error of a message `failed`."""
    kind: type[PenstockError] = getattr(streamer.errors, message["error"], SinkError)
    return kind(message["text"])
