"""The seam between a transport and the relay.

The relay owns order, memory, retries and time; a transport owns one thing: getting the bytes of one
part out of S3, from the next byte that is missing. So the whole contract is

    relay      creates a receiver for a part, with its room already reserved in the budget
    transport  asks for `[part.start + receiver.received, part.end)`, checks the head of the answer,
               calls `answered()`, then `feed()` for whatever arrives, and returns after the last byte
    failure    is a raised `SourceError`; what was fed stays valid, and calling `fetch` again resumes
               at the next byte with a narrower range

A receiver, not a return value, because a transport may deliver without the bytes ever entering this
process: one that moves bodies by splice(2) needs a place with a file descriptor, which is a richer
receiver behind the same call. The sink's half of that place is `streamer.sink.outlet.Drainable`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from streamer.errors import BadAnswer, SourceChanged, Where
from streamer.plan.segments import bare_etag
from streamer.secrets import quoted

if TYPE_CHECKING:
    from streamer.plan import ObjectRef, Part

Phase = Literal["credentials", "connect", "first_byte", "body", "throttled", "retry"]
PHASES: tuple[Phase, ...] = ("credentials", "connect", "first_byte", "body", "throttled", "retry")
"""What a request for a part is at; throttled and retry: waiting to be sent again, after SlowDown or after
another failure."""


class Receiver(Protocol):
    """Where a transport puts the bytes of one part, in order."""

    @property
    def part(self) -> Part:
        """What is wanted: its body; the literals around it are none of a transport's."""

    @property
    def received(self) -> int:
        """How many of the body's bytes are here already, from the part's start."""

    def doing(self, phase: Phase) -> None:
        """The request is at this now; a transport that cannot tell leaves it at `first_byte`."""

    def answered(self) -> None:
        """The head of a right answer is here: the first-byte time ends now."""

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises BadAnswer if they are more than the part has left."""

    @property
    def full(self) -> bool:
        """Whether nothing more should be fed until `on_room` is called."""

    avoid: str | None
    """An address that the request should not go to, if there is another."""
    peer: str | None
    """Where a transport says which address it has chosen, if it knows."""
    on_room: Callable[[], None] | None
    """Called once, when a full receiver has room again."""


class Body(Protocol):
    """What is still to come of one answer's body: in a socket, or on its way there."""

    @property
    def fd(self) -> int:
        """The socket; its next byte is the body's next."""

    @property
    def pending(self) -> int:
        """Bytes of it that have left the socket already, and are not with the receiver (TLS)."""

    @property
    def left(self) -> int:
        """Bytes of the body that are not with the receiver."""

    def want(self) -> None:
        """Leave nothing in the socket: have the receiver asked again when more than a little is there."""


B_contra = TypeVar("B_contra", bound=Body, contravariant=True)


class WaitingReceiver(Receiver, Protocol[B_contra]):
    """A receiver that may leave a body in its socket, and move it itself when its turn has come."""

    def leaves(self, body: B_contra, *, full: bool) -> bool:
        """Whether bytes that are there shall stay in the socket, until the receiver moves them.

        `full`: the socket holds no more, or no more will come. Raises BlockingIOError if the socket has
        nothing now, NoRoom if the receiver wants nothing.
        """

    def forget(self, body: B_contra) -> None:
        """The request has ended: nothing more can be moved."""


class SplicedBody(Body, Protocol):
    """One that can be moved without entering this process."""

    def move_into(self, fd: int) -> int:
        """Splice what the socket has into the pipe `fd`; 0 if nothing more will come by this request.

        Raises BlockingIOError if the socket is empty or the pipe full, BrokenPipeError if nobody reads it.
        """


class SpliceReceiver(WaitingReceiver[SplicedBody], Protocol):
    """A receiver that can take bytes from a socket without their entering this process."""

    def take_from(self, body: SplicedBody) -> int:
        """Move some bytes out of the socket; 0 at its end of file.

        Raises BlockingIOError if the socket has nothing now, NoRoom if the receiver must be drained first;
        `on_room` tells when it has been.
        """

    def moved(self, count: int) -> None:
        """So many bytes have gone through `body.move_into`."""


class CopiedBody(Body, Protocol):
    """One that is read, and decrypted if need be."""

    def pull(self) -> int:
        """Read some of what the socket has into the receiver's `room`; 0 if there is nothing now."""


class CopyReceiver(WaitingReceiver[CopiedBody], Protocol):
    """A receiver that provides the memory that bytes are read into."""

    def room(self, limit: int) -> memoryview:
        """Where the next bytes go, `limit` at the most."""

    def filled(self, count: int) -> None:
        """So many bytes have been put where `room` said."""


class NoRoom(Exception):
    """The receiver is full: leave the rest in the socket, where TCP holds the sender back."""


class RangeSource(Protocol):
    """A transport: fetches parts, several at once."""

    @property
    def name(self) -> str:
        """For people and metrics."""

    async def fetch(self, into: Receiver, *, attempt: int) -> None:
        """Bring every missing byte of `into.part`.

        `attempt` counts from 1 and appears in errors. Raises SourceError; cancelling it drops the
        connection in use and leaves `into` with what had arrived.
        """


_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")


def check_head(
    ref: ObjectRef,
    first: int,
    end: int,
    where: Where,
    *,
    status: int,
    content_range: str | None,
    content_length: int | None,
    etag: str | None,
    version: str | None,
) -> None:
    """Refuse an answer that is not bytes `first` to `end` of the version that `ref` names.

    206 is the rule (RFC 9110 §15.3.7); 200 with a right Content-Range is accepted, since some
    compatible servers send it. The answer must prove its version by its ETag, or by the version id that was
    asked for: a server may ignore If-Match, and `versionId` too. `version`: its `x-amz-version-id`. Raises
    SourceChanged if the version or size is another, BadAnswer if that is not said, or if the range or length
    is not what was asked for.
    """
    if status not in (200, 206):
        raise BadAnswer(f"answered {status} to a ranged GET", where)
    check_version(ref.version, version, where)
    if etag is not None and bare_etag(etag) != ref.etag:
        raise SourceChanged(
            f"the object was replaced after it was listed (ETag {ref.etag} then, {quoted(etag)} now)", where
        )
    if etag is None and (ref.version is None or version is None):
        raise BadAnswer("answered without an ETag, so its bytes may be of another version", where)
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:
        whole = status == 200 and first == 0 and end == ref.size
        if not (whole and content_length == ref.size):
            raise BadAnswer(
                f"answered {status} with Content-Range {quoted(str(content_range))!r} to a ranged GET", where
            )
        return
    begin, last, size = map(int, match.groups())
    if size != ref.size:
        raise SourceChanged(f"the object has {size} bytes now; {ref.size} were listed", where)
    if (begin, last + 1) != (first, end):
        raise BadAnswer(f"sent bytes {begin}-{last}; asked for {first}-{end - 1}", where)
    if content_length is not None and content_length != end - first:
        raise BadAnswer(f"promises {content_length} bytes for a range of {end - first}", where)


def check_version(asked: str | None, version: str | None, where: Where) -> None:
    """Refuse an answer that is not of the version `asked` for. `version`: its `x-amz-version-id`.

    S3 names the version in each answer to a request with `versionId`; a bucket that never had versions may
    leave out `null`. Raises BadAnswer.
    """
    if asked is None or version == asked or (version is None and asked == "null"):
        return
    said = "says no version" if version is None else f"is of version {quoted(version)}"
    raise BadAnswer(
        f"the answer {said}, where version {asked} was asked for; the server ignores versionId", where
    )
