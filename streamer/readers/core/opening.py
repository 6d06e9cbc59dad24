"""Opens the FIFO of an epoch once it exists, and explains why it does not.

    wait      until the FIFO's name appears (`streamer.readers.core.arrival`), at most `timeout` seconds; a
              warning says so after a twelfth of them
    leave     meanwhile, with a loaded state, leave the epochs before (`streamer.readers.core.earlier`)
    attach    open it for reading; its trailer is then the one that proves its end (`Proof`)

The epoch counts as used as soon as the FIFO is open, since a writer may have seen the reader. Whoever has
chosen the epoch is told if it was not used (`unused`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import time
from typing import TYPE_CHECKING

from streamer.errors import ChannelError, StreamError
from streamer.readers.core.arrival import Arrival
from streamer.readers.core.earlier import EarlierEpochs
from streamer.readers.core.late import sidecar_state, why_job_over, why_late, why_over
from streamer.readers.core.read_end import STDIN, ReadEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.readers.core.proof import Proof

logger = logging.getLogger("penstock")
WARNED_AT = 1 / 12
"""Share of `timeout` after which the wait is logged: 10 s of the usual 120."""
AT_ONCE = 1.0
"""Seconds after which it is logged if no sidecar runs."""
WARNED_BEFORE = 1.0
"""Least seconds from the warning to the error."""
ALONE = 3
"""Looks, one a second, that find no sidecar before that is logged; a restart takes about two."""

ELSEWHERE = (
    "if the sidecar is ready, its directory is another one: set SAGEMAKER_BASE_DIR, or mount its volume"
)


class Opening:
    """The opening of one stream, once."""

    def __init__(
        self, name: str, proof: Proof, *, timeout: float, hint: str, unused: Callable[[], None] | None
    ) -> None:
        """`unused`: called once by `end` if no writer has seen the reader."""
        self.leaves_earlier = False
        """Whether to leave the epochs before this one, because a loaded state begins in it."""
        self._earlier = EarlierEpochs(proof)
        self._name = name
        self._proof = proof
        self._timeout = timeout
        self._hint = hint
        self._unused = unused
        self._arrival: Arrival | None = None
        self._deadline = 0.0
        self._warned = False
        """Whether the wait has been logged."""
        self._alone = 0
        """Successive looks that have found a writer and no sidecar."""
        self._used = False
        """Whether a writer may have seen this reader, so that the epoch counts as read."""

    def __repr__(self) -> str:
        return f"<Opening of {self._name}{' [used]' if self._used else ''}>"

    def wait(self, over: Callable[[], bool]) -> None:
        """Wait until the FIFO exists, without opening it, or `over` is true. Raises as `open`."""
        self._deadline = time.monotonic() + self._timeout
        with contextlib.closing(Arrival(self._name)) as arrival, contextlib.closing(self._earlier):
            if not self._appears(arrival, self._timeout, over):
                raise self._absent()

    def open(self, wait: float | None) -> ReadEnd | None:
        """Open the FIFO once it exists; return None if it does not after `wait` seconds.

        Raises ChannelError if the epoch is over, if the FIFO does not appear within `timeout` seconds of the
        first call or cannot be read, StreamError if its trailer cannot be read.
        """
        if self._arrival is None:
            self._arrival = Arrival(self._name)
            self._deadline = time.monotonic() + self._timeout
        while True:
            left = max(0.0, self._deadline - time.monotonic())
            if not self._appears(self._arrival, left if wait is None else min(left, wait)):
                if time.monotonic() < self._deadline:
                    return None
                raise self._absent()
            with contextlib.suppress(FileNotFoundError):  # removed since `wait` returned: wait for another
                return self._attach(self._name)

    def _appears(self, arrival: Arrival, seconds: float, over: Callable[[], bool] = bool) -> bool:
        """Wait at most `seconds` until the FIFO may be opened or `over` is true, as `Arrival.wait`."""
        until = time.monotonic() + seconds

        def there() -> bool:
            state = sidecar_state(self._proof.directory)
            if self.leaves_earlier and state in {"ended", "starting"}:
                return over()  # names may be of the sidecar before, and its successor removes them
            if os.path.exists(self._name) or over():
                return True
            # Without a wait the caller only looks, such as a worker that joins others whose epoch has ended.
            if seconds and state == "ready" and (why := why_over(self._proof)):
                raise ChannelError(why)
            if self.leaves_earlier:
                self._earlier.leave()
            return False

        while not arrival.wait(max(0.0, min(until, self._due()) - time.monotonic()), there):
            self.tell(f"{self._proof.base} has not appeared in {self._proof.directory}", self._deadline)
            if time.monotonic() >= until:
                return False
        return True

    def _due(self) -> float:
        """Return the time at which a wait until the deadline is logged."""
        rest = self._timeout * (1 - WARNED_AT)
        if self._warned or rest < WARNED_BEFORE:
            return math.inf
        ended = sidecar_state(self._proof.directory) == "ended"
        return self._deadline - (max(rest, self._timeout - AT_ONCE) if ended else rest)

    def tell(self, what: str, deadline: float) -> None:
        """Log once, when it is due, `what` the reader waits for until `deadline`, and why."""
        self._deadline = deadline
        if time.monotonic() >= self._due():
            self._warned = True
            left = deadline - time.monotonic()
            logger.warning("%s yet, and the reader waits for it %.0f s more; %s", what, left, self._offer())

    def look_for_sidecar(self) -> None:
        """Log once that no sidecar runs while its keeper holds the FIFO open, which then waits for ever."""
        proof = self._proof
        alone = proof.withdrawn_path is not None and sidecar_state(proof.directory) == "ended"
        self._alone = self._alone + 1 if alone else 0
        if self._alone == ALONE:
            logger.warning("%s brings no bytes: its keeper holds it open; %s", proof.base, why_late(proof))

    def open_withdrawn(self) -> ReadEnd | None:
        """Open the FIFO that another process of this reader has opened; return None if its epoch has ended.

        Raises as `open`.
        """
        path = self._proof.withdrawn_path
        with contextlib.suppress(FileNotFoundError):
            return None if path is None else self._attach(path)
        return None

    def _attach(self, path: str) -> ReadEnd:
        """Open `path`. Raises FileNotFoundError, ChannelError, StreamError."""
        try:
            end = ReadEnd(path, has_writer=self._name == STDIN)  # standard input has had its writer
        except FileNotFoundError:
            raise
        except IsADirectoryError:
            raise ChannelError(
                f"{self._name} is a directory: that is a File channel, not a Pipe channel"
            ) from None
        except PermissionError as error:
            of = os.stat(path)
            raise ChannelError(
                f"cannot read {path}: {error.strerror}; it is of user {of.st_uid} and group {of.st_gid}, and "
                f"its mode {stat.S_IMODE(of.st_mode):04o}: run the trainer in that group, or set FifoMode"
            ) from error
        except OSError as error:
            raise ChannelError(f"cannot read {path}: {error.strerror}") from error
        try:
            self._used = True
            self._proof.attach(end.fd)
        except BaseException:
            end.close()
            raise
        self._close()
        return end

    def no_writer(self) -> ChannelError:
        """Return the error that no writer came within `timeout` seconds: no writer has seen the reader."""
        self._used = False
        self.end()
        trailer = self._proof.trailer
        state = f"; the state of its trailer is '{trailer.state}'" if trailer else ""
        if trailer and trailer.error:
            state += f": {trailer.error}"
        why = why_late(self._proof) or "check that the sidecar is running"
        return ChannelError(
            f"no process opened {self._name} for writing in {self._timeout:g} s; {why}{state}"
        )

    def end(self) -> None:
        """Stop waiting; call `unused` if no writer can have seen the reader. Later calls do nothing."""
        self._close()
        if not self._used and self._unused is not None:
            callback, self._unused = self._unused, None
            callback()

    def _close(self) -> None:
        self._earlier.close()
        if self._arrival is not None:
            self._arrival.close()

    def _absent(self) -> ChannelError:
        proof = self._proof
        return ChannelError(
            f"{proof.base} did not appear in {proof.directory} in {self._timeout:g} s; {self._offer()}"
        )

    def _offer(self) -> str:
        """Return what the directory has instead, and what to do."""
        proof, names = self._proof, list[str]()
        try:
            names = sorted(name for name in os.listdir(proof.directory) if name.startswith(proof.prefix))
            offer = f"the directory has {', '.join(names) or 'no FIFO of this channel'}"
        except OSError as error:
            offer = f"the directory cannot be read: {error.strerror}"
        if why := why_job_over(proof) or why_late(proof):
            return f"{why}; {offer}"
        if not names:
            offer += f"; {ELSEWHERE}"
        with contextlib.suppress(StreamError):
            if proof.look() and proof.trailer:
                offer += f", and the state of the trailer of {proof.base} is '{proof.trailer.state}'"
        return f"{offer}: {self._hint}" if self._hint else offer
