"""What `penstock doctor` asks of the storage: as little as shows that a job could be served.

Each channel is listed for its first page and one byte of its first object is read, under a right and under a
wrong If-Match; a manifest is read for one byte. Nothing is written. The speed probe reads those first objects
over the very transport that the job would have, into a pipe, for `PROBE` seconds at the most.
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
from sidecar.job.endmarks import JOIN_ADVICE, carried
from sidecar.process.exits import Exit, exit_code
from streamer.errors import ErrorContext, Missing, PenstockError, SourceChanged
from streamer.plan import ObjectRef, Plan, bare_etag
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import open_transport, why_read
from streamer.retry import RetryPolicy
from streamer.s3.catalog.listing import first_page
from streamer.s3.catalog.object_info import AiobotocoreHeadClient
from streamer.s3.client.bounded import within_stall
from streamer.s3.client.faults import answered_code, clock_ahead, map_errors
from streamer.s3.ranges import check_header
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from streamer.s3.client.session import Clients

PROBE = 5.0
"""Seconds of the speed probe."""
SKEW_WARNED, SKEW_REFUSED = 60.0, 900.0
"""Seconds; S3 refuses signatures that are a quarter of an hour off (RequestTimeTooSkewed)."""
SLOW = 20e6
"""Bytes per second below which a trainer is seldom the slower side."""
FIXES = {
    Exit.DENIED: "Check the keys, the region and the bucket's policy.",
    Exit.MISSING: "Correct S3Uri; on an S3-compatible server try Endpoint.PathStyle: true.",
    Exit.UNREACHABLE: "Check Endpoint.Url, the network, and what stands in between.",
}
CAUSES = {
    "AccessDenied": "Allow {action} in the policies of the credentials and of the bucket; for objects "
    "encrypted with SSE-KMS, kms:Decrypt on their key too.",
    "InvalidAccessKeyId": "Correct AWS_ACCESS_KEY_ID or the profile; temporary keys need AWS_SESSION_TOKEN.",
    "SignatureDoesNotMatch": "Correct AWS_SECRET_ACCESS_KEY: it does not belong to the access key. If "
    "it does, correct Endpoint.Region.",
    "ExpiredToken": "Renew the credentials: the session token has expired.",
    "InvalidToken": "Set AWS_SESSION_TOKEN to the token that came with the keys, or renew all three.",
    "RequestTimeTooSkewed": "Set the clock of this machine (NTP).",
    "NoSuchBucket": "Correct the bucket in S3Uri; on an S3-compatible server try Endpoint.PathStyle: true.",
}
"""What to do, by the code of S3's answer; by the exit code where that says nothing."""
CAUSES |= {"403": CAUSES["AccessDenied"], "ExpiredTokenException": CAUSES["ExpiredToken"]}
NO_SUCH_ETAG = '"00000000000000000000000000000000"'


async def storage(job: Job, clients: Clients) -> AsyncIterator[Finding]:
    """All findings about endpoint, credentials and every channel, in order."""
    yield await addresses(clients)
    found = await credentials(clients)
    yield found
    if found.state == "failure":
        return
    samples: list[ObjectRef] = []
    for channel in job.input_data_config:
        try:
            refs, about = await _look(clients, channel)
        except PenstockError as error:
            prefix = channel.source.s3_data_type == "S3Prefix"
            action = "s3:ListBucket on the bucket" if prefix else "s3:GetObject on the manifest"
            yield _failed(f"list {channel.channel_name}", error, action)
            continue
        yield Finding(f"list {channel.channel_name}", "ok", about)
        if refs:
            if job.mode(channel) == "Pipe" and (join := carried(channel, (ref.key for ref in refs))):
                text = f"objects of the format {join}, which ends with a mark, one after the other"
                yield Finding(f"end marks {channel.channel_name}", "warning", text, JOIN_ADVICE.format(join))
            readable = True
            async for finding in _read(clients, channel.channel_name, refs[0]):
                readable = readable and finding.state != "failure"
                yield finding
            samples += refs if readable else []
    if samples:
        yield await speed(job, clients, samples)


async def addresses(clients: Clients) -> Finding:
    """How many front ends the endpoint's name stands for."""
    url = urlsplit(clients.data.meta.endpoint_url)
    host = url.hostname or ""
    try:
        told = await asyncio.get_running_loop().getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "Check Penstock.Endpoint.Url, Region and the resolver."
        return Finding("DNS", "failure", f"{host}: {error.strerror}", fix, Exit.UNREACHABLE)
    count = len({address[4][0] for address in told})
    text = f"{host} has {count} address{'es' if count > 1 else ''}"
    if count == 1 and host.endswith(".amazonaws.com"):
        fix = "S3 answers with eight; a resolver that passes on one makes one machine carry all connections."
        return Finding("DNS", "warning", text, fix)
    return Finding("DNS", "ok", text)


async def credentials(clients: Clients) -> Finding:
    """Whether there are any, and where they come from."""
    if clients.anonymous:
        return Finding("credentials", "ok", "none: requests are not signed, as asked for")
    if clients.credentials is None:
        fix = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or Anonymous: true."
        return Finding("credentials", "failure", "none found", fix, Exit.DENIED)
    try:
        with map_errors(ErrorContext()):
            await clients.credentials.get_frozen_credentials()
    except PenstockError as error:
        return _failed("credentials", error)
    return Finding("credentials", "ok", f"found by the method {clients.credentials.method!r}")


