"""Checks of `penstock doctor` on the storage, with as few requests as possible.

For each channel the doctor lists the first page, or finds the objects of a manifest's first rows, and reads
one byte of the first object, with a right and with a wrong If-Match (`object_checks`). It writes nothing. The
speed check reads those first objects over the job's transport into a pipe, for at most `PROBE` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sidecar.config.transport import transport_spec
from sidecar.doctor.machine import Finding
from sidecar.doctor.object_checks import etags_differ, read_checks
from sidecar.doctor.remedies import failed
from sidecar.process.exits import Exit
from sidecar.records.endmarks import channel_advice, end_mark_advice, unjoined_keys
from sidecar.records.line_ends import remedy, without_line_feed, wrong_format
from streamer.errors import ErrorContext, PenstockError
from streamer.plan import Arrangement, ObjectRef, Plan
from streamer.plan.selection import Limit
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import open_transport, why_read
from streamer.retry import RetryPolicy
from streamer.s3.client.barriers import proxy_of, proxy_text
from streamer.s3.client.faults import map_errors
from streamer.s3.manifests.manifest import Manifest
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.listing import first_page, nothing_below
from streamer.s3.pages.object_info import open_inspector
from streamer.s3.pages.pages import PAGE_PATIENCE, open_pages
from streamer.sink.outlet import PipeOutlet
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.doctor.machine import State
    from streamer.plan.strays import Strays
    from streamer.s3.client.session import Clients
    from streamer.s3.pages.pages import PageSource

PROBE = 5.0
"""Most seconds of the speed check."""
ROWS = 8
"""Rows of a manifest whose objects are looked at."""
CONNECT = 3.0
"""Seconds in which an address must accept a connection."""
SLOW = 20e6
"""Bytes per second below which storage is slower than most trainers."""


async def storage(job: Job, clients: Clients, begin: Callable[[str], None]) -> AsyncIterator[Finding]:
    """Check endpoint, credentials and every channel, in this order; yield the findings.

    `begin`: see `sidecar.doctor.examination.examine`.
    """
    begin("DNS")
    yield await addresses(clients)
    begin("credentials")
    finding = await credentials(clients)
    yield finding
    if finding.state == "failure":
        return
    samples: list[ObjectRef] = []
    with open_pages(clients) as pages:
        for channel in job.input_data_config:
            begin(f"list {channel.channel_name}")
            try:
                strays = channel.penstock.selection.strays(records=channel.record_wrapper_type != "None")
                refs, summary = await _first_objects(job, clients, pages, channel, strays)
            except PenstockError as error:
                prefix = channel.source.s3_data_type == "S3Prefix"
                action = (
                    "s3:ListBucket on the bucket"
                    if prefix
                    else "s3:GetObject on the manifest and its objects"
                )
                yield failed(f"list {channel.channel_name}", error, action)
                continue
            yield Finding(f"list {channel.channel_name}", "ok", summary)
            if strays is not None and strays.keys:
                text = f"objects that may not be data: {', '.join(strays.keys)}"
                yield Finding(f"strays {channel.channel_name}", "warning", text, channel_advice(strays))
            if refs:
                if job.mode(channel) == "Pipe" and (
                    form := unjoined_keys(channel, (ref.key for ref in refs))
                ):
                    text = f"objects of the format {form}, which ends with a mark, one after the other"
                    fix = end_mark_advice(channel, form)
                    yield Finding(f"end marks {channel.channel_name}", "warning", text, fix)
                begin(f"line ends {channel.channel_name}")
                if job.mode(channel) == "Pipe" and (ref := await without_line_feed(channel, refs, clients)):
                    text = f"s3://{ref.bucket}/{ref.key} does not end with a line feed"
                    yield Finding(f"line ends {channel.channel_name}", "warning", text, remedy())
                if (warning := etags_differ(channel.channel_name, refs)) is not None:
                    yield warning
                readable = True
                begin(f"get {channel.channel_name}")
                async for finding in read_checks(clients, channel.channel_name, refs[0]):
                    readable = readable and finding.state != "failure"
                    yield finding
                samples += refs if readable else []
                begin(f"format {channel.channel_name}")
                if readable and (wrong := await _format(job, channel, refs, clients)) is not None:
                    yield wrong
    if samples:
        begin("speed")
        yield await speed(job, clients, samples)


async def addresses(clients: Clients) -> Finding:
    """Connect to the addresses of the endpoint's name, or name the proxy that does without them."""
    url = urlsplit(clients.endpoint_url)
    if (proxy := proxy_of(clients.endpoint_url)) is not None:
        text = f"requests go through the proxy {proxy_text(proxy, clients.endpoint_url)}"
        return Finding("proxy", "ok", text)
    host = url.hostname or ""
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(
            host, url.port or url.scheme, type=socket.SOCK_STREAM
        )
    except OSError as error:
        fix = "Check Penstock.Endpoint.Url, Region and the resolver."
        return Finding("DNS", "failure", f"{host}: {error.strerror}", fix, Exit.UNREACHABLE)
    count = len(found := {entry[4][0]: entry for entry in resolved})
    text = f"{host} has {count} address{'es' if count > 1 else ''}"
    if count > 1 and (dead := [each for each in await asyncio.gather(*map(_dead, found.values())) if each]):
        fix = "Let the name lead only to addresses that answer: each try of such a one costs time."
        return Finding("DNS", "warning", f"{text}; no connection to {', '.join(dead)}", fix)
    if count == 1 and host.endswith(".amazonaws.com"):
        fix = "S3 answers with eight; a resolver that passes on one makes one machine carry all connections."
        return Finding("DNS", "warning", text, fix)
    return Finding("DNS", "ok", text)


