"""The connection to the keeper that holds a job's FIFOs, for a job that has one.

The supervisor calls `connect` before the channels exist and `close` after they have ended; the channels'
write ends use the client in between. `hand_over` starts a keeper in mid-job if there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.process.logs import log
from streamer.aio import time_limit
from streamer.errors import SinkError
from streamer.helpers.keeper_client import FLUSH_WITHIN, KeeperClient
from streamer.helpers.keeper_connect import connected, started

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.helpers.keeper_client import Held


class KeeperLink:
    """The connection to the keeper of one job, if the job has one."""

    def __init__(self, wish: str | None, default: str) -> None:
        """`wish`: the socket of a keeper, `auto` to start one if there is none, None for no keeper.

        `default`: the socket of a keeper that is started here.
        """
        self._wish = wish
        self._default = default
        self._handing_over = False
        """Whether another sidecar will resume the channels, so the keeper must receive every message."""
        self.client: KeeperClient | None = None

    @property
    def wanted(self) -> bool:
        return self._wish is not None

    @property
    def held(self) -> Mapping[str, Held]:
        """FIFOs that the keeper held at the time of `connect`, by channel."""
        return {} if self.client is None else self.client.held

    async def connect(self) -> None:
        """Connect to the keeper, if one is wanted. Raises SinkError."""
        if self._wish is None:
            return
        self.client = await (started(self._default) if self._wish == "auto" else connected(self._wish))
        log.info("keeper", pid=self.client.pid, holds=sorted(self.client.held))

    async def hand_over(self, channels: Mapping[str, object]) -> KeeperClient:
        """Return the keeper that takes every channel's FIFO; start one if there is none. Raises SinkError."""
        if self.client is None:
            keeper = await started(self._default)
            if taken := sorted(keeper.held.keys() & channels.keys()):
                keeper.close()
                raise SinkError(
                    f"the keeper at {self._default} (process {keeper.pid}) still holds a FIFO of "
                    f"{taken[0]} from another run; end that process when no trainer reads the FIFO"
                )
            self.client = keeper
        self._handing_over = True
        return self.client

    async def close(self) -> None:
        """Close the connection when the keeper has received every message."""
        if self.client is None:
            return
        try:
            async with time_limit(None if self._handing_over else FLUSH_WITHIN):
                await self.client.flush()
        except TimeoutError:
            log.warning("the keeper does not respond, and may hold ended FIFOs", pid=self.client.pid)
        except SinkError as error:
            log.error("the keeper is lost", error=str(error))
        finally:
            self.client.close()
