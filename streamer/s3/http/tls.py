"""TLS of one connection, on its own non-blocking socket; no call waits.

    socket ── recv ──▶ `_Ciphertext` ── one SSL_read a record ──▶ the caller's memory

pyOpenSSL contains a new OpenSSL. OpenSSL before 3.1, such as 3.0 of Debian 12 and Ubuntu 24.04, decrypts
AES-GCM at half the speed on current processors. Reads bypass pyOpenSSL's `recv_into`, which allocates and
copies each record of 16 KiB once more, and decrypt into the caller's memory.

OpenSSL reads each record from a socket by two system calls. Here one call receives many records into memory
that all connections share, and OpenSSL reads them there. From full sockets this takes 0.33 CPU-s/GB, and 0.38
with OpenSSL on the socket; Python's SSLSocket takes more than twice as much.

Users who must use the system's OpenSSL, for example a validated one, choose the aiobotocore transport.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
from typing import Any

from OpenSSL import SSL, crypto
from OpenSSL._util import ffi as _typeless_ffi
from OpenSSL._util import lib as _typeless_lib

from streamer.units import KIB

CIPHERS = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
"""Cipher suites of TLS 1.3; S3 chooses the first."""
OLDER_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20:DHE+AESGCM:ECDHE+AES:RSA+AESGCM:RSA+AES:!aNULL:!aDSS"
"""Cipher suites of TLS 1.2. The last three are for old load balancers and middleboxes; curl has them too."""
_EOF = -1
"""pyOpenSSL's errno for a connection closed without a TLS alert."""

_lib: Any = _typeless_lib
_ffi: Any = _typeless_ffi
_NO_PARTIAL_WILDCARDS = 0x4
"""X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS of X509_check_host(3)."""


RECEIVED = 160 * KIB
"""Most bytes received at once; so few are still in the processor's cache when they are decrypted."""
MORE = 20 * KIB
"""Bytes received beyond those that fill the caller's memory: a record, of which OpenSSL may have a part."""


class _Ciphertext:
    """Memory into which every session of a context receives.

    Between two reads it contains bytes of one session, its owner, that OpenSSL has not read yet.
    """

    def __init__(self) -> None:
        self.memory = bytearray(RECEIVED)
        self.pointer = _ffi.from_buffer(self.memory)
        self.owner: TlsSession | None = None
        self.address = _ffi.new("char **")
        """Second result of BIO_get_mem_data(3)."""


class TlsContext:
    """The certificates to trust, from a PEM file."""

    def __init__(self, path: str, passed: set[str] | None = None) -> None:
        """Load the PEM file `path`. Raises ssl.SSLError, and OSError if there is no such file.

        `passed`: the hosts with which TLS has worked (`streamer.s3.client.barriers`).
        """
        self.passed = set() if passed is None else passed
        with open(path, "rb"):
            pass
        self._ciphertext = _Ciphertext()
        self._context = SSL.Context(SSL.TLS_CLIENT_METHOD)
        self._context.set_min_proto_version(SSL.TLS1_2_VERSION)
        self._context.set_tls13_ciphersuites(CIPHERS)
        self._context.set_cipher_list(OLDER_CIPHERS)
        self._context.set_verify(SSL.VERIFY_PEER)
        # The PEM file may contain an intermediate authority alone, as Python 3.13 allows by default.
        if (store := self._context.get_cert_store()) is not None:
            store.set_flags(crypto.X509StoreFlags.PARTIAL_CHAIN)
        try:
            self._context.load_verify_locations(path)
        except SSL.Error as error:
            raise _os_error(error) from error

    def session(self, sock: socket.socket, host: str) -> TlsSession:
        """Prepare TLS on a connected, non-blocking socket to `host`, a name or an address."""
        if not host or host.startswith("."):
            # Such a name would match all or many certificates.
            raise ssl.SSLError(1, f"{host!r} is no host name that a certificate can prove")
        connection = SSL.Connection(self._context)
        verification = _lib.SSL_get0_param(connection._ssl)  # noqa: SLF001
        try:
            address = ipaddress.ip_address(host).packed
        except ValueError:
            name = host.encode("ascii" if host.isascii() else "idna")
            _lib.X509_VERIFY_PARAM_set_hostflags(verification, _NO_PARTIAL_WILDCARDS)
            result = _lib.X509_VERIFY_PARAM_set1_host(verification, name, len(name))
            connection.set_tlsext_host_name(name)
        else:
            result = _lib.X509_VERIFY_PARAM_set1_ip(verification, address, len(address))
        if result != 1:
            raise ssl.SSLError(1, f"cannot verify the name {host!r}")
        connection.set_connect_state()
        return TlsSession(connection, sock, self._ciphertext)


