"""Checks of `penstock doctor` on the storage, with as few requests as possible.

For each channel the doctor lists the first page and reads one byte of the first object, with a right and with
a wrong If-Match. Of a manifest it reads the size. It writes nothing. The speed check reads those first
objects over the job's transport into a pipe, for at most `PROBE` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sidecar.doctor.machine import Finding
from sidecar.doctor.remedies import remedy
from sidecar.job.channels import transport_spec
from sidecar.job.endmarks import JOIN_ADVICE, unjoined_keys
from sidecar.job.listings import job_pages
from sidecar.job.strays import channel_advice
from sidecar.process.exits import Exit, exit_code
from streamer.errors import ErrorContext, PenstockError, SourceChanged
from streamer.plan import ObjectRef, Plan, bare_etag
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import open_transport, why_read
from streamer.retry import RetryPolicy
from streamer.s3.catalog.listing import first_page, nothing_below
from streamer.s3.catalog.object_info import AiobotocoreHeadClient
from streamer.s3.client.faults import clock_ahead, map_errors
from streamer.s3.client.stall import within_stall
from streamer.s3.ranges import check_header
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from streamer.plan.strays import Strays
    from streamer.s3.catalog.pages import PageSource
    from streamer.s3.client.session import Clients

PROBE = 5.0
"""Most seconds of the speed check."""
SKEW_WARNED, SKEW_REFUSED = 60.0, 900.0
"""Seconds of clock skew. S3 refuses signatures that are 15 minutes off (RequestTimeTooSkewed)."""
SLOW = 20e6
"""Bytes per second below which storage is slower than most trainers."""
NO_SUCH_ETAG = '"00000000000000000000000000000000"'


async def storage(job: Job, clients: Clients) -> AsyncIterator[Finding]:
    """Check endpoint, credentials and every channel, in this order; yield the findings."""
    yield await addresses(clients)
    finding = await credentials(clients)
    yield finding
    if finding.state == "failure":
        return
    samples: list[ObjectRef] = []
    with job_pages(job, clients) as pages:
        for channel in job.input_data_config:
            try:
                strays = channel.penstock.selection.strays(records=channel.record_wrapper_type != "None")
                refs, summary = await _first_objects(clients, pages, channel, strays)
            except PenstockError as error:
                prefix = channel.source.s3_data_type == "S3Prefix"
                action = "s3:ListBucket on the bucket" if prefix else "s3:GetObject on the manifest"
                yield failed(f"list {channel.channel_name}", error, action)
                continue
            yield Finding(f"list {channel.channel_name}", "ok", summary)
            if strays is not None and strays.keys:
                text = f"objects that may not be data: {', '.join(strays.keys)}"
                yield Finding(f"strays {channel.channel_name}", "warning", text, channel_advice(strays))
            if refs:
                if job.mode(channel) == "Pipe" and (
                    join := unjoined_keys(channel, (ref.key for ref in refs))
                ):
                    text = f"objects of the format {join}, which ends with a mark, one after the other"
                    fix = JOIN_ADVICE.format(join)
                    yield Finding(f"end marks {channel.channel_name}", "warning", text, fix)
                readable = True
                async for finding in _read(clients, channel.channel_name, refs[0]):
                    readable = readable and finding.state != "failure"
                    yield finding
                samples += refs if readable else []
    if samples:
        yield await speed(job, clients, samples)


async def addresses(clients: Clients) -> Finding:
    """Count the addresses of the endpoint's name."""
    url = urlsplit(clients.endpoint_url)
    host = url.hostname or ""
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "Check Penstock.Endpoint.Url, Region and the resolver."
        return Finding("DNS", "failure", f"{host}: {error.strerror}", fix, Exit.UNREACHABLE)
    count = len({entry[4][0] for entry in resolved})
    text = f"{host} has {count} address{'es' if count > 1 else ''}"
    if count == 1 and host.endswith(".amazonaws.com"):
        fix = "S3 answers with eight; a resolver that passes on one makes one machine carry all connections."
        return Finding("DNS", "warning", text, fix)
    return Finding("DNS", "ok", text)


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
    clients: Clients, pages: PageSource, channel: ChannelConfig, strays: Strays | None
) -> tuple[list[ObjectRef], str]:
    """Return the first selected objects of a channel that are not empty, and a summary in words.

    `strays` collects objects that are probably no data.
    """
    uri, kind = channel.source.uri, channel.source.s3_data_type
    if kind != "S3Prefix":
        manifest = await AiobotocoreHeadClient(clients.control).stat(uri.bucket, uri.key)
        return [], f"{kind} of {manifest.size} bytes; its objects are not looked at"
    found: list[ObjectRef] = []
    more = False
    for uri in channel.sources:
        keys = channel.penstock.selection.keys(uri.key, strays)
        refs, truncated = await first_page(pages, uri, keys)
        if not refs and not keys.left_out:
            raise nothing_below(uri)
        found += refs
        more = more or truncated
    return [ref for ref in found if ref.size], f"objects: {len(found)}{' or more' if more else ''}"


