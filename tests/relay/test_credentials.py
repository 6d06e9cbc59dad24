"""Credentials that expire in mid-stream, from each source that can renew them: not a byte is lost.

The sources are botocore's own providers over what they really ask: a process, a file, an HTTP server in the
container's place, an STS.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from aiohttp import web
from botocore.credentials import ReadOnlyCredentials
from botocore.utils import JSONFileCache, LoginTokenLoader, SSOTokenLoader

from sidecar.doctor.remedies import remedy
from sidecar.process.exits import Exit, exit_code
from streamer.errors import Denied, ErrorContext, Expired, GaveUp, PenstockError, SourceError
from streamer.plan import ObjectRef, Part, Plan, S3Uri, Segment
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import BufferPool, BufferStages
from streamer.relay.statistics import ChannelCounters
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.client.credentials import REWRITTEN, RenewableCredentials, renewed
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.faults import error_from_response
from streamer.s3.client.session import Clients, open_clients
from streamer.s3.ranges import Body, RangeRequest
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import MIB
from tests.kit.harness import PagesFrom, RunChannel, clients_of, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub, stalls

SSO = "https://x.test/"
pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # botocore's waits are slow, and know no other
]

SOON, LATER = 5, 36_000
"""Seconds of life; botocore renews what has less than ten minutes before every request."""


@pytest.fixture(params=["aiobotocore", "splice"])
def run(request: pytest.FixtureRequest) -> RunChannel:
    """Both that sign: the buffered transport's client is the kernel's."""
    return functools.partial(running_channel, transport=request.param)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, stub: S3Stub) -> S3Stub:
    """No key in the environment, which would come before every other source."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return stub


def _until(seconds: float) -> str:
    when = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.asynccontextmanager
async def _serving(*routes: web.RouteDef) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Issuer:
    """Hands out AKID0, AKID1, ...; the file `life` says how long the next one lasts."""

    def __init__(self, directory: Path) -> None:
        self.count = 0
        self.life = float(LATER)
        self.directory = directory

    def next(self) -> dict[str, str]:
        number, self.count = self.count, self.count + 1
        return {
            "AccessKeyId": f"AKID{number}",
            "SecretAccessKey": "s",
            "SessionToken": f"T{number}",
            "Expiration": _until(self.life),
        }

    @property
    def issued(self) -> int:
        return self.count


class ProcessIssuer(Issuer):
    """Keys from a credential_process: a program that counts in a file."""

    @property
    def issued(self) -> int:
        path = self.directory / "count"
        return int(path.read_text()) if path.exists() else 0

    def config(self) -> str:
        program = self.directory / "give.py"
        program.write_text(
            "import json, pathlib\n"
            f"here = pathlib.Path({str(self.directory)!r})\n"
            "count = here / 'count'\n"
            "n = int(count.read_text()) if count.exists() else 0\n"
            "count.write_text(str(n + 1))\n"
            "print(json.dumps({'Version': 1, 'AccessKeyId': f'AKID{n}', 'SecretAccessKey': 's',\n"
            f"    'SessionToken': f'T{{n}}', 'Expiration': {_until(LATER)!r}}}))\n"
        )
        return f"[default]\ncredential_process = {sys.executable} {program}\n"


def _write_keys(path: Path, number: int) -> None:
    new = path.with_suffix(".new")
    new.write_text(
        f"[default]\naws_access_key_id = AKID{number}\n"
        f"aws_secret_access_key = s\naws_session_token = T{number}\n"
    )
    os.replace(new, path)


