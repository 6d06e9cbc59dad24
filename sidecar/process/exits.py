"""Exit codes of the `penstock` command, a public interface; docs/reference/exit-codes.md lists them."""

from __future__ import annotations

from enum import IntEnum

from streamer.errors import (
    ConfigError,
    CorruptObject,
    Denied,
    GaveUp,
    Mismatch,
    Missing,
    PenstockError,
    PlanRefused,
    ReaderGone,
    SinkError,
    SourceChanged,
    SourceError,
    WrongEndpoint,
)


class Exit(IntEnum):
    """Exit codes, each with its meaning."""

    OK = 0
    BUG = 1
    """An error that Penstock did not expect; the traceback is in the log."""
    CONFIG = 2
    """The job file or the command line cannot be carried out as written, or names a wrong endpoint."""
    DENIED = 3
    """Credentials are absent, wrong or insufficient."""
    MISSING = 4
    """A bucket or an object does not exist, or a prefix matches no object."""
    UNREACHABLE = 5
    """The endpoint did not answer, or answered wrongly, for `GiveUpAfter` seconds."""
    CHANGED = 6
    """An object was replaced or deleted after it was listed, or a held FIFO is of another plan."""
    LOCAL = 7
    """The FIFO directory, a FIFO, a port or a limit of this machine is at fault."""
    CORRUPT = 8
    """An object is corrupt: it cannot be inflated, or its bytes do not match its checksum."""
    NOT_FOUND = 127
    """`exec`: the command does not exist, as in a shell."""
    INTERRUPTED = 130
    """Ctrl-C, or a second signal, ended the process at once."""
    READER_GONE = 141
    """The reader of standard output closed it early; a shell reports SIGPIPE with the same code."""


def exit_code(error: PenstockError) -> Exit:  # noqa: PLR0911 - a table; the first error that fits decides
    """Return the exit code for an error that ends the process."""
    if isinstance(error, (ConfigError, PlanRefused, WrongEndpoint)):
        return Exit.CONFIG
    if isinstance(error, ReaderGone):
        return Exit.READER_GONE
    if isinstance(error, SinkError):
        return Exit.LOCAL
    if isinstance(error, GaveUp) and isinstance(error.__cause__, Denied):
        return Exit.DENIED
    if isinstance(error, Denied):
        return Exit.DENIED
    if isinstance(error, Missing):
        return Exit.MISSING
    if isinstance(error, SourceChanged):
        return Exit.CHANGED
    if isinstance(error, (CorruptObject, Mismatch)):
        return Exit.CORRUPT
    if isinstance(error, SourceError):
        return Exit.UNREACHABLE
    return Exit.BUG
