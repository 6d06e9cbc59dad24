"""Trailers: a trailer proves whether the end of a FIFO is the end of its epoch.

A FIFO cannot carry an error: a reader sees the same end whether the writer died or completed the epoch. So
beside `<dir>/<channel>_<epoch>` the sidecar keeps `<dir>/.<channel>_<epoch>.penstock.json`, with a state:

    open      the epoch has not ended, and will have a proof; published before the FIFO is made
    complete  the FIFO has accepted every byte; published *before* the write end is closed
    abandoned the reader closed early; the epoch counts as consumed (contract §1.3)
    failed    the source has failed for good, with `error`; published *before* the FIFO is held open or ended,
              by the channel's policy
    stopped   the sidecar was stopped in mid-epoch

Each state replaces the one before by an atomic rename, so a reader always sees a whole document. A reader
accepts an end of file only under `complete` with its own byte count; `open` at end of file means that the
sidecar died. `run` is the same in all trailers of one sidecar and of the sidecars that resumed its FIFOs, so
a reader notices when another sidecar has started the epoch again.

If the channel has no trailer at all, another program (SageMaker) serves the FIFO, and there is no proof.

The pipe on the standard output of `penstock cat` has no path, so it has no trailer. Two bits of the pipe's
mode, which have no other meaning for a pipe, replace it: the sticky bit is set before the first byte, the
owner's execute bit after the last.

The name starts with a dot because known readers find FIFOs by listing names that start with `<channel>_`
(contract §1.4). Both sidecar and readers use this module, so it imports nothing of either.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from streamer.step_state import is_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TrailerState = Literal["open", "complete", "abandoned", "failed", "stopped"]

FORMAT = 1
"""Version of the document; a reader refuses an unknown one."""
LONGEST = 1 << 20
"""Maximum bytes of a trailer."""
SIDECAR_LOCK = ".penstock.lock"
"""File that a sidecar locks in its directory of FIFOs. It stays after the sidecar has ended."""
RUNS, OFFERS = 0, 1
"""Bytes of that file that the sidecar locks while it runs, and once its FIFOs are made and the trailers of
earlier runs are removed."""
_TRAILER_NAME = re.compile(r"\.(.+)_([0-9]+)\.penstock\.json")
_FIFO_NAME = re.compile(r"(.+)_(0|[1-9][0-9]*)")
_WITHDRAWN_NAME = re.compile(r"\.(.+)_(0|[1-9][0-9]*)\.penstock\.fifo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """State of one epoch, as published beside its FIFO."""

    channel: str
    epoch: int
    state: TrailerState
    bytes_total: int | None
    """Bytes of the whole epoch.

    None before the end if the plan does not give the length: objects are still being listed, or are inflated
    or joined. Never None in a `complete` trailer.
    """
    bytes_delivered: int = 0
    """Bytes that the FIFO accepted; under `complete`, the reader's own count must be equal."""
    bytes_skipped: int = 0
    """Bytes of the epoch before the FIFO's first byte, for a trainer that resumes there."""
    objects: int = 0
    """Objects of the epoch; if `digest` is partial, those that are listed so far."""
    records: int | None = None
    """Records of the epoch, if ranks share the channel by record; else None."""
    steps: int | None = None
    """Global batches of the epoch, if ranks share the channel by record; else None."""
    padding: int = 0
    """How many of the records, at the end of the epoch, are padding (`Remainder: pad`)."""
    workers: int = 1
    """FIFOs of each rank: this one has the global batches `worker`, `worker` + `workers`, … of its rank."""
    worker: int = 0
    """Number of this FIFO among those of its rank, from 0 on."""
    records_skipped: int = 0
    """Records of the epoch before the FIFO's first byte, if ranks share the channel by record; else 0."""
    order: Mapping[str, Any] | None = None
    """Order of the records (`streamer.step_state`), if ranks share the channel by record; else None."""
    digest: str = ""
    """Digest of the plan (`streamer.plan.digest`): object versions, bytes and order.

    While objects are being listed, a partial digest `N:HEX`, over the plan's first N entries. It covers every
    byte that the FIFO has had.
    """
    error: str | None = None
    resumed: str = ""
    """Partial digest in the state that `--resume` has: this plan's first entries have the same digest."""
    epochs: int | None = None
    """Number of the channel's epochs; None: as many as readers open."""
    run: str = ""
    """Id of the sidecar that published the trailer; a sidecar that resumes its FIFOs keeps the id."""
    format: int = FORMAT

    @property
    def grows(self) -> bool:
        """Whether `digest` is partial: objects were being listed when this trailer was published."""
        return ":" in self.digest


def trailer_path(directory: str, channel: str, epoch: int) -> str:
    """Return the path of an epoch's trailer, beside its FIFO."""
    return os.path.join(directory, f".{channel}_{epoch}.penstock.json")


def parse_trailer_name(name: str) -> tuple[str, int] | None:
    """Return channel and epoch of a trailer's file name, as `trailer_path` makes it; None for other names."""
    match = _TRAILER_NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def fifo_path(directory: str, channel: str, epoch: int) -> str:
    """Return the path of an epoch's FIFO: `<directory>/<channel>_<epoch>` (contract §1.1)."""
    return os.path.join(directory, f"{channel}_{epoch}")