@contextlib.asynccontextmanager
async def _source(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """One source of credentials, set up as its users do; yields what issues them, and how to rotate."""
    if kind == "process":
        process = ProcessIssuer(directory)
        (directory / "config").write_text(process.config())
        monkeypatch.setenv("AWS_CONFIG_FILE", str(directory / "config"))
        yield process, lambda: None
    elif kind == "file":
        issuer, path = Issuer(directory), directory / "credentials"
        _write_keys(path, 0)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        yield issuer, lambda: _write_keys(path, 1)
    elif kind == "container":
        issuer = Issuer(directory)

        async def give(_: web.Request) -> web.Response:
            found = issuer.next()
            found["Token"] = found.pop("SessionToken")
            return web.json_response(found)

        async with _serving(web.get("/creds", give)) as url:
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/creds")
            yield issuer, lambda: None
    else:
        issuer = Issuer(directory)
        (directory / "token").write_text("a.b.c")

        async def assume(request: web.Request) -> web.Response:
            assert (await request.post())["WebIdentityToken"] == "a.b.c"
            fields = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in issuer.next().items())
            return web.Response(
                content_type="text/xml",
                text="<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
                f"{fields}</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>",
            )

        async with _serving(web.post("/", assume)) as url:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(directory / "token"))
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
            yield issuer, lambda: None


async def test_the_question_for_a_checksum_renews_them_too(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a HEAD, which comes before the first GET, and whose refusal has no text."""
    truth = fill(bare, [90_000] * 6)
    bare.script(*[stalls(bare, after=1000)] * 2)
    async with (
        _source("file", tmp_path, monkeypatch) as (_, rotate),
        running_channel(bare, tmp_path, transport="buffered", check=True, requests_in_flight=2) as running,
    ):
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: bare.requests_in_flight == 2)
        rotate()
        bare.refused_keys["AKID0"] = "ExpiredToken"
        bare.release()
        assert await reading == truth
        await eventually(lambda: running.states)
        assert running.channel.statistics().counts["checked"] == {"unverifiable": 6}


async def test_small_objects_that_are_fetched_together_renew_them_too(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of one object of several is refused."""
    truth = fill(bare, [9_000] * 24)
    bare.script(*[stalls(bare, after=1000)] * 2)
    async with (
        _source("file", tmp_path, monkeypatch) as (_, rotate),
        running_channel(bare, tmp_path, transport="splice", requests_in_flight=4) as running,
    ):
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: bare.requests_in_flight >= 2)
        rotate()
        bare.refused_keys["AKID0"] = "ExpiredToken"
        bare.release()
        assert await reading == truth
        assert running.channel.statistics().counts["retries"]["expired"] >= 1


KINDS = ["process", "file", "container", "web identity"]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_refused_in_mid_stream_is_renewed(
    run: RunChannel, bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The clock still allows the key; S3 does not. Several requests are refused together, and one renews."""
    stub, truth = bare, fill(bare, [90_000] * 6)
    stub.script(*[stalls(stub, after=1000)] * 4)
    async with (
        _source(kind, tmp_path, monkeypatch) as (issuer, rotate),
        run(stub, tmp_path, requests_in_flight=4) as running,
    ):
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: stub.requests_in_flight == 4)
        rotate()
        stub.refused_keys["AKID0"] = "ExpiredToken"
        stub.release()
        assert await reading == truth
        assert running.channel.statistics().counts["retries"]["expired"] >= 1
        assert stub.seen[-1].token == "T1"
        assert issuer.issued in (0, 2), "asked more often than needed"


async def test_the_seconds_of_a_renewal_are_counted(
    run: RunChannel, bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time, so that the head of line is refused: of several, another one may renew first."""
    stub, truth = bare, fill(bare, [90_000] * 2)
    stub.script(stalls(stub, after=1000))
    async with (
        _source("process", tmp_path, monkeypatch) as (_, rotate),
        run(stub, tmp_path, requests_in_flight=1) as running,
    ):
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: stub.requests_in_flight == 1)
        rotate()
        stub.refused_keys["AKID0"] = "ExpiredToken"
        stub.release()
        assert await reading == truth
        assert running.channel.statistics().starved["credentials"] > 0


