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
    "value",
    ["öha 中".encode(), b"r\xe9sum\xe9", b"\x04meta", b"a\x7fb", b"a\tb", b"", b"=?UTF-8?Q?meta-=04?="],
    ids=["utf-8", "latin-1", "control", "delete", "tab", "empty", "rfc2047"],
)
async def test_metadata_of_any_encoding_is_passed_over(run: RunChannel, tmp_path: Path, value: bytes) -> None:
    def reply(request: Request) -> bytes:
        if "list-type" in request.query:
            found = not request.query.get("start-after")
            return listing(*[("data/a", len(DATA), etag(DATA))] * found)
        right = answer(206, DATA, ETag=f'"{etag(DATA)}"', Content_Range=f"bytes 0-999/{len(DATA)}")
        return right.replace(b"\r\nETag", b"\r\nX-Amz-Meta-Note: " + value + b"\r\nETag", 1)

    with raw_server(reply) as server:
        async with run(server, tmp_path) as running:
            assert await off_loop(read_all, running.fifo(0)) == DATA


def test_a_control_character_in_a_field_that_counts_is_refused() -> None:
    with pytest.raises(InvalidResponse, match="not an HTTP response"):
        HeaderParser(ErrorContext()).feed(answer(206, ETag='"e\x04"', x_amz_meta_note="\x04"))
