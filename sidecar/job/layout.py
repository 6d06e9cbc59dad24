"""Directories of the training container (contract §2.3), and which of its hosts this one is.

A lock that ends with the process makes one sidecar the owner of a base directory.

Links are resolved once, when the `Layout` is made: those of the base directory, and `input/data` itself,
which may be a link to a faster disk. Below them nothing that the sidecar makes or writes follows a link
(`streamer.directory`), whatever other users of the volume put in its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.config.document import check_texts
from sidecar.config.hosts import identify, local_job
from streamer.directory import Directory
from streamer.errors import ConfigError, SinkError
from streamer.file_reads import read_file
from streamer.linux import lock_byte
from streamer.trailer import OFFERS, RUNS, SIDECAR_LOCK, parse_trailer_name, read_trailer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job

RESOURCES = "resourceconfig.json"
COPY = f".{RESOURCES}.penstock"
"""What a sidecar has written as `RESOURCES`, by which the next one recognises it."""
_TREE = (
    ("input", "data"),
    ("input", "config"),
    ("model",),
    ("output", "data"),
    ("output", "intermediate"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The directory tree of contract §2.3 under one base."""

    base: str
    checkpoints: str = ""
    """Directory of the checkpoints, without links; empty if the job has no `CheckpointConfig`."""
    root: str = field(init=False)
    """The base directory's path without links."""
    place: str = field(init=False)
    """Path of `data` without links."""

    def __post_init__(self) -> None:
        root = os.path.realpath(self.base)
        data = os.path.join(root, "input", "data")
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "place", os.path.realpath(data) if os.path.islink(data) else data)
        if self.checkpoints:
            object.__setattr__(self, "checkpoints", os.path.realpath(self.checkpoints))

    @classmethod
    def of(cls, job: Job, base: str) -> Layout:
        """Return the tree of a job under `base`."""
        config = job.checkpoint_config
        return cls(base, "" if config is None else config.directory(base))

    @property
    def data(self) -> str:
        return os.path.join(self.base, "input", "data")

    @property
    def keeper(self) -> str:
        """Socket of a keeper that `--keeper auto` starts."""
        return os.path.join(self.place, ".penstock.keeper")

    @property
    def config(self) -> str:
        return os.path.join(self.base, "input", "config")

    @property
    def output(self) -> str:
        return os.path.join(self.base, "output")

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories that `create` makes."""
        tree = tuple(os.path.join(self.base, *names) for names in _TREE)
        return (*tree, self.checkpoints) if self.checkpoints else tree

    def parents(self) -> list[str]:
        """Return every directory of the tree and above it, each after its parent."""
        paths = set(self.directories)
        for path in self.directories:
            while path != (path := os.path.dirname(path)):
                paths.add(path)
        return sorted(paths, key=len)

    def create(self) -> None:
        """Make every directory. Raises SinkError."""
        try:
            os.makedirs(self.root, exist_ok=True)
            with Directory.at(self.root) as root:
                for *above, name in _TREE:
                    with root.add(*above) as here:
                        here.mkdir(name)
                root.enter("input", "config").close()
            Directory.at(self.place).close()
            if self.checkpoints:
                with Directory.at("/") as top:
                    top.add(*self.checkpoints.strip("/").split("/")).close()
        except OSError as error:
            if error.errno == errno.ENOTDIR:
                raise SinkError(
                    f"{error.filename} is a link or no directory; remove it: below the base directory "
                    "input/data alone may be a link"
                ) from error
            other = " or CheckpointConfig.LocalPath" if self.checkpoints else ""
            raise SinkError(
                f"cannot make {error.filename}: {error.strerror}; set Penstock.BaseDirectory{other} to a "
                "directory that this user may write"
            ) from error

    @contextlib.contextmanager
    def locked(self, fifo_mode: int | None = None) -> Iterator[Callable[[], None]]:
        """Own the tree until the end of the block. Raises SinkError if another sidecar owns it.

        The block calls the function when its FIFOs are offered, for readers (`streamer.readers.core.late`).
        `fifo_mode`: who may read a FIFO may read the lock file.
        """
        path = os.path.join(self.data, SIDECAR_LOCK)
        try:
            with Directory.at(self.place) as data:
                if data.status(SIDECAR_LOCK) is None:
                    self._check_lock_not_removed()
                fd = data.open(SIDECAR_LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno == errno.EPERM:
                why = f"{path} is not a sidecar's lock; remove it, and let no other user write there"
                raise SinkError(why) from error
            name = error.filename or path  # a trailer's, too
            raise SinkError(
                f"{name}: {error.strerror}; remove it, or let this user read and write it"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fifo_mode is not None:
                os.fchmod(fd, 0o600 | fifo_mode & 0o044)
            os.ftruncate(fd, 0)
            os.write(fd, b"%d\n" % os.getpid())
        except BlockingIOError:
            os.close(fd)
            raise SinkError(
                f"another sidecar serves {self.data}; stop it or set Penstock.BaseDirectory"
            ) from None
        except OSError as error:
            os.close(fd)
            raise SinkError(f"{path}: {error.strerror}") from error

        def lock(byte: int) -> None:
            with contextlib.suppress(OSError):  # not on every file system; readers then know less
                lock_byte(fd, byte)

        try:
            lock(RUNS)
            yield partial(lock, OFFERS)
        finally:
            os.close(fd)

    def _check_lock_not_removed(self) -> None:
        """Raise SinkError if a trailer is `open` though there is no lock file, which a sidecar never removes.

        A sidecar that still runs cannot be seen then, and two would write into one FIFO. OSError passes.
        """
        for name in os.listdir(self.place):
            if (of := parse_trailer_name(name)) is None:
                continue
            with contextlib.suppress(ValueError):
                trailer = read_trailer(self.place, *of)
                if trailer is not None and trailer.state == "open":
                    raise SinkError(
                        f"{SIDECAR_LOCK} was removed from {self.data}, where the sidecar of {name} may still "
                        f"run; end that sidecar if it runs, then remove {name} and start again"
                    )

    def check_unlocked(self) -> None:
        """Raise SinkError if another sidecar owns the tree, or if the lock file is not a sidecar's."""
        if os.path.lexists(os.path.join(self.data, SIDECAR_LOCK)):
            with self.locked():
                pass

    def owner(self) -> int:
        """Return the process id of the sidecar that owns the tree. Raises SinkError if no sidecar does.

        The process must belong to the owner of the lock file, or any user could direct root's signal to any
        process.
        """
        path = os.path.join(self.data, SIDECAR_LOCK)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise SinkError(f"{path}: {error.strerror}; give the sidecar's base directory") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            status, pid = os.fstat(fd), os.read(fd, 32).split(b"\n")[0]
            if pid.isdigit() and stat.S_ISREG(status.st_mode) and _user(int(pid)) == status.st_uid:
                return int(pid)
            raise SinkError(
                f"{path} names no process of its owner; remove it and start the sidecar again"
            ) from None
        finally:
            os.close(fd)
        raise SinkError(f"no sidecar serves {self.data}; give the sidecar's base directory")

    def note(self, event: str, error: str = "") -> None:
        """Append a note of the tree's owner to its lock file, for `penstock restart`. Ignores errors."""
        line = json.dumps({"at": time.monotonic_ns(), "event": event, "error": error}) + "\n"
        with contextlib.suppress(OSError), Directory.at(self.place) as data:
            fd = data.open(SIDECAR_LOCK, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)

    def last_note(self) -> dict[str, Any] | None:
        """Return the last note of the tree's owner; None if it has not written one yet."""
        try:
            with open(os.path.join(self.data, SIDECAR_LOCK), "rb") as file:
                lines = file.read(1 << 20).splitlines(keepends=True)[1:]
            return dict(json.loads(lines[-1])) if lines and lines[-1].endswith(b"\n") else None
        except (OSError, ValueError, TypeError):
            return None

    def exposure(self) -> list[str]:
        """Return warnings about directories in which other users could replace FIFOs.

        No warning for mount points that all users may write: Kubernetes makes volumes so, and the pod is the
        border.
        """
        warnings = []
        for path in (self.data, os.path.dirname(self.data), self.base):
            try:
                status = os.stat(path)
            except OSError:
                continue
            sticky_or_mount = status.st_mode & stat.S_ISVTX or os.path.ismount(path)
            if status.st_uid not in (0, os.geteuid()):
                warnings.append(f"{path} belongs to user {status.st_uid}, who may replace FIFOs; chown it")
            elif status.st_mode & stat.S_IWOTH and not sticky_or_mount:
                warnings.append(f"{path} may be written by all, who may replace FIFOs; chmod o-w it")
        return warnings


def _user(pid: int) -> int | None:
    """Return the effective user of a process; not the owner of its /proc directory, which may be root."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[2]) for line in file if line.startswith("Uid:"))
    return None


def platform_resource_config(layout: Layout) -> dict[str, Any] | None:
    """Return the platform's resourceconfig.json; None if there is none, or if a sidecar wrote it.

    A sidecar writes a copy beside its own file, by which the next run recognises that file. Raises
    ConfigError if the file is not a JSON object, or is not read in time.
    """
    path = os.path.join(layout.config, RESOURCES)
    try:
        data = read_file(path, again=True)
    except TimeoutError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if read_file(os.path.join(layout.config, COPY), again=True) == data:
            return None
    try:
        document = json.loads(data)
        check_texts(document)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); correct or remove it") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object; correct or remove it")
    return document


Flags = tuple[int | None, int | None]
"""`--host-index` and `--host-count`."""


def resolve_host(job: Job, layout: Layout, flags: Flags) -> tuple[Job, Hosts]:
    """Return the job with this host's channels only, and the hosts. Raises ConfigError."""
    hosts = identify(job, flags=flags, environment=os.environ, document=platform_resource_config(layout))
    return local_job(job, hosts), hosts
