"""TLS and proxies that refuse: final at the start, and waited for once a request has passed."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from streamer.errors import Barred, BarredNow, ErrorContext, GaveUp, SourceError
from streamer.plan import S3Uri
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.client.barriers import proxy_of, tls_failed
from streamer.s3.client.final_answers import on_fresh_connection
from streamer.s3.client.session import Clients
from tests.kit.harness import clients_of
from tests.kit.planning import plan_prefix
from tests.kit.raw import RawServer, Request, WireServer, answer, listing, raw_server, wire_server

Change = Callable[[ssl.SSLContext, trustme.CA], None]
PASSING = "no answer from"
"""In what is noted of a slow machine."""


@pytest.fixture(params=[False, True], ids=["http", "aiobotocore"])
def by_aiobotocore(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def listed(clients: Clients, on_wait: Callable[[SourceError], None], seconds: float = 60) -> int:
    """The number of objects listed on new connections."""
    policy = RetryPolicy(give_up_after=seconds, first_wait=0.001, longest_wait=0.01)
    with on_fresh_connection():
        plan = await retry_while_unavailable(
            lambda _: plan_prefix(clients, S3Uri("b", "data/")), policy, on_wait=on_wait
        )
    return plan.objects(0)


def demand_certificate(context: ssl.SSLContext, _: trustme.CA) -> None:
    context.verify_mode = ssl.CERT_REQUIRED


def demand_certificate_early(context: ssl.SSLContext, authority: trustme.CA) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    demand_certificate(context, authority)


def have_no_common_cipher(context: ssl.SSLContext, _: trustme.CA) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES128-SHA")


def let_expire(context: ssl.SSLContext, authority: trustme.CA) -> None:
    authority.issue_cert("127.0.0.1", not_after=datetime(2011, 1, 1, tzinfo=UTC)).configure_cert(context)


CHANGES: dict[Change, str] = {
    demand_certificate: "client certificate",
    demand_certificate_early: "client certificate",
    have_no_common_cipher: "accepts no cipher",
    let_expire: "renew the server's certificate",
}


@pytest.fixture
def server(
    credentials: None, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WireServer, ssl.SSLContext]]:
    """A server whose context the test changes; it holds for the next handshakes."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with wire_server(context) as server:
        server.objects["b/data/0"] = b"x"
        yield server, context


@pytest.mark.parametrize("change", CHANGES)
async def test_a_handshake_that_has_never_worked_ends_at_once(
    server: tuple[WireServer, ssl.SSLContext], authority: trustme.CA, change: Change, *, by_aiobotocore: bool
) -> None:
    stub, context = server
    change(context, authority)
    waits: list[SourceError] = []
    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        with pytest.raises(Barred, match=f"TLS failed .*{CHANGES[change]}"):
            await listed(clients, waits.append, seconds=20)
    assert all(PASSING in str(each) for each in waits)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_handshake_that_has_worked_is_waited_for(
    server: tuple[WireServer, ssl.SSLContext], authority: trustme.CA, change: Change, *, by_aiobotocore: bool
) -> None:
    """A certificate that is rotated badly, and then well."""
    stub, context = server
    waits: list[SourceError] = []
    usual = context.maximum_version, context.get_ciphers()

    def waiting(error: SourceError) -> None:
        waits.append(error)
        context.maximum_version, context.verify_mode = usual[0], ssl.CERT_NONE
        context.set_ciphers(":".join(each["name"] for each in usual[1]))
        authority.issue_cert("127.0.0.1").configure_cert(context)

    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        assert await listed(clients, waits.append) == 1
        change(context, authority)
        assert await listed(clients, waiting) == 1
    refused = [each for each in waits if PASSING not in str(each)]
    assert {type(each) for each in refused} == {BarredNow}
    assert refused[0].kind == "barred"
    assert CHANGES[change] in str(refused[0])


class Proxy:
    """What a proxy answers."""

    def __init__(self) -> None:
        self.says: bytes = b""
        """Empty: what S3 would."""

    def __call__(self, _: Request) -> bytes:
        return self.says or listing(("data/0", 1, "e"))


PAGE = b"<html><head><title>Blocked by policy</title></head></html>"
REFUSALS = {
    "407": (answer(407, PAGE), r"407 Proxy Authentication Required.*user and password"),
    "403": (answer(403, PAGE, Via="1.1 proxy.corp"), r"403 Forbidden.*NO_PROXY"),
}


