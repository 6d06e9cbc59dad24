"""The proof beside a FIFO that its end of file is the end of its epoch.

A FIFO cannot say "error": a writer that dies and a writer that is done look the same to a reader.
So beside `<dir>/<channel>_<epoch>` the sidecar keeps `<dir>/.<channel>_<epoch>.penstock.json`:

    open      written before the FIFO is offered: this FIFO comes with proof; `bytes_total` are due, if known
    complete  every byte was accepted by the FIFO; published *before* the write end is closed
    abandoned the reader closed early; the epoch counts as consumed (contract §1.3)
    failed    the source failed for good; `error` says how; published *before* what becomes of the FIFO,
              which is held open, or ended as the channel's policy has it
    stopped   the sidecar was told to stop in mid-epoch

Each state replaces the last by an atomic rename, so a reader sees one whole document or the other.
A reader that meets end of file accepts it only under `complete` with its own byte count; `open` at end
of file means that the sidecar died. `run` is the same in all trailers of one sidecar, and of those that went
on where it ended, so a reader notices that another sidecar has begun the epoch anew.

No trailer of the channel at all: the FIFO is somebody else's (SageMaker's own), and there is no proof to be
had.

The pipe on the standard output of `penstock cat` has no name for a trailer to lie beside. The pipe itself is
marked, by bits of its mode that mean nothing else for a pipe: the sticky bit before the first byte, the
owner's execute bit after the last.

The name starts with a dot because known readers pick FIFOs by listing names that start with
`<channel>_` (contract §1.4). This module is shared by both sides and imports nothing of either.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

TrailerState = Literal["open", "complete", "abandoned", "failed", "stopped"]

FORMAT = 1
"""Version of the document; a reader refuses one that it does not know."""
LONGEST = 1 << 20
"""Bytes of a trailer; a hundred changes of objects with the longest keys are a third of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """One epoch's account of itself."""

    channel: str
    epoch: int
    state: TrailerState
    bytes_total: int | None
    """Bytes of the whole epoch, known from the plan before the first is sent.

    None where objects are inflated, for then nobody knows it, until `complete` says it.
    """
    bytes_delivered: int = 0
    """Bytes that the FIFO accepted; the reader's own count must equal it under `complete`."""
    bytes_skipped: int = 0
    """Bytes of the epoch that this FIFO never had: it begins behind them, for a trainer that resumes."""
    objects: int = 0
    digest: str = ""
    """Digest of the plan (`streamer.plan`): which bytes, of which object versions, in which order."""
    error: str | None = None
    changed: int = 0
    """Objects that were not as listed and were refetched or skipped, as the channel's policy has it."""
    changes: tuple[str, ...] = ()
    """The first hundred of them."""
    run: str = ""
    """Names the sidecar that published this; one that goes on with its FIFOs keeps the name."""
    poison: int = 0
    """Bytes behind `bytes_delivered` that are no part of the epoch, once `failed`; while `open`, the most."""
    format: int = FORMAT


def trailer_path(directory: str, channel: str, epoch: int) -> str:
    """Where the trailer of an epoch lies, beside its FIFO."""
    return os.path.join(directory, f".{channel}_{epoch}.penstock.json")


def fifo_path(directory: str, channel: str, epoch: int) -> str:
    """Where the FIFO of an epoch lies: `<directory>/<channel>_<epoch>` (contract §1.1)."""
    return os.path.join(directory, f"{channel}_{epoch}")


def rank_channel_name(channel: str, index: int) -> str:
    """What stands for the channel in the names above, of one of the several FIFOs that it is dealt over."""
    return f"{channel}-{index}"


def write_trailer(directory: str, trailer: Trailer, *, mode: int = 0o644) -> None:
    """Publish `trailer`, replacing the epoch's last one at once. Raises OSError."""
    path = trailer_path(directory, trailer.channel, trailer.epoch)
    document = asdict(trailer)
    # Readers of a release that knows no such field need refuse only what they would misjudge.
    if not trailer.changed:
        del document["changed"], document["changes"]
    if not trailer.bytes_skipped:
        del document["bytes_skipped"]
    if not trailer.poison:
        del document["poison"]
    replace_file(path, (json.dumps(document) + "\n").encode(), mode=mode)


