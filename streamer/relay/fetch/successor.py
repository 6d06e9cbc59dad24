"""Lets a further body go on where a stage ends: after a failure, or in place of a late body.

    its body ─ bytes that the stage has ─→ thrown away; those in doubt must be the same
             └ bytes after them ─────────→ stage

The body takes over with the first byte that the stage lacks, if it has sent the bytes in doubt as the stage
has them (`streamer.s3.client.doubt`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.errors import SourceError
from streamer.s3.client.doubt import DOUBTED
from streamer.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.relay.staging.stage import Stage
    from streamer.s3.ranges import Body

THROWN_AWAY = 64 * KIB
"""Bytes read and thrown away at a time."""


class Successor:
    """Reads a body up to the first byte that the stage lacks, and then attaches the body."""

    def __init__(
        self,
        body: Body,
        stage: Stage,
        at: int,
        *,
        on_won: Callable[[], None],
        on_differs: Callable[[], None] = lambda: None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`at`: offset of the body's next byte in the part. `on_won`: called before the body is attached.

        `on_differs`: called if the body's bytes are not those that the stage has in doubt. `wanted`: whether
        the body may still be attached: its task may have been cancelled and not have run since.
        """
        self.won = False
        self.differs = False
        self.thrown_away = 0
        self.again = b""
        """The last bytes that were thrown away, `DOUBTED` at most."""
        self._body = body
        self._stage = stage
        self._at = at
        self._on_won = on_won
        self._on_differs = on_differs
        self._wanted = wanted
        self._scratch = memoryview(bytearray(THROWN_AWAY))

    def advance(self) -> None:
        """Read what the stage already has; attach the body if it then has more. Called when bytes arrive."""
        body, stage = self._body, self._stage
        if not self._wanted():
            return
        try:
            while surplus := stage.received - self._at:
                # The first request has brought the whole part, or has dropped bytes in doubt.
                if not 0 < surplus < body.left:
                    return
                count = body.read_into(self._scratch[:surplus])
                self.again = (self.again + self._scratch[:count])[-DOUBTED:]
                self._at += count
                self.thrown_away += count
            body.probe()
        except BlockingIOError:
            body.notify(self.advance)
        except SourceError:
            return  # `Body.taken` raises it too
        else:
            if stage.agrees(self.again):
                self.won = True
                self._on_won()
                stage.attach(body)
            else:
                self.differs = True
                self._on_differs()
