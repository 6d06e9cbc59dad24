"""TLS of one connection, on its own socket; nothing here waits.

The library is pyOpenSSL, which comes with the newest OpenSSL whatever the system has: before 3.1 it decrypts
AES-GCM at half the speed on processors of today, and Debian 12 and Ubuntu 24.04 have 3.0. Reading goes past
pyOpenSSL's own `recv_into`, straight into the caller's memory: that one allocates and copies each record of
16 KiB once more. Measured, from sockets that are full, with AES of OpenSSL 3.0 and 4.0: Python's SSLSocket
and MemoryBIO 1.1 CPU-s/GB, this 0.7.

Whoever must use the system's OpenSSL, a validated one say, has the aiobotocore transport.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
from typing import Any

from OpenSSL import SSL, crypto
from OpenSSL._util import ffi as _typeless_ffi
from OpenSSL._util import lib as _typeless_lib

CIPHERS = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
"""Of TLS 1.3; the first is what S3 chooses, too."""
OLDER_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20:DHE+AESGCM:!aNULL:!aDSS"
"""Of TLS 1.2."""
_EOF = -1
"""What pyOpenSSL has for the number of an error that is an end without notice."""

_lib: Any = _typeless_lib
_ffi: Any = _typeless_ffi
_NO_PARTIAL_WILDCARDS = 0x4
"""X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS, X509_check_host(3)."""


class TlsContext:
    """The certificates to believe, those of a PEM file."""

    def __init__(self, path: str) -> None:
        """Raises ssl.SSLError, and OSError if there is no such file."""
        with open(path, "rb"):
            pass
        self._context = SSL.Context(SSL.TLS_CLIENT_METHOD)
        self._context.set_min_proto_version(SSL.TLS1_2_VERSION)
        self._context.set_tls13_ciphersuites(CIPHERS)
        self._context.set_cipher_list(OLDER_CIPHERS)
        self._context.set_verify(SSL.VERIFY_PEER)
        # An intermediate authority may be believed by itself; by default in Python from 3.13 on, too.
        if (store := self._context.get_cert_store()) is not None:
            store.set_flags(crypto.X509StoreFlags.PARTIAL_CHAIN)
        try:
            self._context.load_verify_locations(path)
        except SSL.Error as error:
            raise _said(error) from error

    def session(self, sock: socket.socket, host: str) -> TlsSession:
        """TLS on a connected, non-blocking socket to `host`, a name or an address; hands are to be shaken."""
        if not host or host.startswith("."):
            raise ssl.SSLError(1, f"{host!r} is no name to verify")  # it would stand for all, or for many
        connection = SSL.Connection(self._context, sock)
        wanted = _lib.SSL_get0_param(connection._ssl)  # noqa: SLF001
        try:
            address = ipaddress.ip_address(host).packed
        except ValueError:
            name = host.encode("ascii" if host.isascii() else "idna")
            _lib.X509_VERIFY_PARAM_set_hostflags(wanted, _NO_PARTIAL_WILDCARDS)
            set_to = _lib.X509_VERIFY_PARAM_set1_host(wanted, name, len(name))
            connection.set_tlsext_host_name(name)
        else:
            set_to = _lib.X509_VERIFY_PARAM_set1_ip(wanted, address, len(address))
        if set_to != 1:
            raise ssl.SSLError(1, f"cannot verify the name {host!r}")
        connection.set_connect_state()
        return TlsSession(connection)


class TlsSession:
    """Its socket is the caller's to close, and no call may follow."""

    def __init__(self, connection: SSL.Connection) -> None:
        self._connection = connection
        self._ssl = connection._ssl  # noqa: SLF001
        self._over = False
        """Whether no further byte will come: OpenSSL says so once."""
        self._error: OSError | None = None
        """Why, if it is not just the end."""

    def shake_hands(self) -> None:
        """Go on with it. Raises BlockingIOError until it is done, ssl.SSLCertVerificationError, OSError."""
        try:
            self._connection.do_handshake()
        except (SSL.WantReadError, SSL.WantWriteError):
            raise BlockingIOError from None
        except SSL.Error as error:
            if code := _lib.SSL_get_verify_result(self._ssl):
                said = _ffi.string(_lib.X509_verify_cert_error_string(code)).decode()
                raise ssl.SSLCertVerificationError(1, f"certificate verify failed: {said}") from error
            raise _said(error) from error

    def send(self, data: bytes) -> int:
        """How many bytes were taken. Raises OSError."""
        sent = 0
        try:
            while sent < len(data):
                sent += self._connection.send(data[sent:])  # a record each
        except SSL.WantWriteError:
            pass
        except SSL.Error as error:
            raise _said(error) from error
        return sent

    @property
    def pending(self) -> int:
        """Bytes that are decrypted and not read: no socket tells of them."""
        return int(_lib.SSL_pending(self._ssl))

    def recv_into(self, room: memoryview) -> int:
        """As many bytes as there are and fit, 0 at the end. Raises BlockingIOError for none now, OSError."""
        return self._take(_lib.SSL_read, room, more=True)

    def peek(self, room: memoryview) -> int:
        """As `recv_into`, for some of the next bytes; they stay."""
        return self._take(_lib.SSL_peek, room, more=False)

    def _take(self, read: Any, room: memoryview, *, more: bool) -> int:
        size, count, state = len(room), 0, self._ssl
        memory = _ffi.from_buffer(room, require_writable=True)
        try:
            while count < size and not self._over:
                got = read(state, memory + count, size - count)  # a record each
                if got > 0:
                    count += got
                    if not more:
                        break
                elif not self._ended(got):
                    if not count:
                        raise BlockingIOError
                    break
        finally:
            # The export must not live on in the frame of a traceback: CPython's garbage collector may clear
            # the memoryview before its export, which then writes through NULL.
            _ffi.release(memory)
        if not count and self._error is not None:
            raise self._error
        return count

    def _ended(self, result: int) -> bool:
        """Whether reading has come to its end, and not only to that of what is there now.

        To be asked before anything else of OpenSSL, which keeps errors by thread, not by connection.
        """
        try:
            self._connection._raise_ssl_error(self._ssl, result)  # noqa: SLF001
        except (SSL.WantReadError, SSL.WantWriteError):
            return False
        except SSL.Error as error:
            self._error = None if _is_end(error) else _said(error)
        self._over = True
        return True


def _is_end(error: SSL.Error) -> bool:
    """Whether the connection was closed, with or without notice."""
    return isinstance(error, SSL.ZeroReturnError) or (
        isinstance(error, SSL.SysCallError) and error.args[0] == _EOF
    )


def _said(error: SSL.Error) -> OSError:
    """The same as an OSError."""
    if _is_end(error):
        return ConnectionResetError(errno.ECONNRESET, "the connection was closed")
    if isinstance(error, SSL.SysCallError):
        return OSError(error.args[0], os.strerror(error.args[0]))
    reasons = [reason for _, _, reason in error.args[0]] if error.args else []
    return ssl.SSLError(1, "; ".join(reasons) or "TLS failed")
