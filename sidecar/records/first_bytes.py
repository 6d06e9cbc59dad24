"""Compares the first bytes of a channel's first object with `Records.Format`, by one small GET.

`penstock plan` and `doctor` name a difference, at which Penstock's readers of the channel fail. No error of
the look ends anything: whoever streams the object gets the same error.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from sidecar.records.rank_advice import Advice
from streamer.errors import PenstockError
from streamer.formats.signatures import LOOKED_AT, foreign, recognised
from streamer.s3.pages.object_get import ControlClient, read_first

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.config.request import ChannelConfig
    from streamer.plan import ObjectRef
    from streamer.s3.client.session import Clients

PATIENCE = 10.0
"""Seconds after which the look is given up."""


async def wrong_format(channel: ChannelConfig, refs: Iterable[ObjectRef], clients: Clients) -> Advice | None:
    """Return why readers fail at the first object that is not empty, and what to do; None if they may not.

    A channel without `Records` may have records of any format. Objects that are inflated, wrapped or named by
    an augmented manifest are not looked at: a reader gets other bytes first.
    """
    plain = channel.compression_type == "None" and channel.record_wrapper_type == "None"
    if not plain or channel.source.s3_data_type == "AugmentedManifestFile":
        return None
    skipped = int(channel.penstock.skip_bytes or 0)
    if (ref := next((each for each in refs if each.size > skipped), None)) is None:
        return None
    first, uri = await _first_bytes(ref, skipped, clients), f"s3://{ref.bucket}/{ref.key}"
    if (records := channel.penstock.records) is None:
        found = recognised(first)
        return None if found is None or found.kind else Advice(f"{uri} is {found.name}", found.remedy)
    if (found := foreign(first, records.record_format.kind)) is None:
        return None
    do = f"set Records.Format: {found.kind} in the channel" if found.kind else found.remedy
    return Advice(f"{uri} is {found.name}, not {records.format}", do)


async def _first_bytes(ref: ObjectRef, begin: int, clients: Clients) -> bytes:
    """Return bytes of an object from `begin` on, at most `LOOKED_AT`; none if S3 does not send them."""
    headers = {"Range": f"bytes={begin}-{min(ref.size, begin + LOOKED_AT) - 1}"}
    with (
        contextlib.suppress(PenstockError, TimeoutError),
        contextlib.closing(ControlClient(clients)) as control,
    ):
        async with asyncio.timeout(PATIENCE):
            response, data = await read_first(control, ref, headers, least=LOOKED_AT)
        if not begin or response.status == 206:  # a server that ignores Range sends other bytes
            return data[:LOOKED_AT]
    return b""
