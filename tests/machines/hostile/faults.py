"""The faults. Each takes the wire and the right response, and answers with something else.

A fault returns whether the connection may carry another request. `ONLY` names the operations that a fault is
for; the others are for all. `BELOW` are those of the TLS handshake, before there is any request.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import re
import socket
import time
import zlib
from collections.abc import Callable
from typing import Any

from tests.machines.hostile.wire import SIZES, Response, Wire, listing

Fault = Callable[[Wire, Response], bool]
FAULTS: dict[str, Fault] = {}
ONLY: dict[str, set[str]] = {}
TLS_ONLY: set[str] = set()
CRUMBS = {
    "chunk extension of 1 MB",
    "trailer of 1 MB",
    "chunk size of 5,000 digits",
    "chunk without end",
    "chunk shorter than said",
    "chunk size negative",
    "silence at 5% of the body",
    "silence at 50% of the body",
    "silence at 99% of the body",
    "body dripped, then whole",
    "TLS after the body: plain text",
    "TLS after the body: a fatal alert",
    "TLS after the body: a close alert in the clear",
    "TLS after the body: a record of wrong bytes",
    "TLS after the body: a truncated record",
    "TLS after the body: a record over 16 KB",
    "TLS after the body: an empty record",
    "TLS after the body: no close_notify",
    "TLS: cut in the body",
}
"""Faults after which each request brings a few right bytes: a stream that goes on, if only slowly."""
BELOW: dict[str, Callable[[socket.socket], None]] = {}
HAS_BODY = {"body", "listing", "manifest"}


def fault(name: str, *, only: set[str] | None = None, tls: bool = False) -> Callable[[Fault], Fault]:
    def note(function: Fault) -> Fault:
        assert name not in FAULTS
        FAULTS[name] = function
        if only:
            ONLY[name] = only
        if tls:
            TLS_ONLY.add(name)
        return function

    return note


Step = bytes | Callable[..., Any]
"""Bytes to send, a function of the response that makes them, or one of the wire and the response."""


def sent(
    name: str,
    *steps: Step,
    change: Callable[[Response], object] | None = None,
    only: set[str] | None = None,
    keep: bool = False,
) -> None:
    """A fault that sends these one after the other, of a response that `change` has changed."""

    def function(wire: Wire, response: Response) -> bool:
        if change is not None:
            change(response)
        for step in steps:
            if isinstance(step, bytes):
                wire.send(step)
            elif step.__code__.co_argcount == 2:
                step(wire, response)
            else:
                wire.send(step(response))
        return keep

    fault(name, only=only)(function)


def endless(data: bytes) -> Step:
    return lambda wire, _: wire.endless(data)


def dripped(data: bytes) -> Step:
    return lambda wire, _: wire.drip(data)


def refused(code: int, error: str, length: bytes = b"") -> Callable[[Response], None]:
    def change(response: Response) -> None:
        response.status(code, error)
        if length:
            response.put("Content-Length", length)
        else:
            response.without("Content-Length")

    return change


HEADER = Response.header
ERRORS = dripped(b"<Error>" * 1000)
CHUNK = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"


def everything(response: Response) -> bytes:
    return response.header() + response.sent_body()


def half(response: Response) -> bytes:
    return response.header() + response.body[: len(response.body) // 2]


def unsized(response: Response) -> None:
    response.without("Content-Length")


def silence(wire: Wire, _: Response) -> None:
    wire.silence()


def reset(wire: Wire, _: Response) -> None:
    wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def whole(wire: Wire, response: Response) -> bool:
    wire.send(response.header() + response.sent_body())
    return True


def changed(name: str, change: Callable[[Response], object], *, only: set[str] | None = None) -> None:
    """A fault that changes the response and sends it whole."""

    def function(wire: Wire, response: Response) -> bool:
        change(response)
        return whole(wire, response)

    fault(name, only=only)(function)


# --- the status line ---------------------------------------------------------------------------------------

STATUS_LINES: dict[str, bytes] = {
    "no reason": b"HTTP/1.1 200",
    "no status": b"HTTP/1.1 ",
    "status 000": b"HTTP/1.1 000 Zero",
    "status 99": b"HTTP/1.1 099 Low",
    "status 1000": b"HTTP/1.1 1000 High",
    "status -1": b"HTTP/1.1 -1 Negative",
    "status in words": b"HTTP/1.1 OK OK",
    "status of 5,000 digits": b"HTTP/1.1 " + b"9" * 5000 + b" OK",
    "reason of 100 KB": b"HTTP/1.1 206 " + b"x" * 100_000,
    "reason not ASCII": b"HTTP/1.1 206 \xff\xfe\x80",
    "HTTP/1.0": b"HTTP/1.0 206 Partial Content",
    "HTTP/0.9": b"HTTP/0.9 206 Partial Content",
    "HTTP/9.9": b"HTTP/9.9 206 Partial Content",
    "HTTP/2": b"HTTP/2 206",
    "ICY": b"ICY 200 OK",
    "empty line before": b"\r\nHTTP/1.1 206 Partial Content",
    "NUL in the status line": b"HTTP/1.1 2\x0006 Partial",
    "lower case": b"http/1.1 206 partial content",
}
for _name, _line in STATUS_LINES.items():

    def _status_line(response: Response, line: bytes = _line) -> None:
        response.status_line = line

    changed(f"status line: {_name}", _status_line)

BARE = (101, 201, 203, 204, 205, 226, 300, 304, 306, 400, 401, 402, 405, 407, 408, 411, 412, 416,
        421, 429, 451)  # fmt: skip
for _code in (*BARE, 499, 500, 501, 502, 503, 504, 505, 599, 600, 999):

    def _bare_status(response: Response, code: int = _code) -> None:
        response.status_line = b"HTTP/1.1 %d Hostile" % code

    changed(f"status {_code} with the right body", _bare_status)

for _code, _error in ((400, "ExpiredToken"), (403, "AccessDenied"), (403, "InvalidAccessKeyId"),
                      (404, "NoSuchKey"), (404, "NoSuchBucket"), (409, "OperationAborted"),
                      (412, "PreconditionFailed"), (416, "InvalidRange"), (500, "InternalError"),
                      (501, "NotImplemented"), (503, "SlowDown"), (403, "RequestTimeTooSkewed"),
                      (400, "AuthorizationHeaderMalformed"), (403, "")):  # fmt: skip

    def _error_status(response: Response, code: int = _code, error: str = _error) -> None:
        response.status(code, error)

    changed(f"error {_code} {_error or 'without a body'}", _error_status)

# --- every header, in every way ----------------------------------------------------------------------------

WAYS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "huge": lambda value: value + b"9" * 60_000,
    "over 64 KB": lambda value: value + b"x" * 70_000,
    "negative": lambda value: b"-" + value,
    "not ASCII": lambda value: value + b"\xff\xe2\x82",
    "with NUL": lambda value: value + b"\0x",
    "with a bare CR": lambda value: value + b"\rX: y",
    "folded": lambda value: value + b"\r\n folded",
    "a huge number": lambda _: b"1e300",
    "of 5,000 digits": lambda _: b"9" * 5_000,
}
WRONG: dict[str, bytes] = {
    "ETag": b'"00000000000000000000000000000000"',
    "Content-Range": b"bytes 1-2/3",
    "Content-Length": b"7",
    "Transfer-Encoding": b"gzip",
    "Date": b"Fri, 31 Dec 9999 23:59:59 -2359",
    "Retry-After": b"86400",
    "Location": b"http://[::1",
    "Content-Encoding": b"gzip",
    "Connection": b"upgrade",
    "x-amz-request-id": b"\x1b[31mforged",
    "Content-Type": b"text/html; charset=nowhere",
    "Last-Modified": b"yesterday",
    "x-amz-version-id": b"other",
    "x-amz-bucket-region": b"../../etc",
}
STATUS_FOR = {
    "Date": (403, "AccessDenied"),
    "Retry-After": (503, "SlowDown"),
    "Location": (307, "TemporaryRedirect"),
    "x-amz-bucket-region": (301, "PermanentRedirect"),
}
"""Headers that are heeded in these responses."""

for _header, _wrong in WRONG.items():
    for _way, _spoil in (WAYS | {"wrong": lambda _, wrong=_wrong: wrong}).items():

        def _spoilt(
            response: Response,
            header: str = _header,
            wrong: bytes = _wrong,
            spoil: Callable[[bytes], bytes] = _spoil,
        ) -> None:
            if header in STATUS_FOR:
                response.status(*STATUS_FOR[header])
            old = next((value for name, value in response.headers if name.decode() == header), wrong)
            response.put(header, spoil(old))

        changed(f"{_header}: {_way}", _spoilt)

    def _missing(response: Response, header: str = _header) -> None:
        if header in STATUS_FOR:
            response.status(*STATUS_FOR[header])
        response.without(header)

    changed(f"{_header}: missing", _missing)

    def _twice(response: Response, header: str = _header, wrong: bytes = _wrong) -> None:
        response.headers.append((header.encode(), wrong))

    changed(f"{_header}: twice, different", _twice)

    def _same_twice(response: Response, header: str = _header) -> None:
        response.headers += [each for each in response.headers if each[0].decode() == header]

    changed(f"{_header}: twice, the same", _same_twice)

DATES = {
    "year 1": b"Mon, 01 Jan 0001 00:00:00 +2359",
    "1970": b"Thu, 01 Jan 1970 00:00:00 GMT",
    "year 99999": b"Fri, 31 Dec 99999 23:59:59 GMT",
    "words": b"not a date",
}
for _name, _date in DATES.items():

    def _dated(response: Response, date: bytes = _date) -> None:
        response.status(403, "RequestTimeTooSkewed")
        response.put("Date", date)

    changed(f"Date: {_name}", _dated)

for _name, _after in {"1e300": b"1e300", "inf": b"inf", "nan": b"nan", "-5": b"-5"}.items():

    def _later(response: Response, after: bytes = _after) -> None:
        response.status(503, "SlowDown")
        response.put("Retry-After", after)

    changed(f"Retry-After: {_name}", _later)
changed("5,000 headers", lambda r: r.headers.extend((b"X-%d" % number, b"y") for number in range(5_000)))
changed("a header without colon", lambda r: r.headers.insert(0, (b"no colon\r\nX", b"y")))
changed("a space before the colon", lambda r: r.headers.insert(0, (b"Content-Length ", b"3")))
sent("header without end", lambda r: r.status_line + b"\r\nX: ", endless(b"y"))
sent("header lines without end", lambda r: r.status_line + b"\r\n", endless(b"X-Y: z\r\n"))


# --- interim responses -------------------------------------------------------------------------------------

for _code in (100, 102, 103, 199):

    def _interim(wire: Wire, response: Response, code: int = _code) -> bool:
        wire.send(b"HTTP/1.1 %d Wait\r\n\r\n" % code)
        return whole(wire, response)

    fault(f"interim {_code}, then the response")(_interim)

    def _interim_silence(wire: Wire, _: Response, code: int = _code) -> bool:
        wire.send(b"HTTP/1.1 %d Wait\r\n\r\n" % code)
        wire.silence()
        return False

    fault(f"interim {_code}, then silence")(_interim_silence)
sent("interim without end", endless(b"HTTP/1.1 100 Continue\r\n\r\n"))
sent("interim with headers without end", endless(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"))


@fault("interim dripped")
def _(wire: Wire, _: Response) -> bool:
    while wire.alive:
        wire.drip(b"HTTP/1.1 100 Continue\r\n\r\n", 0.05)
    return False


sent("interim with a body", b"HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\nhello", everything, keep=True)


# --- time --------------------------------------------------------------------------------------------------


def _silent_after(share: float, part: str) -> Fault:
    def function(wire: Wire, response: Response) -> bool:
        header, body = response.header(), response.sent_body()
        if part == "header":
            wire.send(header[: int(share * len(header))])
        else:
            wire.send(header + body[: int(share * len(body))])
        wire.silence()
        return False

    return function


for _share in (0.0, 0.05, 0.5, 0.99):
    fault(f"silence at {_share:.0%} of the header")(_silent_after(_share, "header"))
    fault(f"silence at {_share:.0%} of the body", only=HAS_BODY)(_silent_after(_share, "body"))
sent("status line dripped", lambda wire, r: wire.drip(r.header() * 10, 0.15))
sent("header dripped", lambda r: r.status_line + b"\r\n", dripped(b"X-Y: z\r\n" * 1000))
sent(
    "body dripped, then whole",
    HEADER,
    lambda wire, r: wire.drip(r.body[:10], 0.05),
    lambda r: r.body[10:],
    only=HAS_BODY,
    keep=True,
)


def _single_bytes(wire: Wire, response: Response) -> None:
    for at in range(min(2000, len(response.body))):
        wire.send(response.body[at : at + 1])


sent("body in single bytes", HEADER, _single_bytes, lambda r: r.body[2000:], only=HAS_BODY, keep=True)
sent("closed before the response")
sent("reset before the response", reset)
sent("reset in the body", half, reset, only=HAS_BODY)


# --- framing -----------------------------------------------------------------------------------------------


def _chunks(body: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n0\r\n\r\n" % (len(body), extension, body) if body else b"0\r\n\r\n"


def _chunked(response: Response) -> None:
    response.without("Content-Length")
    response.put("Transfer-Encoding", b"chunked")
    response.body = _chunks(response.body)


changed("chunked", _chunked)


def _chunked_and_length(response: Response) -> None:
    response.put("Transfer-Encoding", b"chunked")
    response.body = _chunks(response.body)


changed("chunked with Content-Length", _chunked_and_length)

CHUNKS: dict[str, bytes] = {
    "chunk size negative": b"-5\r\nFIRST\r\n0\r\n\r\n",
    "chunk size huge": b"ffffffffffffffffff\r\nFIRST",
    "chunk size of 5,000 digits": b"0" * 5_000 + b"5\r\nFIRST\r\n0\r\n\r\n",
    "chunk size in words": b"hello\r\nFIRST\r\n",
    "chunk without end": b"ff\r\nFIRST",
    "chunk shorter than said": b"6\r\nFIRST\r\n0\r\n\r\n",
    "chunk extension of 1 MB": b"5;" + b"x" * 1_000_000 + b"\r\nFIRST\r\n0\r\n\r\n",
    "trailer of 1 MB": b"5\r\nFIRST\r\n0\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n",
}
for _name, _data in CHUNKS.items():

    def _bad_chunks(response: Response, data: bytes = _data) -> None:
        first = response.body[:5]
        _chunked(response)
        response.body = data.replace(b"FIRST", first)

    changed(_name, _bad_chunks, only=HAS_BODY)
sent("chunk extension without end", HEADER, b"5;", endless(b"x"), change=_chunked, only=HAS_BODY)
sent("chunk extension dripped", HEADER, b"5;", dripped(b"x" * 1000), change=_chunked, only=HAS_BODY)
sent("chunks without end", HEADER, endless(CHUNK), change=_chunked, only=HAS_BODY)


def _chunks_of_one_byte(wire: Wire, response: Response) -> None:
    body = response.body
    _chunked(response)
    wire.send(response.header() + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")


sent("chunks of one byte", _chunks_of_one_byte, only=HAS_BODY, keep=True)
sent("body one byte short", lambda r: r.header() + r.body[:-1], only=HAS_BODY)
sent("body empty", HEADER, only=HAS_BODY)
sent("body one byte long", everything, b"!", keep=True)
sent("body without end", everything, endless(b"x"), only=HAS_BODY)
sent("another response behind the body", everything, everything, keep=True)
sent("an error behind the body", everything, b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n", keep=True)


def _one_more(response: Response) -> None:
    response.put("Content-Length", b"%d" % (len(response.body) + 1))


sent(
    "Content-Length one more than the range",
    HEADER,
    lambda r: r.body + b"!",
    change=_one_more,
    only=HAS_BODY,
    keep=True,
)


def _until_the_end(response: Response) -> None:
    response.without("Content-Length")
    response.put("Connection", b"close")


sent("no Content-Length, body to the end", everything, change=_until_the_end, only=HAS_BODY)
sent("no Content-Length, body cut", half, change=unsized, only=HAS_BODY)
sent("line feeds alone", lambda r: r.header().replace(b"\r\n", b"\n") + r.sent_body(), keep=True)
sent("body where HEAD has none", lambda r: r.header() + r.body[:1000], only={"HEAD"}, keep=True)
sent("body of a HEAD without end", HEADER, endless(b"x"), only={"HEAD"})


_INVERTED = bytes(255 - byte for byte in range(256))


def _replaced(response: Response) -> None:
    response.body = response.body.translate(_INVERTED)


def _another_version(response: Response) -> None:
    _replaced(response)
    response.put("ETag", b'"00000000000000000000000000000000"')


def _another_version_unnamed(response: Response) -> None:
    _replaced(response)
    response.without("ETag")


def _later_range(response: Response) -> None:
    for name, value in response.headers:
        if name == b"Content-Range" and (span := re.fullmatch(rb"bytes (\d+)(-\d+/\d+)", value)):
            response.body = response.body[1:]
            response.put("Content-Range", b"bytes %d%b" % (int(span[1]) + 1, span[2]))
            response.put("Content-Length", b"%d" % len(response.body))
            return


changed("another version", _another_version, only={"body"})
changed("another version without an ETag", _another_version_unnamed, only={"body"})
changed("a range that begins a byte later", _later_range, only={"body"})
sent("one bit is another", HEADER, lambda r: bytes([r.body[0] ^ 1]) + r.body[1:], only={"body"}, keep=True)


UNSEEN = {"one bit is another", "chunks without end", "chunk shorter than said"}
"""What no client can tell from a right response without a checksum; shows that outcomes compare bytes."""

GARBAGE: dict[str, bytes] = {
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 settings": b"\0\0\x12\4\0\0\0\0\0" + bytes(18),
    "a TLS alert": b"\x15\3\3\0\2\2\x28",
    "an SSH banner": b"SSH-2.0-OpenSSH_9.2\r\n",
    "an FTP banner": b"220 ready\r\n",
    "zeros": bytes(100_000),
    "0xff": b"\xff" * 100_000,
    "one byte": b"H",
    "HTML without a header": b"<!DOCTYPE html><html><body>login</body></html>",
    "a request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}
for _name, _data in GARBAGE.items():

    def _garbage(wire: Wire, _: Response, data: bytes = _data) -> bool:
        wire.send(data)
        return False

    fault(f"garbage: {_name}")(_garbage)
sent("garbage without end", endless(b"\x00\xff garbage "))


@functools.cache
def bomb() -> bytes:
    """200 MB of spaces, compressed."""
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(b" " * 1_000_000) for _ in range(200)) + packer.flush()


# --- bodies of errors --------------------------------------------------------------------------------------

BODIES: dict[str, bytes] = {
    "gzip": gzip.compress(b"<Error><Code>AccessDenied</Code></Error>"),
    "gzip bomb": b"",  # made when it is first sent
    "not XML": b"\xff\xfe\x00\x01",
    "HTML": b"<!DOCTYPE html><html><head><title>403</title></head><body>no &nbsp; <br></body></html>",
    "code of 200 KB": b"<Error><Code>" + b"x" * 200_000 + b"</Code></Error>",
    "code with control characters": b"<Error><Code>\x1b[31mX\r\nlog: forged</Code></Error>",
    "code is a number": b"<Error><Code>5</Code><Message>&#x10FFFF;</Message></Error>",
    "no code": b"<Error></Error>",
    "code in code": b"<Error><Code><Code>A</Code></Code><Message/></Error>",
    "other root": b"<Other/>",
    "JSON": b'{"code": "AccessDenied"}',
    "deep": b"<a>" * 50_000,
}
for _name, _data in BODIES.items():
    for _code in (403, 503):

        def _error_body(response: Response, data: bytes = _data, code: int = _code) -> None:
            response.status(code, "AccessDenied")
            data = data or bomb()
            response.body = data
            response.put("Content-Length", b"%d" % len(data))

        changed(f"error {_code} body: {_name}", _error_body)
sent("error body without end", HEADER, endless(b"x"), change=refused(403, "AccessDenied", b"8589934592"))


def _denied_in_chunks(response: Response) -> None:
    response.status(403, "AccessDenied")
    _chunked(response)


sent("error body without end, chunked", HEADER, endless(CHUNK), change=_denied_in_chunks)
sent("error body without end, no length", HEADER, endless(b"x"), change=refused(500, "InternalError"))
sent("error body dripped", HEADER, ERRORS, change=refused(403, "AccessDenied", b"100000"))
sent("error body silent", HEADER, silence, change=refused(500, "InternalError", b"100000"))
sent("503 dripped without end", HEADER, ERRORS, change=refused(503, "SlowDown", b"100000"))


# --- listings ----------------------------------------------------------------------------------------------

LISTINGS: dict[str, bytes] = {
    "empty body": b"",
    "only a declaration": b'<?xml version="1.0"?>',
    "truncated XML": listing()[:-30],
    "cut in a key": listing()[:200],
    "entity expansion": b'<!DOCTYPE l [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">'
    b'<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;&c;&c;">'
    b'<!ENTITY e "&d;&d;&d;&d;&d;&d;&d;&d;&d;&d;"><!ENTITY f "&e;&e;&e;&e;&e;&e;&e;&e;&e;&e;">'
    b'<!ENTITY g "&f;&f;&f;&f;&f;&f;&f;&f;&f;&f;">]><ListBucketResult><Name>&g;&g;</Name></ListBucketResult>',
    "quadratic expansion": b'<!DOCTYPE l [<!ENTITY a "' + b"a" * 50_000 + b'">]><ListBucketResult><Name>'
    + b"&a;" * 50_000 + b"</Name></ListBucketResult>",
    "external entity": b'<!DOCTYPE l [<!ENTITY x SYSTEM "file:///etc/passwd">]><ListBucketResult><Name>&x;</Name>'
    b"</ListBucketResult>",
    "unknown entity": b"<ListBucketResult><Name>&nbsp;</Name></ListBucketResult>",
    "UTF-16": listing().decode().replace("UTF-8", "UTF-16").encode("utf-16"),
    "UTF-32": listing().decode().replace("UTF-8", "UTF-32").encode("utf-32"),
    "UTF-7": listing().replace(b"UTF-8", b"UTF-7"),
    "EBCDIC": listing().replace(b"UTF-8", b"cp037"),
    "Latin-1": listing().replace(b"UTF-8", b"ISO-8859-1"),
    "encoding nowhere": listing().replace(b"UTF-8", b"nowhere"),
    "not UTF-8": listing(extra="<Name>NAME</Name>").replace(b"NAME", b"\xff\xfe"),
    "byte order mark": b"\xef\xbb\xbf" + listing(),
    "NUL": listing(extra="<Name>NAME</Name>").replace(b"NAME", b"a\0b"),
    "deep": b"<ListBucketResult>" + b"<a>" * 100_000,
    "deep and closed": b"<ListBucketResult>" + b"<a>" * 20_000 + b"</a>" * 20_000 + b"</ListBucketResult>",
    "many elements": b"<ListBucketResult>" + b"<a/>" * 1_000_000 + b"</ListBucketResult>",
    "many attributes": b"<ListBucketResult " + b" ".join(b'a%d="b"' % n for n in range(50_000)) + b"/>",
    "a name of 5 MB": b"<ListBucketResult><Name>" + b"x" * 5_000_000 + b"</Name></ListBucketResult>",
    "over 6 MB": b"<ListBucketResult><Name>" + b"x" * 20_000_000 + b"</Name></ListBucketResult>",
    "other root": b"<html><body>login</body></html>",
    "HTML": b"<!DOCTYPE html><html><body>login<br></body></html>",
    "JSON": b'{"IsTruncated": true}',
    "truncated without token": b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    "IsTruncated in words": listing().replace(b"false", b"perhaps"),
    "size negative": listing().replace(b"<Size>1<", b"<Size>-1<"),
    "size of 5,000 digits": listing().replace(b"<Size>1<", b"<Size>" + b"9" * 5_000 + b"<"),
    "size 2^64": listing().replace(b"<Size>1<", b"<Size>18446744073709551616<"),
    "size 2^60": listing().replace(b"<Size>1<", b"<Size>1152921504606846976<"),
    "size in words": listing().replace(b"<Size>1<", b"<Size>one<"),
    "size 1e5": listing().replace(b"<Size>1<", b"<Size>1e5<"),
    "size empty": listing().replace(b"<Size>1<", b"<Size><"),
    "size missing": listing().replace(b"<Size>1</Size>", b""),
    "key missing": listing().replace(b"<Key>data/1</Key>", b""),
    "key empty": listing().replace(b"data/1", b""),
    "key twice": listing().replace(b"data/1", b"data/0"),
    "key of 100 KB": listing().replace(b"data/1", b"data/1" + b"x" * 100_000),
    "key with CR LF": listing().replace(b"data/1", b"data/1&#13;&#10;X: y"),
    "key with elements": listing().replace(b"data/1", b"<a>data/1</a>"),
    "keys in reverse order": listing(keys=sorted(SIZES, reverse=True)),
    "key not there": listing().replace(b"data/1", b"data/nowhere"),
    "ETag missing": listing().replace(b"<ETag>", b"<Tag>").replace(b"</ETag>", b"</Tag>"),
    "ETag empty": listing().replace(b"<ETag>", b"<ETag></ETag><Tag>").replace(b"</ETag></C", b"</Tag></C"),
    "ETag with CR LF": listing().replace(b"<ETag>", b"<ETag>a&#13;&#10;X: y"),
    "ETag not ASCII": listing().replace(b"<ETag>", b"<ETag>\xc3\xa9"),
    "ETag of 100 KB": listing().replace(b"<ETag>", b"<ETag>" + b"x" * 100_000),
    "ETag of another version": listing().replace(b"<ETag>&quot;", b"<ETag>&quot;0"),
    "time in words": listing(extra="<Contents><Key>data/0</Key><LastModified>soon</LastModified></Contents>"),
    "an error in a 200": b"<Error><Code>InternalError</Code><Message>hostile</Message></Error>",
}  # fmt: skip
for _name, _data in LISTINGS.items():

    def _listed(response: Response, data: bytes = _data) -> None:
        response.body = data
        response.put("Content-Length", b"%d" % len(data))

    changed(f"listing: {_name}", _listed, only={"listing"})

_pages = [0]


def _page(response: Response, body: bytes) -> None:
    response.body = body
    response.put("Content-Length", b"%d" % len(body))


def _endless_listing(response: Response) -> None:
    _pages[0] += 1
    keys = [f"data/{_pages[0]:09}{number:04}" for number in range(1000)]
    _page(response, listing(more=f"t{_pages[0]}", keys=keys))


changed("listing: without end", _endless_listing, only={"listing"})


def _same_page(response: Response) -> None:
    _pages[0] += 1
    _page(response, listing(more=f"t{_pages[0]}"))


changed("listing: the same page for ever", _same_page, only={"listing"})


def _empty_pages(response: Response) -> None:
    _pages[0] += 1
    _page(response, listing(more=f"t{_pages[0]}", keys=[]))


changed("listing: empty pages without end", _empty_pages, only={"listing"})


def _folders(response: Response) -> None:
    _pages[0] += 1
    folders = "".join(
        f"<CommonPrefixes><Prefix>data/{_pages[0]}-{number}/</Prefix></CommonPrefixes>"
        for number in range(20)
    )
    _page(response, listing(more=f"t{_pages[0]}", keys=[f"data/{_pages[0]:09}"], extra=folders))


changed("listing: folders without end", _folders, only={"listing"})

# --- manifests ---------------------------------------------------------------------------------------------

MANIFESTS: dict[str, bytes] = {
    "empty": b"",
    "truncated": b'[{"prefix": "s3://b/"}, "data/0"',
    "not JSON": b"<html/>",
    "deep": b"[" * 100_000,
    "a name of 5 MB": b'[{"prefix": "s3://b/"}, "' + b"x" * 5_000_000 + b'"]',
    "not UTF-8": b'[{"prefix": "s3://b/"}, "\xff\xfe"]',
    "lone surrogate": b'[{"prefix": "s3://b/"}, "\\ud800"]',
    "NUL": b'[{"prefix": "s3://b/"}, "\\u0000"]',
    "a number of 10,000 digits": b"[" + b"9" * 10_000 + b"]",
    "gzip cut": gzip.compress(b'[{"prefix": "s3://b/"}, "data/0"]' * 100)[:40],
    "gzip bomb": b"",
    "gzip garbage": b"\x1f\x8b\x08\0" + b"\xff" * 1000,
}
for _name, _data in MANIFESTS.items():

    def _manifested(response: Response, data: bytes = _data, name: str = _name) -> None:
        _page(response, bomb() if name == "gzip bomb" else data)

    changed(f"manifest: {_name}", _manifested, only={"manifest"})

# --- TLS ---------------------------------------------------------------------------------------------------


def _below_after(part: str, data: bytes) -> Fault:
    def function(wire: Wire, response: Response) -> bool:
        header, body = response.header(), response.sent_body()
        if part == "body":
            wire.send(header + body[: len(body) // 2])
        elif part == "response":
            wire.send(header + body)
        wire.raw(data)
        time.sleep(0.05)
        return False

    return function


for _part in ("request", "body", "response"):
    for _name, _data in {
        "plain text": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        "a fatal alert": b"\x15\3\3\0\2\2\x28",
        "a close alert in the clear": b"\x15\3\3\0\2\1\0",
        "a record of wrong bytes": b"\x17\3\3\0\x40" + b"\xaa" * 64,
        "a truncated record": b"\x17\3\3\x40\0" + b"\xaa" * 100,
        "a record over 16 KB": b"\x17\3\3\xff\xff" + b"\xaa" * 65_535,
        "an empty record": b"\x17\3\3\0\0",
        "no close_notify": b"",
    }.items():
        fault(f"TLS after the {_part}: {_name}", tls=True)(_below_after(_part, _data))


@fault("TLS: a record dripped", tls=True)
def _(wire: Wire, _: Response) -> bool:
    wire.raw(b"\x17\3\3\x40\0")
    while wire.alive:
        wire.raw(b"\xaa")
        time.sleep(0.1)
    return False


@fault("TLS: cut in the body", tls=True)
def _(wire: Wire, response: Response) -> bool:
    wire.send(response.header() + response.sent_body()[:1000])
    wire.cut()
    return False


def below(name: str) -> Callable[[Callable[[socket.socket], None]], Callable[[socket.socket], None]]:
    def note(function: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
        BELOW[f"TLS handshake: {name}"] = function
        return function

    return note


def _wait(sock: socket.socket) -> None:
    sock.settimeout(Wire.PATIENCE)
    with contextlib.suppress(OSError):
        while sock.recv(65536):
            pass


below("silence")(_wait)


@below("closed")
def _(sock: socket.socket) -> None:
    sock.recv(65536)


for _name, _data in {
    "an alert": b"\x15\3\3\0\2\2\x28",
    "plain HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "garbage": b"\xff" * 10_000,
    "half a record": b"\x16\3\3\x40\0\2",
    "a server hello of garbage": b"\x16\3\3\0\x40\2\0\0\x3c" + b"\xaa" * 60,
}.items():

    def _answered(sock: socket.socket, data: bytes = _data) -> None:
        sock.recv(65536)
        sock.sendall(data)
        if b"half" in data or data.endswith(b"\2"):
            _wait(sock)

    below(_name)(_answered)


@below("dripped")
def _(sock: socket.socket) -> None:
    sock.recv(65536)
    until = time.monotonic() + Wire.PATIENCE
    sock.sendall(b"\x16\3\3\x40\0\2\0\x3f\xfc")
    while time.monotonic() < until:
        sock.sendall(b"\xaa")
        time.sleep(0.1)


@below("alerts without end")
def _(sock: socket.socket) -> None:
    sock.recv(65536)
    until = time.monotonic() + Wire.PATIENCE
    while time.monotonic() < until:
        sock.sendall(b"\x15\3\3\0\2\1\x5a" * 1000)
