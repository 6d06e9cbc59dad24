"""Says why the FIFO of an epoch does not come, or has no writer.

    ended      no sidecar holds its lock: it was killed, or has not started
    starting   it has not offered its FIFOs
    ready      it serves the epochs in turn: this one is over, or an earlier one still has a reader

The sidecar's lock file has a locked byte for each of the last two states (`streamer.trailer`). Trailers of
earlier runs are gone once it is ready. Where a reader may not open the lock file, the state is unknown.
Nothing here opens a FIFO or waits.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import TYPE_CHECKING, Literal

from streamer.escaping import escape_control
from streamer.linux import locked_byte
from streamer.trailer import OFFERS, RUNS, SIDECAR_LOCK, parse_fifo_name, read_trailer
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.readers.core.proof import Proof
    from streamer.trailer import Trailer

_THIS = "this process", "a variable or a traceback keeps its iterator; delete it, or read it to its end"
_OTHER = "a process of another user or container", "end it, or the iterator or pool that it works for"
"""Who keeps a FIFO open, and what is to be done."""
SidecarState = Literal["unknown", "ended", "starting", "ready"]


def sidecar_state(directory: str) -> SidecarState:
    """Return the state of the sidecar that serves a directory of FIFOs."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(directory, SIDECAR_LOCK), flags)
        try:
            if locked_byte(fd, OFFERS) is not None:
                return "ready"
            return "ended" if locked_byte(fd, RUNS) is None else "starting"
        finally:
            os.close(fd)
    return "unknown"


def why_over(proof: Proof) -> str:
    """Return why a sidecar that is ready offers this epoch no more; empty if it may still offer it.

    Raises StreamError if the trailer cannot be read.
    """
    if proof.withdrawn_path is None:
        return ""  # not a channel's FIFO
    if why := why_job_over(proof):
        return why
    offered = [epoch for epoch, _, _ in fifos_of(proof)]
    later = [epoch for epoch in offered if epoch > proof.epoch]
    trailer = proof.trailer if proof.look() else None
    if trailer is None:
        if proof.epoch in offered or not later:
            return ""
        how = "its trailer is gone"
    elif trailer.state in ("complete", "abandoned"):
        how = f"after {counted(trailer.bytes_delivered, 'byte')} its trailer says '{trailer.state}'"
    else:
        return ""
    return (
        f"{proof.base} is over ({how}), and a sidecar streams an epoch once: to go on in it from a saved "
        "state, start the sidecar again with --resume and that state, and then the trainer; else read the "
        f"next epoch, {proof.prefix}{min(later, default=proof.epoch + 1)}, without a state"
    )


def why_job_over(proof: Proof) -> str:
    """Return that the epoch is after the job's last one, by the trailer before it; else the empty text."""
    if (epochs := proof.epochs_before()) is None or epochs > proof.epoch:
        return ""
    return f"the job has Penstock.Epochs: {epochs}, and they are over; raise it, or read no more epochs"


def why_late(proof: Proof) -> str:
    """Return why this epoch's FIFO or its writer has not come yet; empty if nothing shows it."""
    if proof.withdrawn_path is None:
        return ""
    state = sidecar_state(proof.directory)
    if state == "ended":
        path = os.path.join(proof.directory, SIDECAR_LOCK)
        return f"no sidecar runs: no process has locked {path}; start it again"
    if state == "starting":
        return "the sidecar has not offered its FIFOs yet; its log says why"
    for epoch, path, withdrawn in fifos_of(proof):
        if not withdrawn or epoch > proof.epoch:
            continue
        base, trailer = f"{proof.prefix}{epoch}", trailer_of(proof, epoch)
        if trailer is not None and trailer.state == "failed":
            return f"{base} has failed: {trailer.error}"
        who, do = _reader_of(path)
        if epoch == proof.epoch:
            return f"{who} has opened this FIFO already: a FIFO has one reader"
        return f"{who} still has {base} open: {do}"
    return ""


def fifos_of(proof: Proof) -> list[tuple[int, str, bool]]:
    """Return epoch and path of each FIFO of the channel, and whether its name is withdrawn; by epoch."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(proof.directory):
            channel, epoch = parse_fifo_name(name) or ("", -1)
            if f"{channel}_" == proof.prefix:
                found.append((epoch, os.path.join(proof.directory, name), name.startswith(".")))
    return sorted(found)


def trailer_of(proof: Proof, epoch: int) -> Trailer | None:
    """Return the trailer of an epoch of the channel; None if it has none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_trailer(proof.directory, proof.prefix[:-1], epoch)
    return None


def _reader_of(path: str) -> tuple[str, str]:
    """Return the process that has a FIFO open for reading, and what is to be done with it."""
    with contextlib.suppress(OSError):
        fifo = os.stat(path)
        for link in glob.iglob("/proc/[0-9]*/fd/*"):
            _, _, process, _, number = link.split("/")
            with contextlib.suppress(OSError, StopIteration):
                if not os.path.samestat(os.stat(link), fifo):
                    continue
                with open(f"/proc/{process}/fdinfo/{number}", encoding="ascii") as file:
                    flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
                if flags & (os.O_ACCMODE | os.O_PATH):
                    continue
                if int(process) == os.getpid():
                    return _THIS
                with open(f"/proc/{process}/comm", encoding="utf-8") as file:
                    return f"process {process} ({escape_control(file.read().strip())})", _OTHER[1]
    return _OTHER