@pytest.mark.parametrize("kind", ["container", "web identity"])
async def test_what_the_clock_ends_is_renewed_before_the_next_request(
    run: RunChannel, bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stub, truth = bare, fill(bare, [90_000] * 4)
    async with _source(kind, tmp_path, monkeypatch) as (issuer, _):
        issuer.life = SOON
        async with run(stub, tmp_path) as running:
            assert await off_loop(read_all, running.fifo(0)) == truth
            assert running.channel.statistics().counts["retries"] == {}
        assert issuer.issued > 2


@pytest.mark.parametrize("source", ["container", "instance", "role from container", "role from instance"])
async def test_metadata_services_redirect_nobody(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, pages_from: PagesFrom
) -> None:
    """The redirect would send the service's token to another server, and take that server's credentials."""
    bare.objects["b/data/0"] = b"x"
    elsewhere = []

    async def give(request: web.Request) -> web.Response:
        elsewhere.append(request)
        found = {"AccessKeyId": "AKID", "SecretAccessKey": "s", "Token": "T", "Expiration": _until(LATER)}
        return web.json_response(found | {"Code": "Success"})

    async with _serving(web.route("*", "/{any:.*}", give)) as other:

        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{other}{request.path}"})

        async with _serving(web.route("*", "/{any:.*}", redirect)) as url:
            monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
            if source.endswith("container"):
                monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/creds")
                monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "of-the-container")
            if source.startswith("role"):
                path = tmp_path / "config"
                kind = "EcsContainer" if source.endswith("container") else "Ec2InstanceMetadata"
                path.write_text(f"[default]\nrole_arn = arn:aws:iam::1:role/r\ncredential_source = {kind}\n")
                monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
            with pytest.raises(Denied, match="no usable credentials"):
                async with pages_from(bare) as pages:
                    await plan_prefix(pages, S3Uri("b", "data/"))
    assert not elsewhere


