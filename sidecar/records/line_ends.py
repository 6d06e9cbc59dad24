"""Looks at bytes of a channel's objects by small GETs: the last ones of texts, the first ones of any format.

Objects follow each other in a FIFO without a byte between them. So the last line of an object without a line
feed and the first line of the next object are one line for every reader. `penstock run`, `doctor` and `cat`
warn of it; `Join: lines` adds the line feed.

    first keys of text ─▶ at most `MOST` objects ─▶ one GET of a byte each ─▶ the first without

`wrong_format` compares the first bytes of the first object with `Records.Format`: `penstock plan` and
`doctor` name a difference, at which Penstock's readers of the channel fail.

A look is a service, so no error of it ends anything: whoever streams the object gets the same error. A job
does not wait for it before it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice
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


SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson", ".tsv", ".txt")
MOST_KEYS = 1000
"""Most keys of a channel that are compared with the suffixes."""
MOST = 8
"""Most objects whose last byte is asked for, all at once: files of one program end alike."""
PATIENCE = 10.0
"""Seconds after which the look is given up."""


def remedy(switch: str = "Penstock: {Join: lines} to the channel") -> str:
    """Return what to do about objects that do not end with a line feed."""
    return (
        "the last line of such an object and the first line of the next one are one line; "
        f"add {switch}, which adds a line feed"
    )


async def without_line_feed(
    channel: ChannelConfig, refs: Iterable[ObjectRef], clients: Clients
) -> ObjectRef | None:
    """Return an object of a channel's sample that ends in the middle of a line, if there is one."""
    glued = channel.penstock.join is None and channel.record_wrapper_type == "None"
    return await unended(refs, clients) if glued and channel.compression_type == "None" else None


async def unended(refs: Iterable[ObjectRef], clients: Clients) -> ObjectRef | None:
    """Return an object of text that does not end with a line feed; None if a sample has none."""
    texts = [ref for ref in islice(refs, MOST_KEYS) if ref.size and ref.key.lower().endswith(SUFFIXES)]
    if len(texts) < 2:
        return None
    sample = texts[:: -(-len(texts) // MOST)]
    with contextlib.closing(ControlClient(clients)) as control:
        try:
            async with asyncio.timeout(PATIENCE):
                ended = await asyncio.gather(*(_ends_a_line(control, ref) for ref in sample))
        except TimeoutError:
            return None
    return next((ref for ref, whole in zip(sample, ended, strict=True) if not whole), None)


async def _ends_a_line(control: ControlClient, ref: ObjectRef) -> bool:
    """Return whether the last byte of an object is a line feed, or is not known."""
    last = ref.size - 1
    with contextlib.suppress(PenstockError):
        response, data = await read_first(control, ref, {"Range": f"bytes={last}-{last}"})
        if response.status == 206 and data:  # a server that ignores Range shows another byte
            return data[:1] == b"\n"
    return True


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