def replace_file(path: str, data: bytes, *, mode: int = 0o644) -> None:
    """Make `path` hold `data`, at once for whoever reads it; `mode` less the umask. Raises OSError.

    The file is a new one, and so ours: what lies there under the name, or as the temporary one, is neither
    written to nor followed.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def read_trailer(directory: str, channel: str, epoch: int) -> Trailer | None:
    """The trailer as it stands now, or None if this FIFO has none.

    Raises ValueError for a document that is not a trailer of a known format and of this epoch: a proof that
    cannot be read is no proof.
    """
    path = trailer_path(directory, channel, epoch)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is not a regular file")
        raw = file.read(LONGEST + 1)
    if len(raw) > LONGEST:
        raise ValueError(f"{path} is longer than a trailer can be")
    trailer = parse_trailer(raw, name=path)
    if (trailer.channel, trailer.epoch) != (channel, epoch):
        raise ValueError(f"{path} is the trailer of {trailer.channel}_{trailer.epoch}")
    return trailer


def has_trailers(directory: str, channel: str) -> bool:
    """Whether a sidecar has published a trailer of any epoch of the channel there. Raises OSError."""
    ours = re.compile(rf"\.{re.escape(channel)}_\d+\.penstock\.json")
    return any(map(ours.fullmatch, os.listdir(directory)))


def parse_trailer(raw: bytes, *, name: str = "trailer") -> Trailer:
    """Decode a trailer document; ValueError if it is not one."""
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{name} is not a trailer of format {FORMAT}")
    wanted = {field.name for field in fields(Trailer)}
    if unknown := document.keys() - wanted:
        raise ValueError(f"{name} has unknown fields: {', '.join(sorted(unknown))}")
    if lacking := _REQUIRED - document.keys():
        raise ValueError(f"{name} lacks fields: {', '.join(sorted(lacking))}")
    for key, value in document.items():
        if not _HOLDS[key](value):
            raise ValueError(f"{name} has {value!r} as {key}"[:300])
    return Trailer(**document | {"changes": tuple(document.get("changes", ()))})


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_REQUIRED = {"channel", "epoch", "state", "bytes_total"}
_HOLDS: dict[str, Callable[[object], bool]] = {
    "channel": _is_text,
    "epoch": _is_count,
    "state": lambda value: value in ("open", "complete", "abandoned", "failed", "stopped"),
    "bytes_total": lambda value: value is None or _is_count(value),
    "bytes_delivered": _is_count,
    "bytes_skipped": _is_count,
    "objects": _is_count,
    "digest": _is_text,
    "error": lambda value: value is None or _is_text(value),
    "changed": _is_count,
    "changes": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "run": _is_text,
    "poison": _is_count,
    "format": _is_count,
}
"""By field of a trailer, whether a value may be its content."""


Mark = Literal["none", "promised", "complete"]
"""What the mode of a pipe says of its end: nothing, that it comes with proof, or that all bytes are in it."""


def mark_pipe(fd: int, mark: Literal["promised", "complete"]) -> None:
    """Mark the pipe that `fd` is an end of; whatever else it is stays as it is.

    Raises PermissionError for a pipe that another user made.
    """
    found = os.fstat(fd).st_mode
    if stat.S_ISFIFO(found):
        mode = stat.S_IMODE(found) & ~stat.S_IXUSR | stat.S_ISVTX
        os.fchmod(fd, mode | stat.S_IXUSR if mark == "complete" else mode)


def mark_of(fd: int) -> Mark:
    """The mark of the pipe that `fd` is an end of; "none" for whatever else it is."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISFIFO(mode) or not mode & stat.S_ISVTX:
        return "none"
    return "complete" if mode & stat.S_IXUSR else "promised"
