"""TLS of one connection: whom it believes, and that every byte comes once, whatever rooms it is read into."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamer.s3.http.tls import TlsContext

TURNS = 20
"""Times that each side goes on with a handshake, which takes a few."""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trust(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> TlsContext:
    path = str(tmp_path_factory.mktemp("trust") / "ca.pem")
    authority.cert_pem.write_to_path(path)
    return TlsContext(path)


@contextlib.contextmanager
def both(
    authority: trustme.CA,
    trust: TlsContext,
    *,
    name: str = "localhost",
    host: str = "localhost",
    version: ssl.TLSVersion | None = None,
    ciphers: str = "",
    write_ends: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> Iterator[Any]:
    """A connection of ours to `host`, its socket, and the other end with a certificate for `name`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    if ciphers:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(ciphers)
    authority.issue_cert(
        name, key_type=trustme.KeyType.RSA if ciphers else trustme.KeyType.ECDSA
    ).configure_cert(context)
    ours, theirs = write_ends()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        with context.wrap_socket(theirs, server_side=True, do_handshake_on_connect=False) as server:
            connection = trust.session(ours, host)
            for _ in range(TURNS):
                with contextlib.suppress(BlockingIOError):
                    connection.handshake()
                with contextlib.suppress(ssl.SSLWantReadError):
                    server.do_handshake()
            yield connection, ours, server


def over_tcp() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection that can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        return ours, listening.accept()[0]


def everything(connection: Any, room: bytearray) -> tuple[bytes, bool]:
    """What there is now, and whether the end was seen."""
    got = b""
    with contextlib.suppress(BlockingIOError):
        while count := connection.recv_into(memoryview(room)):
            got += room[:count]
        return got, True
    return got, False


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("localhost", "localhost"),
        ("localhost", "LOCALHOST"),
        ("*.s3.test", "bucket.s3.test"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("bücher.test", "bücher.test"),
    ],
)
def test_the_right_name_is_believed(authority: trustme.CA, trust: TlsContext, name: str, host: str) -> None:
    with both(authority, trust, name=name, host=host) as (connection, _, server):
        server.send(b"hello")
        assert everything(connection, bytearray(100)) == (b"hello", False)


@pytest.mark.parametrize("ciphers", ["ECDHE-RSA-AES256-SHA384", "AES128-GCM-SHA256", "AES128-SHA256"])
def test_ciphers_of_old_middleboxes(authority: trustme.CA, trust: TlsContext, ciphers: str) -> None:
    with both(authority, trust, ciphers=ciphers) as (connection, _, server):
        server.send(b"hello")
        assert everything(connection, bytearray(100)) == (b"hello", False)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("localhost", "other.test"),
        ("*.s3.test", "a.b.s3.test"),
        ("*.s3.test", "s3.test"),
        ("127.0.0.1", "127.0.0.2"),
        ("127.0.0.1", "localhost"),
        ("localhost", "127.0.0.1"),
    ],
)
def test_another_name_is_refused(authority: trustme.CA, trust: TlsContext, name: str, host: str) -> None:
    with (
        pytest.raises(ssl.SSLCertVerificationError, match="mismatch"),
        both(authority, trust, name=name, host=host),
    ):
        pass


def test_an_authority_that_nobody_named_is_refused(trust: TlsContext) -> None:
    with (
        pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"),
        both(trustme.CA(), trust),
    ):
        pass


def test_an_intermediate_authority_may_be_all_that_is_believed(authority: trustme.CA, tmp_path: Path) -> None:
    child = authority.create_child_ca()
    child.cert_pem.write_to_path(tmp_path / "child.pem")
    with both(child, TlsContext(str(tmp_path / "child.pem"))) as (connection, _, server):
        server.send(b"hello")
        assert everything(connection, bytearray(100)) == (b"hello", False)


@pytest.mark.parametrize("host", ["", ".test"])
def test_what_is_no_name_is_refused(authority: trustme.CA, trust: TlsContext, host: str) -> None:
    with pytest.raises(ssl.SSLError, match="no host name"), both(authority, trust, host=host):
        pass


def test_a_request_of_many_records_goes_out_whole(authority: trustme.CA, trust: TlsContext) -> None:
    with both(authority, trust) as (connection, _, server):
        assert connection.send(b"x" * 60_000)
        assert sum(len(server.recv(60_000)) for _ in range(4)) == 60_000


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("none here")
    with pytest.raises(ssl.SSLError):
        TlsContext(str(tmp_path / "empty.pem"))
    with pytest.raises(FileNotFoundError):
        TlsContext(str(tmp_path / "missing.pem"))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.integers(1, 40_000), max_size=6),
    rooms=st.lists(st.integers(1, 50_000), min_size=1, max_size=4),
    version=st.sampled_from([ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]),
)
def test_every_byte_once_in_order(
    authority: trustme.CA, trust: TlsContext, records: list[int], rooms: list[int], version: ssl.TLSVersion
) -> None:
    with both(authority, trust, version=version) as (connection, _, server):
        sent, got = b"", b""
        for number, size in enumerate(records):
            data = bytes([number + 1]) * size
            server.send(data)
            sent += data
            room = bytearray(rooms[number % len(rooms)])
            with contextlib.suppress(BlockingIOError):
                got += room[: connection.recv_into(memoryview(room))]
        for length in rooms:
            got += everything(connection, bytearray(length))[0]
        assert got == sent
        assert connection.pending == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reads=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30_000)), max_size=12))