async def _read(clients: Clients, name: str, ref: ObjectRef) -> AsyncIterator[Finding]:
    """Read one byte of an object; check how the endpoint handles Range, If-Match and checksums."""
    context = ErrorContext(ref.bucket, ref.key)
    # Some servers answer `bytes=0-0` with the whole object. A run sends it only for objects of one byte.
    offset = min(1, ref.size - 1)
    request: dict[str, Any] = {"Bucket": ref.bucket, "Key": ref.key, "Range": f"bytes={offset}-{offset}"}
    try:
        with map_errors(context):
            response = await clients.data.get_object(**request, ChecksumMode="ENABLED")
            async with response["Body"] as body, within_stall(clients.stall_timeout, context):
                content = body.raw_stream.content
                data = await content.read(2) if response.get("ContentLength") == 1 else b""
    except PenstockError as error:
        yield failed(f"get {name}", error, "s3:GetObject on the objects")
        return
    yield Finding(f"get {name}", "ok", f"s3://{ref.bucket}/{ref.key}")
    metadata = response["ResponseMetadata"]
    yield _range(name, ref, response, data, offset=offset)
    if (etag := response.get("ETag")) is None or bare_etag(etag) != ref.etag:
        fix = "The sidecar cannot tell versions of an object apart there: take another endpoint."
        text = f"listed as {ref.etag}, sent as {etag or 'none'}"
        yield Finding(f"ETag {name}", "failure", text, fix, Exit.UNREACHABLE)
    yield _clock(metadata["HTTPHeaders"].get("date"))
    yield await _if_match(clients, name, ref, request, context)
    checksums = sorted(key for key in response if key.startswith("Checksum") and key != "ChecksumType")
    yield Finding(f"checksums {name}", "ok", ", ".join(checksums) or "none are told")


def _range(name: str, ref: ObjectRef, response: Any, data: bytes, *, offset: int) -> Finding:
    """Check that a part would accept the response. The ETag has a finding of its own."""
    status, length = response["ResponseMetadata"]["HTTPStatusCode"], response.get("ContentLength")
    content_range = response.get("ContentRange")
    text = f"answered {status} with {length} bytes for one"
    with contextlib.suppress(PenstockError):
        check_header(
            ref,
            offset,
            offset + 1,
            ErrorContext(ref.bucket, ref.key),
            status=status,
            content_range=content_range,
            content_length=length,
            etag=ref.etag,
            version=None,
        )
        if len(data) == 1:
            return Finding(f"Range {name}", "ok", content_range or text)
    fix = "The endpoint ignores Range, as a proxy may: take another one. Penstock cannot stream from it."
    if content_range:
        text += f", Content-Range {content_range}"
    return Finding(f"Range {name}", "failure", text, fix, Exit.UNREACHABLE)


async def _if_match(
    clients: Clients, name: str, ref: ObjectRef, request: dict[str, Any], context: ErrorContext
) -> Finding:
    """Check that the endpoint answers a request with the right ETag, and refuses one with a wrong ETag."""
    check = f"If-Match {name}"
    if not clients.data.sends_if_match:
        return Finding(check, "ok", "left out, as IfMatch: omit asks; the ETag of every response is compared")
    try:
        with map_errors(context):
            response = await clients.data.get_object(**request, IfMatch=f'"{ref.etag}"')
            response["Body"].close()
    except PenstockError as error:
        text = f"refused, although the ETag is right: {error}"
        fix = "Set Penstock.Endpoint.IfMatch: omit; the ETag of every response is compared in any case."
        return Finding(check, "failure", text, fix, exit_code(error))
    try:
        with map_errors(context):
            response = await clients.data.get_object(**request, IfMatch=NO_SUCH_ETAG)
            response["Body"].close()
    except SourceChanged:
        return Finding(check, "ok", "another version is refused")
    except PenstockError as error:
        return failed(check, error)
    fix = "Replaced objects are found by the ETag of the answer instead; do not change objects under a job."
    return Finding(check, "warning", "ignored: a wrong ETag was answered all the same", fix)


def _clock(date: str | None) -> Finding:
    skew = clock_ahead(date)
    if skew is None:
        return Finding("clock", "warning", "the endpoint tells no time", "Keep the clock right (NTP).")
    text = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the endpoint's"
    fix = "Set the clock (NTP): S3 refuses signatures that are 15 minutes off."
    if abs(skew) > SKEW_REFUSED:
        return Finding("clock", "failure", text, fix, Exit.DENIED)
    return Finding("clock", "warning", text, fix) if abs(skew) > SKEW_WARNED else Finding("clock", "ok", text)


async def speed(job: Job, clients: Clients, samples: list[ObjectRef]) -> Finding:
    """Measure the bytes per second of the first objects, over the job's transport into a drained pipe."""
    counters, plan = ChannelCounters(), Plan.of(samples)
    why = why_read(plan, check=job.checks, separate=job.needs_records)
    try:
        async with open_transport(clients, transport_spec(job, plan.buckets(), [why])) as transport:
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
    if counters.retries:
        text += f", {sum(counters.retries.values())} requests repeated"
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


def failed(check: str, error: PenstockError, action: str = "s3:ListBucket and s3:GetObject") -> Finding:
    """Return a failure with its remedy. `action`: the actions that a policy must allow for the request."""
    return Finding(check, "failure", str(error), remedy(error, action), exit_code(error))