async def test_a_source_that_fails_for_a_while_is_waited_for(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's endpoint gives errors, then well again: a pause and no failure."""
    stub, truth = bare, fill(bare, [90_000] * 4)
    number, errors = 0, 3  # so often botocore itself asks before it tells

    async def give(_: web.Request) -> web.Response:
        nonlocal number, errors
        if number and errors:
            errors -= 1
            return web.Response(status=400)
        number += 1
        found = {"AccessKeyId": f"AKID{number - 1}", "SecretAccessKey": "s", "Token": f"T{number - 1}"}
        return web.json_response(found | {"Expiration": _until(LATER)})

    async with _serving(web.get("/creds", give)) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/creds")
        async with running_channel(stub, tmp_path, parts=1, requests_in_flight=1) as running:
            await eventually(lambda: running.channel.statistics().counts["requests"].get("ok"))
            stub.refused_keys["AKID0"] = "InvalidAccessKeyId"
            assert await off_loop(read_all, running.fifo(0)) == truth
            assert running.channel.statistics().counts["retries"]["expired"] >= 2, "refused, then not renewed"
            assert not errors


async def failing_after_the_listing(
    run: RunChannel,
    stub: S3Stub,
    tmp_path: Path,
    key: str,
    *,
    code: str = "ExpiredToken",
) -> SourceError:
    """List with a key, have it refused from then on, and return why the channel fails."""

    async def plan(clients: Clients) -> Plan:
        found = await plan_prefix(clients, S3Uri("b", "data/"))
        stub.refused_keys[key] = code
        return found

    policy = RetryPolicy(give_up_after=0.3, first_wait=0.001, longest_wait=0.01)
    async with run(stub, tmp_path, policy=policy, make_plan=plan) as running:
        reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        try:
            await eventually(lambda: running.channel.error)
            assert running.states[-1].state == "failed"
            assert isinstance(running.channel.error, SourceError)
            return running.channel.error
        finally:
            os.close(reader)


async def test_what_nobody_renews_is_given_up_with_the_reason(
    run: RunChannel, bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bare, [1000])
    async with _source("file", tmp_path, monkeypatch):
        error = await failing_after_the_listing(run, bare, tmp_path, "AKID0")
    assert isinstance(error, GaveUp)
    assert "session token has expired" in str(error)
    assert exit_code(error) == Exit.DENIED


async def test_keys_of_the_environment_are_not_waited_for(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Nobody can change them from outside, so the refusal is final at once."""
    fill(stub, [1000])
    error = await failing_after_the_listing(run, stub, tmp_path, "AKIDTEST")
    assert type(error) is Denied
    assert len(stub.seen) == 0


class Found:
    """What a chain of credentials gives."""

    method = "shared-credentials-file"

    def __init__(self, number: int) -> None:
        self.number = number

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        return ReadOnlyCredentials(f"AKID{self.number}", "secret", None)


class Signing:
    """A source of bodies that has credentials before it sends a request."""

    together = 0

    def __init__(self, credentials: RenewableCredentials) -> None:
        self.credentials = credentials

    async def open(self, request: RangeRequest) -> Body:
        raise LookupError(f"{request} was signed by {await self.credentials.get_frozen_credentials()}")


async def test_a_renewal_that_hangs_is_named_with_its_source() -> None:
    """The part's own time limit ends it, before that of the renewal."""

    async def load() -> None:
        await asyncio.Event().wait()

    lasting = RenewableCredentials(Found(0), load, limit=60)
    lasting.accepted = True
    context = ErrorContext("b", "k", 0)
    expired = error_from_response(
        status=400, code="ExpiredToken", message="", fields={"x-amz-request-id": "R1"}, context=context,
    )  # fmt: skip
    first = renewed(expired, lasting, asyncio.get_running_loop().time())
    stages = BufferStages(MemoryBudget(MIB, ConcurrencyController(1, MIB, most=1)).quota(), BufferPool())
    counters = ChannelCounters()
    part = Part.of(0, 0, [Segment(ObjectRef("b", "k", 10, "e"), 0, 10)])
    fetch = PartFetch(
        stages.make(part, on_change=lambda: None, counters=counters),
        Signing(lasting),
        policy=RetryPolicy(give_up_after=1.0, first_wait=0.001, longest_wait=0.001),
        counters=counters,
        quota=stages.quota,
    )
    with pytest.raises(GaveUp) as caught:
        await fetch.run(first)
    before, after = caught.value.message.split("; last error: ")
    assert before.endswith("request id R1)")
    assert "expired; renew the credentials" in before
    assert "their source is shared-credentials-file" in before
    assert after.startswith("the credentials cannot be renewed (their source did not respond in ")
    assert "which is shared-credentials-file; no byte for the last 1 s" in after
    assert exit_code(caught.value) == Exit.DENIED


@pytest.mark.usefixtures("no_leaks", "bare")
@pytest.mark.parametrize(
    ("script", "limit", "reason"),
    [
        ("echo $$ > {pid}; exec sleep 3600", 1, "did not respond in 1 s"),
        ("echo $$ > {pid}; exec yes", 60, "wrote more than 1048576 bytes"),
    ],
)
async def test_a_credential_process_that_does_not_end_is_killed(
    script: str, limit: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, program = tmp_path / "pid", tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script.format(pid=pid)}\n")
    program.chmod(0o700)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with pytest.raises(SourceError, match=reason):
        async with open_clients(Endpoint(url="http://127.0.0.1:1"), connections=1, stall_timeout=limit):
            pass
    await eventually(lambda: not _runs(pid))


def _runs(pid: Path) -> bool:
    try:
        return Path(f"/proc/{pid.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter between open(2) and read(2)
        return False


class Renewable:
    """Credentials that expire; each renewal is counted."""

    method = "assume-role-with-web-identity"

    def __init__(self, left: float) -> None:
        self.left = left
        self.renewed = 0

    def refresh_needed(self, within: float = 900) -> bool:
        return self.left < within

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        if self.refresh_needed():
            self.renewed, self.left = self.renewed + 1, 3600
        return ReadOnlyCredentials(f"key-{self.renewed}", "not-a-secret", None)


async def test_a_file_that_cannot_be_read_counts_when_the_credentials_end() -> None:
    """A renewal would read the file in the event loop, so no renewal begins."""
    readable = True

    async def check() -> None:
        if not readable:
            raise Denied("cannot read /mount/token")

    async def load() -> None:
        raise AssertionError("the chain is resolved after a refusal alone")

    source = Renewable(0)
    lasting = RenewableCredentials(source, load, limit=60, check=check)
    assert (await lasting.get_frozen_credentials()).access_key == "key-1"
    readable, source.left = False, 600
    assert (await lasting.get_frozen_credentials()).access_key == "key-1"
    source.left = 30
    with pytest.raises(Expired, match="the credentials cannot be renewed: cannot read /mount/token"):
        await lasting.get_frozen_credentials()
    assert source.renewed == 1


async def test_many_that_wait_for_a_chain_that_fails_ask_it_once() -> None:
    """Some chains take seconds to fail, and 64 requests one after the other would take minutes."""
    asked = 0

    async def load() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        raise ConnectionRefusedError

    lasting = RenewableCredentials(Found(0), load, limit=30)
    lasting.accepted = True
    assert lasting.refused(asyncio.get_running_loop().time())
    outcomes = await asyncio.gather(
        *[lasting.get_frozen_credentials() for _ in range(64)], return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} == {Expired}
    assert asked == 1


async def test_many_refusals_ask_the_chain_once() -> None:
    asked = 0

    async def load() -> Found:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return Found(asked)

    lasting = RenewableCredentials(Found(0), load, limit=30)
    lasting.accepted = True
    assert (await lasting.get_frozen_credentials()).access_key == "AKID0"
    now = asyncio.get_running_loop().time()
    assert all(lasting.refused(now) for _ in range(64))
    renewed = await asyncio.gather(*[lasting.get_frozen_credentials() for _ in range(64)])
    assert {each.access_key for each in renewed} == {"AKID1"}
    assert lasting.refused(now), "a late refusal of the old key"
    assert (await lasting.get_frozen_credentials()).access_key == "AKID1"
    assert asked == 1


class LateSource:
    """A source of credentials that fails until `mended`, as its kind does, and then has some."""

    def __init__(self, kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mended = False
        self._kind, self._directory, self._monkeypatch = kind, directory, monkeypatch

    @contextlib.asynccontextmanager
    async def open(self, status: int, code: str = "") -> AsyncIterator[None]:
        """Be what the environment names. `status`, `code`: how it fails; a program exits with the status."""
        issuer, patch = Issuer(self._directory), self._monkeypatch

        async def container(_: web.Request) -> web.Response:
            found = issuer.next()
            found["Token"] = found.pop("SessionToken")
            return web.json_response(found) if self.mended else web.Response(status=status)

        async def sts(_: web.Request) -> web.Response:
            if not self.mended:
                error = f"<Error><Code>{code}</Code><Message>not yours</Message></Error>"
                text = f"<ErrorResponse>{error}</ErrorResponse>"
                return web.Response(status=status, content_type="text/xml", text=text)
            fields = "".join(f"<{name}>{value}</{name}>" for name, value in issuer.next().items())
            name = "AssumeRoleWithWebIdentity"
            text = f"<{name}Result><Credentials>{fields}</Credentials></{name}Result>"
            return web.Response(content_type="text/xml", text=f"<{name}Response>{text}</{name}Response>")

        routes = web.get("/creds", container), web.post("/", sts)
        async with _serving(*routes) as url:
            if self._kind == "container":
                patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/creds")
            elif self._kind == "web identity":
                (self._directory / "token").write_text("a.b.c")
                patch.setenv("AWS_ENDPOINT_URL_STS", url)
                patch.setenv("AWS_MAX_ATTEMPTS", "1")
                patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(self._directory / "token"))
                patch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
            else:
                program, config = self._directory / "give", self._directory / "config"
                keys = '{"Version": 1, "AccessKeyId": "AKID0", "SecretAccessKey": "s"}'
                up = self._directory / "up"
                program.write_text(
                    f"#!/bin/sh\n[ -e {up} ] && echo '{keys}' && exit\necho {{}}; exit {status}\n"
                )
                program.chmod(0o700)
                config.write_text(f"[default]\ncredential_process = {program}\n")
                patch.setenv("AWS_CONFIG_FILE", str(config))
            yield

    def mend(self) -> None:
        self.mended = True
        (self._directory / "up").touch()


@pytest.mark.parametrize(
    ("kind", "failure"),
    [("container", (500,)), ("web identity", (400, "ThrottlingException")), ("process", (1,))],
)
async def test_credentials_that_come_late_are_waited_for_at_the_start(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, failure: tuple[Any, ...]
) -> None:
    late, waits = LateSource(kind, tmp_path, monkeypatch), []

    def waiting(error: SourceError) -> None:
        waits.append(error)
        late.mend()

    async with (
        late.open(*failure),
        open_clients(Endpoint(url=bare.url), connections=1, give_up_after=60, on_wait=waiting) as clients,
    ):
        assert clients.credentials is not None
        assert (await clients.credentials.get_frozen_credentials()).access_key.startswith("AKID")
    assert {type(each) for each in waits} == {Expired}
    assert waits[0].awaited == "credentials"


@pytest.mark.parametrize(
    ("kind", "failure"),
    [("container", (403,)), ("web identity", (403, "AccessDenied")), ("process", (0,))],
)
async def test_credentials_that_cannot_come_end_the_start_at_once(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, failure: tuple[Any, ...]
) -> None:
    """An agent's refusal, a trust policy, and a program without keys: no time mends these."""
    late = LateSource(kind, tmp_path, monkeypatch)
    waits: list[SourceError] = []
    async with late.open(*failure):
        with pytest.raises(Denied, match="check their source, which is ") as caught:
            async with open_clients(
                Endpoint(url=bare.url), connections=1, give_up_after=60, on_wait=waits.append
            ):
                pass
    assert type(caught.value) is Denied
    assert all("no answer for 5 s" in str(each) for each in waits), "a slow one is named"
    if kind == "web identity":
        assert "not yours" in str(caught.value), "the server's own words"


@pytest.mark.parametrize("by_aiobotocore", [False, True])
async def test_a_listing_waits_for_keys_that_have_worked_and_for_no_others(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_aiobotocore: bool
) -> None:
    bare.objects["b/data/0"] = b"x"
    bare.refused_keys["AKID0"] = "ExpiredToken"
    async with (
        _source("file", tmp_path, monkeypatch) as (_, rotate),
        clients_of(bare, by_aiobotocore=by_aiobotocore) as clients,
    ):
        policy, waits = RetryPolicy(give_up_after=60, first_wait=0.001), []

        async def listed() -> Plan:
            return await retry_while_unavailable(
                lambda _: plan_prefix(clients, S3Uri("b", "data/")), policy, on_wait=waiting
            )

        def waiting(error: SourceError) -> None:
            waits.append(error)
            rotate()

        with pytest.raises(Denied, match="token has expired.*; their source is shared-credentials-file"):
            await listed()
        assert not waits
        bare.refused_keys.clear()
        assert (await listed()).objects(0) == 1
        bare.refused_keys["AKID0"] = "ExpiredToken"
        assert (await listed()).objects(0) == 1
        assert {type(each) for each in waits} == {Expired}


@pytest.mark.parametrize(
    ("profile", "command"),
    [
        (
            "sso_start_url = https://x.test/\nsso_region = us-east-1\nsso_account_id = 1\nsso_role_name = r",
            "aws sso login",
        ),
        ("login_session = arn:aws:iam::123456789012:user/u\nregion = us-east-1", "aws login"),
    ],
)
async def test_a_source_that_wants_a_login_names_the_command(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, command: str
) -> None:
    (tmp_path / "config").write_text(f"[profile lab]\n{profile}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    waits: list[SourceError] = []
    with pytest.raises(Denied, match=f"log in by `{command} --profile lab`"):
        async with open_clients(
            Endpoint(url=bare.url, profile="lab"), connections=1, give_up_after=60, on_wait=waits.append
        ):
            pass
    assert all("no answer for 5 s" in str(each) for each in waits)


def saved_by_sso(folder: Path, session: str | None) -> None:
    SSOTokenLoader(JSONFileCache(str(folder / ".aws/sso/cache"))).save_token(SSO, {}, session)


def saved_by_login(folder: Path, session: str | None) -> None:
    LoginTokenLoader(JSONFileCache(str(folder / ".aws/login/cache"))).save_token(session, {})


def saved(folder: Path, _: str | None) -> None:
    (folder / "ca.pem").touch()


@pytest.mark.parametrize(
    ("setting", "session", "save"),
    [
        (f"sso_start_url = {SSO}", None, saved_by_sso),
        ("sso_session = s", "s", saved_by_sso),
        ("login_session = l", "l", saved_by_login),
        ("ca_bundle = HOME/ca.pem", None, saved),
    ],
)
async def test_a_file_of_a_profile_that_blocks_is_named(
    bare: S3Stub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    setting: str,
    session: str | None,
    save: Callable[[Path, str | None], None],
) -> None:
    """botocore and OpenSSL would read it in the event loop."""
    save(tmp_path, session)
    (file,) = [each for each in tmp_path.rglob("*") if each.is_file()]
    file.unlink()
    os.mkfifo(file)
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = us-east-1\n{setting.replace('HOME', str(tmp_path))}\n"
        f"[sso-session s]\nsso_region = us-east-1\nsso_start_url = {SSO}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(PenstockError, match=f"cannot read {file}.*{setting.partition(' ')[0]} of "):
        async with open_clients(Endpoint(url=bare.url, profile="lab"), connections=1):
            pass


async def test_a_metadata_service_behind_too_few_hops_is_told(
    bare: S3Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to PUT does not reach a container; a proxy of the environment is not asked."""
    asked = asyncio.Event()

    async def put(_: web.Request) -> web.Response:
        await asked.wait()
        return web.Response()

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=401)

    async with _serving(web.put("/latest/api/token", put), web.get("/{any:.*}", refuse)) as url:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        with pytest.raises(Denied, match="hop limit to 2"):
            async with open_clients(Endpoint(url=bare.url), connections=1):
                pass
        asked.set()


async def test_keys_that_have_been_accepted_are_not_called_wrong(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """A proxy drops a signed header of GETs, and LISTs have none."""
    fill(stub, [1000])
    error = await failing_after_the_listing(run, stub, tmp_path, "AKIDTEST", code="SignatureDoesNotMatch")
    assert type(error) is Denied
    assert str(error).startswith(REWRITTEN)
    assert remedy(error, "").startswith("Have it pass them on")


@contextlib.asynccontextmanager
async def role_with_mfa(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[object]]:
    """A profile whose role wants a code; yields the codes that STS gets."""
    codes: list[object] = []

    async def assume(request: web.Request) -> web.Response:
        codes.append((await request.post()).get("TokenCode"))
        fields = "".join(f"<{name}>{value}</{name}>" for name, value in Issuer(directory).next().items())
        text = f"<AssumeRoleResult><Credentials>{fields}</Credentials></AssumeRoleResult>"
        return web.Response(content_type="text/xml", text=f"<AssumeRoleResponse>{text}</AssumeRoleResponse>")

    async with _serving(web.post("/", assume)) as url:
        (directory / "config").write_text(
            "[profile base]\naws_access_key_id = AKIDBASE\naws_secret_access_key = s\n"
            "[profile mfa]\nrole_arn = arn:aws:iam::123456789012:role/r\nsource_profile = base\n"
            "mfa_serial = arn:aws:iam::123456789012:mfa/me\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(directory / "config"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        yield codes


async def test_a_code_is_asked_for_before_the_start_and_not_in_the_loop(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []

    async def ask(prompt: str) -> str:
        prompts.append(prompt)
        return "123456"

    async with role_with_mfa(tmp_path, monkeypatch) as codes:
        endpoint = Endpoint(url=bare.url, profile="mfa")
        with pytest.raises(Denied, match="arn:aws:iam::123456789012:mfa/me.*nobody can be asked"):
            async with open_clients(endpoint, connections=1, give_up_after=60):
                pass
        assert codes == []
        async with open_clients(endpoint, connections=1, ask=ask) as clients:
            assert clients.credentials is not None
            assert (await clients.credentials.get_frozen_credentials()).access_key == "AKID0"
    assert codes == ["123456"]
    assert len(prompts) == 1
    assert "mfa/me" in prompts[0]


async def test_credentials_that_never_come_end_the_start_as_denied(
    bare: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last question is cut off before its own error, which would have been the same."""
    pid = tmp_path / "asked"
    program, config = tmp_path / "give", tmp_path / "config"
    program.write_text(f"#!/bin/sh\n[ -e {pid} ] && exec sleep 3600\ntouch {pid}; exit 1\n")
    program.chmod(0o700)
    config.write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with pytest.raises(GaveUp, match="without credentials") as caught:
        async with open_clients(Endpoint(url=bare.url), connections=1, give_up_after=1):
            pass
    assert exit_code(caught.value) == Exit.DENIED