async def _look(clients: Clients, channel: ChannelConfig) -> tuple[list[ObjectRef], str]:
    """The first objects of a channel, and what there is, in words."""
    uri, kind = channel.source.uri, channel.source.s3_data_type
    if kind != "S3Prefix":
        manifest = await AiobotocoreHeadClient(clients.control).stat(uri.bucket, uri.key)
        return [], f"{kind} of {manifest.size} bytes; its objects are not looked at"
    refs, truncated = await first_page(clients.control, uri)
    if not refs:
        raise Missing(
            "no object matches this prefix; check S3Uri (a prefix is case-sensitive)", ErrorContext(*uri)
        )
    more = " or more" if truncated else ""
    return [ref for ref in refs if ref.size], f"objects: {len(refs)}{more}"


async def _read(clients: Clients, name: str, ref: ObjectRef) -> AsyncIterator[Finding]:
    """One byte of an object, and what the endpoint makes of Range, If-Match and checksums."""
    context = ErrorContext(ref.bucket, ref.key)
    # Some servers answer `bytes=0-0` with the whole object. A run asks for it of objects of one byte alone.
    offset = min(1, ref.size - 1)
    asked: dict[str, Any] = {"Bucket": ref.bucket, "Key": ref.key, "Range": f"bytes={offset}-{offset}"}
    try:
        with map_errors(context):
            answer = await clients.data.get_object(**asked, ChecksumMode="ENABLED")
            async with answer["Body"] as body, within_stall(clients.stall_timeout, context):
                content = body.raw_stream.content
                data = await content.read(2) if answer.get("ContentLength") == 1 else b""
    except PenstockError as error:
        yield _failed(f"get {name}", error, "s3:GetObject on the objects")
        return
    yield Finding(f"get {name}", "ok", f"s3://{ref.bucket}/{ref.key}")
    metadata = answer["ResponseMetadata"]
    yield _range(name, ref, answer, data, offset=offset)
    if (told := answer.get("ETag")) is None or bare_etag(told) != ref.etag:
        fix = "The sidecar cannot tell versions of an object apart there: take another endpoint."
        text = f"listed as {ref.etag}, sent as {told or 'none'}"
        yield Finding(f"ETag {name}", "failure", text, fix, Exit.UNREACHABLE)
    yield _clock(metadata["HTTPHeaders"].get("date"))
    yield await _if_match(clients, name, asked, context)
    sums = sorted(key for key in answer if key.startswith("Checksum") and key != "ChecksumType")
    yield Finding(f"checksums {name}", "ok", ", ".join(sums) or "none are told")


def _range(name: str, ref: ObjectRef, answer: Any, data: bytes, *, offset: int) -> Finding:
    """Whether a part would accept the answer, but for its ETag, which has a finding of its own."""
    status, length = answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentLength")
    text = f"answered {status} with {length} bytes for one"
    with contextlib.suppress(PenstockError):
        check_header(
            ref,
            offset,
            offset + 1,
            ErrorContext(ref.bucket, ref.key),
            status=status,
            content_range=answer.get("ContentRange"),
            content_length=length,
            etag=ref.etag,
            version=None,
        )
        if len(data) == 1:
            return Finding(f"Range {name}", "ok", answer.get("ContentRange") or text)
    fix = "The endpoint ignores Range, as a proxy may: take another one. Penstock cannot stream from it."
    told = f"{text}, Content-Range {answer['ContentRange']}" if answer.get("ContentRange") else text
    return Finding(f"Range {name}", "failure", told, fix, Exit.UNREACHABLE)


async def _if_match(clients: Clients, name: str, asked: dict[str, Any], context: ErrorContext) -> Finding:
    check = f"If-Match {name}"
    try:
        with map_errors(context):
            answer = await clients.data.get_object(**asked, IfMatch=NO_SUCH_ETAG)
            answer["Body"].close()
    except SourceChanged:
        return Finding(check, "ok", "another version is refused")
    except PenstockError as error:
        return _failed(check, error)
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
    """Bytes per second of the first objects, over the job's own transport, into a pipe that is emptied."""
    penstock, counters, plan = job.penstock, ChannelCounters(), Plan.of(samples)
    why = why_read(plan, check=job.checks, separate=job.needs_records)
    try:
        async with open_transport(
            clients,
            wish=penstock.transport,
            buckets=plan.buckets(),
            channels=[why],
            budget=job.budget,
            requests_in_flight=penstock.requests_in_flight,
            part_size=penstock.part_size,
            hedge=penstock.hedge_budget,
        ) as transport:
            name, started = transport.name, time.monotonic()
            with _emptied() as write_end, contextlib.suppress(TimeoutError):
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
        return _failed("speed", error)
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
def _emptied() -> Iterator[int]:
    """The write end of a pipe that a thread reads to its end."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)

    def empty() -> None:
        while os.read(read_end, 1 << 20):
            pass
        os.close(read_end)

    thread = threading.Thread(target=empty, name="doctor")
    thread.start()
    try:
        yield write_end
    finally:
        os.close(write_end)
        thread.join()


def _failed(check: str, error: PenstockError, action: str = "s3:ListBucket and s3:GetObject") -> Finding:
    """A failure, with what mends its cause. `action`: what a policy must allow for the request."""
    code = exit_code(error)
    fix = CAUSES.get(answered_code(error)) or FIXES.get(code) or "Do as the text says."
    return Finding(check, "failure", str(error), fix.format(action=action), code)