@pytest.fixture
def proxy(credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, str]]:
    """A proxy that the environment names, with a password in its URL."""
    says = Proxy()
    with raw_server(says) as server:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, server.url.replace("//", "//user:hidden-word@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        yield says, server.url


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_proxy_that_has_let_nothing_through_ends_the_start(
    proxy: tuple[Proxy, str], scheme: str, refusal: str
) -> None:
    says, url = proxy
    says.says, text = REFUSALS[refusal]
    waits: list[SourceError] = []
    async with clients_of(RawServer(f"{scheme}://s3.test:9000")) as clients:
        with pytest.raises(Barred, match=text) as caught:
            await listed(clients, waits.append)
    assert f"the proxy {url} ({scheme}_proxy) refuses s3.test (" in str(caught.value)
    assert "hidden-word" not in str(caught.value)
    assert ("Blocked by policy" in str(caught.value)) == (scheme == "http"), "the proxy's own words"
    assert all(PASSING in str(each) for each in waits)


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_proxy_that_has_worked_is_waited_for(proxy: tuple[Proxy, str], refusal: str) -> None:
    says, _ = proxy
    waits: list[SourceError] = []

    def waiting(error: SourceError) -> None:
        waits.append(error)
        says.says = b""

    async with clients_of(RawServer("http://s3.test:9000")) as clients:
        assert await listed(clients, waits.append) == 1
        says.says = REFUSALS[refusal][0]
        assert await listed(clients, waiting) == 1
    assert {type(each) for each in waits if PASSING not in str(each)} == {BarredNow}


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_does_not_reach_the_host_is_named_and_waited_for(
    proxy: tuple[Proxy, str], scheme: str
) -> None:
    says, url = proxy
    says.says = answer(503, b"<html><title>No route</title></html>")
    waits: list[SourceError] = []
    async with clients_of(RawServer(f"{scheme}://s3.test:9000")) as clients:
        with pytest.raises(
            GaveUp, match=rf"the proxy {url} \({scheme}_proxy\) does not reach s3.test \(503 S"
        ):
            await listed(clients, waits.append, seconds=0.5)
    assert waits


async def test_an_error_of_s3_behind_a_proxy_is_that_of_s3(proxy: tuple[Proxy, str]) -> None:
    says, _ = proxy
    error = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    says.says = answer(403, error, Via="1.1 proxy.corp")
    async with clients_of(RawServer("http://s3.test:9000")) as clients:
        with pytest.raises(SourceError, match="AccessDenied"):
            await listed(clients, lambda _: None)


async def test_a_proxy_that_is_not_there_is_named(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("HTTP_PROXY", address)
        text = rf"cannot connect to the proxy http://{address} \(HTTP_PROXY\) \(Connection refused\)"
        async with clients_of(RawServer("http://s3.test:9000")) as clients:
            with pytest.raises(GaveUp, match=text):
                await listed(clients, lambda _: None, seconds=0.5)


@pytest.mark.parametrize(
    ("url", "excepted", "expected"),
    [
        ("http://10.1.2.3:9000/b", "10.0.0.0/8", None),
        ("http://10.1.2.3:9000/b", "192.168.0.0/16, 10.1.2.0/24", None),
        ("http://11.1.2.3:9000/b", "10.0.0.0/8", "http://proxy:3128"),
        ("http://[fd00::1]:9000/b", "fd00::/8", None),
        ("http://[fd00::1]/b", "fd00::1", None),
        ("http://s3.test/b", "10.0.0.0/8,.test", None),
        ("http://s3.test/b", "nonsense/99,", "http://proxy:3128"),
        ("https://s3.test/b", "", None),
    ],
)
def test_no_proxy_may_have_networks(
    monkeypatch: pytest.MonkeyPatch, url: str, excepted: str, expected: str | None
) -> None:
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", excepted)
    assert proxy_of(url) == expected


def test_without_a_variable_there_is_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_of("http://s3.test") is None


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("certificate verify failed: invalid CA certificate", "lacks fields"),
        ("certificate verify failed: Missing Authority Key Identifier", "lacks fields"),
        ("certificate verify failed: EE certificate key too weak", "with a key of 2,048 bits"),
        ("dh key too small", "with a key of 2,048 bits"),
        ("unsafe legacy renegotiation disabled", "RFC 5746"),
        ("certificate verify failed: unable to get local issuer certificate", "ca-certificates.crt"),
    ],
)
def test_the_text_names_what_a_middlebox_lacks(reason: str, remedy: str) -> None:
    assert remedy in str(tls_failed(ssl.SSLError(1, reason), ErrorContext(), before=False))


def certified(folder: Path) -> ssl.SSLContext:
    """A server whose authority, `folder/ca.pem`, leaves out what RFC 5280 demands and curl does not."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    now, certificates = datetime.now(UTC), []
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=True, path_length=None), False),
        (x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False),
    ]
    for name, key, (extension, critical) in zip("ab", keys, extensions, strict=True):
        own, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, "a"))
        builder = x509.CertificateBuilder(issuer, own, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
        certificates.append(builder.add_extension(extension, critical).sign(keys[0], SHA256()))
    (folder / "ca.pem").write_bytes(certificates[0].public_bytes(Encoding.PEM))
    private = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "b.pem").write_bytes(private + certificates[1].public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "b.pem")
    return context


async def test_a_company_s_certificate_that_is_not_strict(
    credentials: None, tmp_path: Path, *, by_aiobotocore: bool
) -> None:
    with wire_server(certified(tmp_path)) as server:
        server.objects["b/data/0"] = b"x"
        bundle = str(tmp_path / "ca.pem")
        strict = ssl.create_default_context(cafile=bundle)
        strict.verify_flags |= ssl.VERIFY_X509_STRICT
        address = urlsplit(server.url)
        with (
            socket.create_connection((address.hostname, address.port)) as sock,
            pytest.raises(ssl.SSLCertVerificationError, match="(?i)basic constraints|key identifier"),
        ):
            await asyncio.to_thread(strict.wrap_socket, sock, server_hostname="127.0.0.1")
        async with clients_of(server, by_aiobotocore=by_aiobotocore, ca_bundle=bundle) as clients:
            assert await listed(clients, lambda _: None) == 1


@pytest.mark.parametrize("reason", ["TLS/SSL connection has been closed (EOF)", "tlsv1 alert internal error"])
def test_a_handshake_that_breaks_off_is_not_final(reason: str) -> None:
    assert tls_failed(ssl.SSLError(1, reason), ErrorContext(), before=False) is None