async def _dead(entry: tuple[Any, ...]) -> str:
    """Return the address and why it accepts no connection; empty if it does. `entry`: of `getaddrinfo`."""
    address = entry[4]
    try:
        async with asyncio.timeout(CONNECT):
            with socket.socket(entry[0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
                await asyncio.get_running_loop().sock_connect(sock, address)
    except TimeoutError:
        return f"{address[0]} (no answer in {CONNECT:g} s)"
    except OSError as error:
        return f"{address[0]} ({os.strerror(error.errno) if error.errno else error})"
    return ""


async def credentials(clients: Clients) -> Finding:
    """Check that there are credentials, and name their provider."""
    if clients.anonymous:
        return Finding("credentials", "ok", "none: requests are not signed, as asked for")
    if clients.credentials is None:
        fix = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or Anonymous: true."
        return Finding("credentials", "failure", "none found", fix, Exit.DENIED)
    try:
        with map_errors(ErrorContext()):
            await clients.credentials.get_frozen_credentials()
    except PenstockError as error:
        return failed("credentials", error)
    return Finding("credentials", "ok", f"found by the method {clients.credentials.method!r}")


async def _first_objects(
    job: Job, clients: Clients, pages: PageSource, channel: ChannelConfig, strays: Strays | None
) -> tuple[list[ObjectRef], str]:
    """Return the first selected objects of a channel that are not empty, and a summary in words.

    `strays` collects objects that are probably no data.
    """
    kind = channel.source.s3_data_type
    if kind != "S3Prefix":
        found = await _first_rows(job, clients, channel)
        return [ref for ref in found if ref.size], f"{kind}; objects of its first rows: {len(found)}"
    found, more = [], False
    for uri in channel.sources:
        keys = job.selection(channel).keys(uri.key, strays, bucket=uri.bucket)
        refs, truncated = await first_page(pages, uri, keys)
        if not refs and not keys.left_out:
            raise nothing_below(uri)
        found += refs
        more = more or truncated
    return [ref for ref in found if ref.size], f"objects: {len(found)}{' or more' if more else ''}"


async def _first_rows(job: Job, clients: Clients, channel: ChannelConfig) -> list[ObjectRef]:
    """Return the objects of the first selected rows of a manifest, found by HEADs."""
    with open_inspector(clients, give_up_after=PAGE_PATIENCE) as inspector:
        manifest = Manifest(
            clients,
            channel.source.uri,
            Arrangement(),
            channel.source.attribute_names if channel.source.s3_data_type != "ManifestFile" else None,
            selection=replace(job.selection(channel), limit=Limit(objects=ROWS)),
            object_clients=ObjectClients(inspector),
        )
        return list((await manifest.plan()).refs(0))


async def _format(
    job: Job, channel: ChannelConfig, refs: list[ObjectRef], clients: Clients
) -> Finding | None:
    """Return a finding if readers of the channel fail at its first bytes; None if they may not."""
    if job.mode(channel) != "Pipe" or (wrong := await wrong_format(channel, refs, clients)) is None:
        return None
    state: State = "failure" if channel.penstock.records else "ok"
    return Finding(f"format {channel.channel_name}", state, *wrong, Exit.CONFIG)


async def speed(job: Job, clients: Clients, samples: list[ObjectRef]) -> Finding:
    """Measure the bytes per second of the first objects, over the job's transport into a drained pipe."""
    counters, plan = ChannelCounters(), Plan.of(samples)
    why = why_read(plan, check=job.checks)
    try:
        async with open_transport(clients, transport_spec(job, plan.entries.buckets, [why])) as transport:
            name, started = transport.name, time.monotonic()
            with _drained_pipe() as write_end, contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE):
                    await stream_once(
                        plan,
                        transport.source,
                        transport.stages(why),
                        policy=RetryPolicy(give_up_after=PROBE),
                        counters=counters,
                        open_outlet=lambda on_gone: PipeOutlet(os.dup(write_end), on_gone=on_gone),
                    )
            seconds = time.monotonic() - started
    except PenstockError as error:
        return failed("speed", error)
    per_second = counters.written_bytes / max(seconds, 1e-3)
    text = f"{per_second / 1e6:.0f} MB/s: {counters.written_bytes / 1e6:.1f} MB in {seconds:.1f} s by {name}"
    if retries := counters.counts["retries"].total():
        text += f", {counted(retries, 'request')} repeated"
    if per_second < SLOW and counters.written_bytes > SLOW:
        return Finding(
            "speed", "warning", text, "Look at the network, and at the region: is this host near it?"
        )
    return Finding("speed", "ok", text)


@contextlib.contextmanager
def _drained_pipe() -> Iterator[int]:
    """Yield the write end of a pipe that a thread reads until the end of the block."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)

    def drain() -> None:
        while os.read(read_end, 1 << 20):
            pass
        os.close(read_end)

    thread = threading.Thread(target=drain, name="doctor")
    thread.start()
    try:
        yield write_end
    finally:
        os.close(write_end)
        thread.join()
