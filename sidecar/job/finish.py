"""Requests of `penstock-finish` (`streamer.finish`): the trainer has ended; reply when its results are in S3.

    finish_requests   make both FIFOs beside those of the channels, and put the program into `input/config`
    serve             await a request ─▶ on_request(code, reason) ─▶ reply; one request after the other
    end of the block  remove the FIFOs; a requester that waits sees that it gets no reply

Both descriptors are open for reading and writing. So the request FIFO has a reader as long as this process
lives, and no end; a reply is written at once, also if its requester was killed. Nothing blocks: a reply fits
into a pipe of one page. Whoever may read the channels' FIFOs, the trainer, may write requests.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from sidecar.process.logs import log
from streamer import finish
from streamer.aio import readable
from streamer.directory import Directory
from streamer.errors import SinkError
from streamer.sink.fifo_names import check_fifo
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from sidecar.job.layout import Layout

LONGEST = 1 << 16
"""Bytes of the longest line that may be a request."""
TEXT = 600
"""Most characters of a reply's text: the line is shorter than a page, whatever they are."""


def parse_request(line: bytes) -> tuple[str, int, str] | None:
    """Return a request's id, the trainer's exit code and the reason of a failure; None for another line."""
    try:
        document = json.loads(line)
        own, code, reason = document["id"], document["code"], document["reason"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    texts = (
        isinstance(own, str) and len(own) <= 64 and isinstance(reason, str) and len(reason) <= finish.REASON
    )
    return (own, code, reason) if texts and type(code) is int and 0 <= code < 256 else None


class FinishRequests:
    """The sidecar's ends of both FIFOs, which `finish_requests` opens and closes."""

    def __init__(self, requests: int, replies: int) -> None:
        """`requests`, `replies`: descriptors of the FIFOs, for reading and writing."""
        self._requests = requests
        self._replies = replies
        self._received = b""

    async def serve(self, on_request: Callable[[int, str], Awaitable[tuple[int, str]]]) -> None:
        """Reply to requests until cancelled.

        `on_request`: given exit code and reason, returns once all is in S3, or is known not to be, with 0 or
        `Exit.NOT_UPLOADED` and a text for the trainer's log. Its errors are raised.
        """
        while True:
            request, code, reason = await self._next()
            log.info("the trainer has ended", code=code, reason=reason)
            result, text = await on_request(code, reason)
            reply = json.dumps({"id": request, "code": result, "text": text[:TEXT]})
            with contextlib.suppress(BlockingIOError):
                os.read(self._replies, LONGEST)  # replies to requesters that were killed
            os.write(self._replies, f"{reply}\n".encode())

    async def _next(self) -> tuple[str, int, str]:
        """Await a request; name lines that are not requests in the log."""
        while True:
            while b"\n" in self._received:
                line, _, self._received = self._received.partition(b"\n")
                if (request := parse_request(line)) is not None:
                    return request
                if line:
                    log.warning("not a request of penstock-finish", line=line[:200].decode(errors="replace"))
            await readable(self._requests)
            # A line that is too long loses its beginning, and is no request.
            self._received = self._received[-LONGEST:] + os.read(self._requests, LONGEST)


@contextlib.contextmanager
def finish_requests(layout: Layout, *, fifo_mode: int) -> Iterator[FinishRequests]:
    """Offer FIFOs and program until the end of the block, in directories that exist. Raises SinkError."""
    modes = {finish.REQUESTS: fifo_mode | (fifo_mode & 0o444) >> 1, finish.REPLIES: fifo_mode}
    with contextlib.ExitStack() as stack:
        try:
            here = stack.enter_context(Directory.at(layout.place))
            fds = [_fifo(here, name, mode, stack) for name, mode in modes.items()]
            with open(finish.__file__, "rb") as file:
                program = file.read()
            config = stack.enter_context(Directory.at(os.path.join(layout.root, "input", "config")))
            with config.errors(finish.PROGRAM):
                replace_file(finish.PROGRAM, program, mode=0o755, dir_fd=config.fd)
        except OSError as error:
            raise SinkError(
                f"cannot make {error.filename}: {error.strerror}; remove it, and let this user write there"
            ) from error
        try:
            yield FinishRequests(*fds)
        finally:
            for name in modes:
                with contextlib.suppress(OSError):
                    here.remove(name)


def _fifo(here: Directory, name: str, mode: int, stack: contextlib.ExitStack) -> int:
    """Make a FIFO and open both its ends; `stack` closes them. Raises OSError, Shortage."""
    with here.errors(name):
        here.remove(name)  # of an earlier sidecar, perhaps with bytes
        os.mkfifo(name, mode, dir_fd=here.fd)
        fd = os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here.fd)
        stack.callback(os.close, fd)
        check_fifo(os.path.join(here.path, name), os.fstat(fd))
        os.fchmod(fd, mode)  # mkfifo(3) applies the umask
    return fd