def test_connections_that_share_memory_keep_their_bytes_apart(
    authority: trustme.CA, trust: TlsContext, reads: list[tuple[int, int]]
) -> None:
    """A read may leave bytes in the memory into which another connection receives next."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(both(authority, trust)) for _ in range(3)]
        sent = [
            b"".join(bytes([10 * number + record]) * 6_000 for record in range(10)) for number in range(3)
        ]
        for (_, _, server), data in zip(ends, sent, strict=True):
            assert sum(server.send(data[at : at + 6_000]) for at in range(0, len(data), 6_000)) == len(data)
        got = [b"", b"", b""]
        for number, length in reads:
            room = bytearray(length)
            with contextlib.suppress(BlockingIOError):
                got[number] += room[: ends[number][0].recv_into(memoryview(room))]
        for number, (connection, _, _) in enumerate(ends):
            got[number] += everything(connection, bytearray(50_000))[0]
        assert got == sent
        assert [connection.pending for connection, _, _ in ends] == [0, 0, 0]


def test_what_is_left_of_a_record_is_pending(authority: trustme.CA, trust: TlsContext) -> None:
    with both(authority, trust) as (connection, ours, server):
        server.send(b"x" * 1000)
        assert connection.recv_into(memoryview(bytearray(600))) == 600
        assert connection.pending == 400
        with pytest.raises(BlockingIOError):
            ours.recv(1, socket.MSG_PEEK)  # so nobody who watches the socket would hear of it


def test_ends_are_told_after_what_came_before_them(authority: trustme.CA, trust: TlsContext) -> None:
    with both(authority, trust) as (connection, _, server):
        server.send(b"last words")
        with contextlib.suppress(ssl.SSLWantReadError):
            server.unwrap()  # says that it ends, and would wait for our answer
        room = bytearray(100)
        assert everything(connection, room) == (b"last words", True)
        assert everything(connection, room) == (b"", True)


def test_a_connection_that_is_just_gone_has_ended(authority: trustme.CA, trust: TlsContext) -> None:
    with both(authority, trust) as (connection, _, server):
        server.send(b"last words")
        server.close()
        assert everything(connection, bytearray(100)) == (b"last words", True)


def test_what_is_no_tls_is_an_error_of_that_connection_alone(
    authority: trustme.CA, trust: TlsContext
) -> None:
    """OpenSSL keeps its errors by thread: one that is left there would be taken for another connection's."""
    with (
        both(authority, trust) as (broken, _, server),
        both(authority, trust) as (whole, _, other),
    ):
        plain = socket.socket(fileno=server.detach())
        with plain:
            plain.send(b"HTTP/1.1 200 OK\r\n\r\n")
            with pytest.raises(OSError, match="version|record"):
                everything(broken, bytearray(100))
        assert everything(whole, bytearray(100)) == (b"", False)
        other.send(b"fine")
        assert everything(whole, bytearray(100)) == (b"fine", False)


def test_a_reset_is_an_error(authority: trustme.CA, trust: TlsContext) -> None:
    with both(authority, trust, write_ends=over_tcp) as (connection, _, server):
        everything(connection, bytearray(100))  # session tickets
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.close()
        with pytest.raises(ConnectionResetError):
            everything(connection, bytearray(100))
        with pytest.raises(OSError, match=r"."):
            connection.send(b"GET /")


def keep(connection: Any, view: memoryview[Any]) -> None:
    """Read into `view`, and leave the error in a reference cycle: frame, error, traceback, frame."""
    try:
        connection.recv_into(view)
    except OSError as error:
        kept = error
        assert kept.__traceback__ is not None


def collect_errors() -> None:
    """What the next test runs: every way in which a read raises, and the garbage collector after it."""
    authority = trustme.CA()
    with authority.cert_pem.tempfile() as path:
        trust = TlsContext(path)
    gc.disable()
    with both(authority, trust) as (connection, _, _server):
        everything(connection, bytearray(100))  # session tickets
        keep(connection, memoryview(bytearray(100)))
        gc.collect()
    with both(authority, trust) as (connection, _, server):
        everything(connection, bytearray(100))
        with socket.socket(fileno=server.detach()) as plain:
            plain.send(b"HTTP/1.1 200 OK\r\n\r\n")
            keep(connection, memoryview(bytearray(100)))
            gc.collect()


def test_an_error_that_the_garbage_collector_finds_ends_no_process() -> None:
    """CPython 3.11 clears a memoryview although a buffer of it is exported, then writes through NULL.

    The process died by SIGSEGV where an export of `recv_into` lived on in the frame of a traceback.
    """
    script = "from tests.unit.test_tls import collect_errors; collect_errors()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
