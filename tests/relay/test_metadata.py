"""User metadata in responses, which may be any bytes that an uploader has sent: of no concern to a stream."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamer.errors import ErrorContext, InvalidResponse
from streamer.s3.http.response import HeaderParser
from tests.kit.harness import RunChannel
from tests.kit.pipes import off_loop, read_all
from tests.kit.raw import Request, answer, etag, listing, raw_server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

DATA = os.urandom(1000)


@pytest.mark.parametrize(
    "field",
    [
        "X-Amz-Meta-Note: öha 中".encode(),
        b"X-Amz-Meta-Note: r\xe9sum\xe9",
        b"X-Amz-Meta-Note: \x04meta",
        b"X-Amz-Meta-Note: a\x7fb",
        b"X-Amz-Meta-Note: a\tb",
        b"X-Amz-Meta-Note: ",
        b"X-Amz-Meta-Note: =?UTF-8?Q?meta-=04?=",
        b"X-Amz-Meta-Note: one\r\n two",
        b"Content-Disposition: attachment; filename=\x01.tar",
    ],
    ids=["utf-8", "latin-1", "control", "delete", "tab", "empty", "rfc2047", "folded", "disposition"],
)
async def test_metadata_of_any_encoding_is_passed_over(run: RunChannel, tmp_path: Path, field: bytes) -> None:
    def reply(request: Request) -> bytes:
        if "list-type" in request.query:
            found = not request.query.get("start-after")
            return listing(*[("data/a", len(DATA), etag(DATA))] * found)
        right = answer(206, DATA, ETag=f'"{etag(DATA)}"', Content_Range=f"bytes 0-999/{len(DATA)}")
        return right.replace(b"\r\nETag", b"\r\n" + field + b"\r\nETag", 1)

    with raw_server(reply) as server:
        async with run(server, tmp_path) as running:
            assert await off_loop(read_all, running.fifo(0)) == DATA


def test_a_control_character_in_a_field_that_counts_is_refused() -> None:
    with pytest.raises(InvalidResponse, match="not an HTTP response"):
        HeaderParser(ErrorContext()).feed(answer(206, ETag='"e\x04"', x_amz_meta_note="\x04"))