class TlsSession:
    """TLS of one socket. The caller closes the socket and then makes no further call."""

    def __init__(self, connection: SSL.Connection, sock: socket.socket, ciphertext: _Ciphertext) -> None:
        """`connection`: pyOpenSSL's, without a socket."""
        self._connection = connection
        self._ssl = connection._ssl  # noqa: SLF001
        self._sock = sock
        self._ciphertext = ciphertext
        self._incoming: Any = None
        """BIO of the received bytes; OpenSSL owns it."""
        self._outgoing = connection._from_ssl  # noqa: SLF001
        """BIO of the bytes to send."""
        self._kept: Any = None
        """Received bytes that are in no common memory any more."""
        self._ended = False
        """Whether the connection has ended, which OpenSSL reports only once."""
        self._error: OSError | None = None
        """The error that ended the connection; None after a regular close."""
        self._feed(ciphertext.pointer, 0)

    def _feed(self, pointer: Any, count: int) -> None:
        """Let OpenSSL read the `count` bytes at `pointer`; it does not copy them before."""
        self._incoming = _lib.BIO_new_mem_buf(pointer, count)
        _lib.BIO_set_mem_eof_return(self._incoming, -1)  # after them, further bytes may follow
        _lib.SSL_set_bio(self._ssl, self._incoming, self._outgoing)

    @property
    def _unfed(self) -> int:
        """Number of received bytes that OpenSSL has not read."""
        return int(_lib.BIO_get_mem_data(self._incoming, self._ciphertext.address))

    def _receive(self, most: int) -> None:
        """Receive about `most` bytes; OpenSSL must have read all that were received before.

        Raises BlockingIOError, OSError.
        """
        common = self._ciphertext
        if common.owner is not self:
            if common.owner is not None:
                common.owner._leave()  # noqa: SLF001
            common.owner = self
        count = self._sock.recv_into(common.memory, min(most + MORE, RECEIVED))
        if count:
            self._feed(common.pointer, count)
        else:
            _lib.BIO_set_mem_eof_return(self._incoming, 0)

    def _leave(self) -> None:
        """Copy the bytes that OpenSSL has not read out of the common memory."""
        if count := self._unfed:
            self._kept = _ffi.from_buffer(_ffi.buffer(self._ciphertext.address[0], count)[:])
            self._feed(self._kept, count)

    def _flush(self) -> bool:
        """Send the bytes that OpenSSL has written; return whether the socket accepted all. Raises OSError."""
        address = self._ciphertext.address
        while count := _lib.BIO_get_mem_data(self._outgoing, address):
            try:
                sent = self._sock.send(_ffi.buffer(address[0], count))
            except BlockingIOError:
                return False
            self._connection.bio_read(sent)
        return True

    def handshake(self) -> None:
        """Continue the handshake. Raises BlockingIOError until it is complete, ssl.SSLError, OSError."""
        while True:
            try:
                self._connection.do_handshake()
            except SSL.WantReadError:
                self._flush()
                self._receive(0)
            except SSL.Error as error:
                with contextlib.suppress(OSError):
                    self._flush()  # the alert
                if code := _lib.SSL_get_verify_result(self._ssl):
                    reason = _ffi.string(_lib.X509_verify_cert_error_string(code)).decode()
                    raise ssl.SSLCertVerificationError(1, f"certificate verify failed: {reason}") from error
                raise _os_error(error) from error
            else:
                self._flush()
                return

    def send(self, data: bytes) -> bool:
        """Send `data`; return whether the socket accepted all. Raises OSError."""
        try:
            self._connection.sendall(data)
        except SSL.Error as error:
            raise _os_error(error) from error
        return self._flush()

    @property
    def pending(self) -> int:
        """Number of bytes that have left the socket and are not read; epoll does not report them."""
        return int(_lib.SSL_pending(self._ssl)) + self._unfed

    def recv_into(self, memory: memoryview) -> int:
        """Read all bytes that have arrived and fit; return their number, 0 at the end.

        Raises BlockingIOError, OSError.
        """
        return self._take(_lib.SSL_read, memory, more=True)

    def peek(self, memory: memoryview) -> int:
        """Copy some of the next bytes without taking them; otherwise as `recv_into`."""
        return self._take(_lib.SSL_peek, memory, more=False)

    def _take(self, read: Any, memory: memoryview, *, more: bool) -> int:
        size, count, state = len(memory), 0, self._ssl
        buffer = _ffi.from_buffer(memory, require_writable=True)
        try:
            while count < size and not self._ended:
                got = read(state, buffer + count, size - count)  # a record each
                if got > 0:
                    count += got
                    if not more:
                        break
                elif not self._at_end(got):
                    try:
                        self._receive(size - count)
                    except BlockingIOError:
                        if not count:
                            raise
                        break
                    except OSError as error:
                        self._error, self._ended = error, True
        finally:
            # The export must not stay in the frame of a traceback: CPython's garbage collector may clear the
            # memoryview before its export, which then writes through NULL.
            _ffi.release(buffer)
        if not count and self._error is not None:
            raise self._error
        return count

    def _at_end(self, result: int) -> bool:
        """Return whether the connection has ended; false if further bytes may arrive.

        Must be the next call to OpenSSL after the one that returned `result`, because OpenSSL keeps errors by
        thread.
        """
        if _lib.SSL_get_error(self._ssl, result) == ssl.SSL_ERROR_WANT_READ:
            return False
        try:
            self._connection._raise_ssl_error(self._ssl, result)  # noqa: SLF001
        except SSL.Error as error:
            self._error = None if _is_end(error) else _os_error(error)
        self._ended = True
        return True


def _is_end(error: SSL.Error) -> bool:
    """Return whether the connection was closed, with or without a TLS alert."""
    return isinstance(error, SSL.ZeroReturnError) or (
        isinstance(error, SSL.SysCallError) and error.args[0] == _EOF
    )


def _os_error(error: SSL.Error) -> OSError:
    """Return an OSError for OpenSSL's error."""
    if _is_end(error):
        return ConnectionResetError(errno.ECONNRESET, "the connection was closed")
    if isinstance(error, SSL.SysCallError):
        return OSError(error.args[0], os.strerror(error.args[0]))
    reasons = [reason for _, _, reason in error.args[0]] if error.args else []
    return ssl.SSLError(1, "; ".join(reasons) or "TLS failed")