def withdrawn_path(directory: str, channel: str, epoch: int) -> str:
    """Return the path that an epoch's FIFO gets before its first byte, so that no other reader opens it."""
    return os.path.join(directory, f".{channel}_{epoch}.penstock.fifo")


def parse_fifo_name(name: str) -> tuple[str, int] | None:
    """Return channel and epoch of a FIFO's file name, offered or withdrawn; None for other names."""
    match = _FIFO_NAME.fullmatch(name) or _WITHDRAWN_NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def rank_channel_name(channel: str, index: int) -> str:
    """Return the name that replaces the channel's in the paths of rank FIFO `index`."""
    return f"{channel}-{index}"


def channel_of_rank(name: str) -> str:
    """Return the channel whose rank FIFO is called `name`."""
    return name.rpartition("-")[0]


def write_trailer(directory: str, trailer: Trailer, *, dir_fd: int | None = None) -> None:
    """Publish `trailer`; it replaces the epoch's trailer atomically. Raises OSError.

    `dir_fd`: descriptor of the directory that `directory` is relative to, as in `os.open`.
    """
    path = trailer_path(directory, trailer.channel, trailer.epoch)
    document = asdict(trailer)
    # Unused fields are left out, so that readers of an older release accept the document.
    if not trailer.bytes_skipped:
        del document["bytes_skipped"]
    if trailer.steps is None:
        del document["records"], document["steps"]
    if not trailer.padding:
        del document["padding"]
    if trailer.workers == 1:
        del document["workers"], document["worker"]
    if trailer.order is None:
        del document["order"]
    if not trailer.records_skipped:
        del document["records_skipped"]
    if not trailer.resumed:
        del document["resumed"]
    if trailer.epochs is None:
        del document["epochs"]
    replace_file(path, (json.dumps(document) + "\n").encode(), dir_fd=dir_fd)


def replace_file(
    path: str,
    data: bytes | bytearray,
    *,
    mode: int = 0o644,
    sync: bool = False,
    dir_fd: int | None = None,
) -> None:
    """Replace the file at `path` atomically by a new file with `data`. Raises OSError.

    `mode` is reduced by the umask. An existing file or link at `path` or at the temporary path is neither
    written to nor followed. `sync`: the data is on the disk before the name is. `dir_fd`: descriptor of the
    directory that `path` is relative to.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=dir_fd)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(fd)
        os.rename(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=dir_fd)
        raise


def read_trailer(directory: str, channel: str, epoch: int) -> Trailer | None:
    """Return the epoch's current trailer, or None if there is none.

    Raises OSError, and ValueError for a document that is not a trailer of a known format and of this epoch.
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
    """Return whether `directory` has a trailer of any epoch of the channel. Raises OSError."""
    ours = re.compile(rf"\.{re.escape(channel)}_[0-9]+\.penstock\.json")
    return any(map(ours.fullmatch, os.listdir(directory)))


def parse_trailer(raw: bytes, *, name: str = "trailer") -> Trailer:
    """Decode a trailer document. Raises ValueError if `raw` is not one."""
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{name} is not a trailer of format {FORMAT}")
    known = {field.name for field in fields(Trailer)}
    if unknown := document.keys() - known:
        raise ValueError(f"{name} has unknown fields: {', '.join(sorted(unknown))}")
    if missing := _REQUIRED - document.keys():
        raise ValueError(f"{name} lacks fields: {', '.join(sorted(missing))}")
    for key, value in document.items():
        if not _IS_VALID[key](value):
            raise ValueError(f"{name} has {value!r} as {key}"[:300])
    return Trailer(**document)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_REQUIRED = {"channel", "epoch", "state", "bytes_total"}
_IS_VALID: dict[str, Callable[[object], bool]] = {
    "channel": _is_text,
    "epoch": _is_count,
    "state": lambda value: value in ("open", "complete", "abandoned", "failed", "stopped"),
    "bytes_total": lambda value: value is None or _is_count(value),
    "bytes_delivered": _is_count,
    "bytes_skipped": _is_count,
    "objects": _is_count,
    "records": _is_count,
    "steps": _is_count,
    "padding": _is_count,
    "workers": lambda value: _is_count(value) and value != 0,
    "worker": _is_count,
    "records_skipped": _is_count,
    "order": is_order,
    "digest": _is_text,
    "error": lambda value: value is None or _is_text(value),
    "resumed": _is_text,
    "epochs": lambda value: value is None or _is_count(value),
    "run": _is_text,
    "format": _is_count,
}
"""Check of a value, by field of a trailer."""


Mark = Literal["none", "promised", "complete"]
"""Proof in a pipe's mode: none, promised (the writer will mark the end), complete (all bytes written)."""


def mark_pipe(fd: int, mark: Literal["promised", "complete"]) -> None:
    """Mark the pipe of `fd`; do nothing if `fd` is not a pipe.

    Raises PermissionError for a pipe that another user created.
    """
    st_mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(st_mode):
        mode = stat.S_IMODE(st_mode) & ~stat.S_IXUSR | stat.S_ISVTX
        os.fchmod(fd, mode | stat.S_IXUSR if mark == "complete" else mode)


def mark_of(fd: int) -> Mark:
    """Return the mark of the pipe of `fd`; "none" if `fd` is not a pipe."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISFIFO(mode) or not mode & stat.S_ISVTX:
        return "none"
    return "complete" if mode & stat.S_IXUSR else "promised"
