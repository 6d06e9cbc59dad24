"""What a broken response is worth: drawn responses to drawn objects, and never a foreign byte passed on.

Objects have bytes below 128 and foreign texts those above, so that no two of them agree by chance.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import BadAnswer, ErrorContext, Truncated
from streamer.s3.client.doubt import DOUBTED, LEAST_OVERLAP, Withheld, all_differ, overlap

CONTEXT = ErrorContext("b", "k")
Response = Callable[[bytes, int], bytes]
"""What a server sends of an object from an offset on, before it closes the connection."""


def object_of(size: int) -> bytes:
    return bytes(byte & 127 for byte in random.Random(size).randbytes(size))


def text_of(length: int, seed: int) -> bytes:
    """A text that begins as every longer one of that seed does."""
    return bytes(byte | 128 for byte in random.Random(seed).randbytes(length))


def broken(count: int, text: bytes = b"") -> Response:
    """Right bytes, then text; the header promised more than both."""
    return lambda data, first: (data[first:][:count] + text)[: len(data) - first - 1]


def at_byte(offset: int, text: bytes) -> Response:
    """Break at one byte of the object, whatever is asked for before it."""
    return lambda data, first: broken(max(0, offset - first), text)(data, first)


def behind(offset: int, text: bytes) -> Response:
    """Break at one byte of the object; what is asked for after it is right."""
    return lambda data, first: data[first:] if first > offset else at_byte(offset, text)(data, first)


def whole(data: bytes, first: int) -> bytes:
    return data[first:]


near = st.sampled_from([0, 1, 64, 128, 1_000, DOUBTED, 2 * DOUBTED, 3 * DOUBTED])
counts = st.builds(lambda base, more: max(0, base + more), near, st.integers(-2, 2)) | st.integers(0, 60_000)
texts = st.builds(text_of, st.sampled_from([1, 2, 63, 64, 65, 127, 128, 500, 1_500]), st.integers(0, 2))
responses = (
    st.just(whole)
    | st.builds(broken, counts)
    | st.builds(broken, counts, texts)
    | st.builds(at_byte, counts, texts)
    | st.builds(behind, counts, texts)
)


class Reader:
    """Reads an object response by response, in pieces; holds what is passed on against the object."""

    def __init__(self, data: bytes, piece: int) -> None:
        self.data = data
        self.passed = 0
        self.withheld = Withheld()
        self.requests = 0
        self._piece = piece

    @property
    def whole(self) -> bool:
        return self.withheld.received == len(self.data)

    def read(self, response: Response) -> None:
        """Raises BadAnswer, Truncated if another response has had other bytes."""
        self.requests += 1
        first = self.withheld.resume()
        assert self.passed <= first
        sent = response(self.data, first)
        try:
            for at in range(0, len(sent), self._piece):
                self._take(self.withheld.add(sent[at : at + self._piece], CONTEXT))
        finally:
            if not self.whole:
                self.withheld.fail()
        if self.whole:
            self._take(self.withheld.doubted)

    def _take(self, passed: bytes) -> None:
        assert passed == self.data[self.passed : self.passed + len(passed)], "foreign bytes are passed on"
        self.passed += len(passed)


def end(reader: Reader) -> None:
    """A healthy server: one response may find out that others were foreign, the next one is whole."""
    for _ in range(2):
        if not reader.whole:
            try:
                reader.read(whole)
            except Truncated:
                continue
    assert reader.whole
    assert reader.passed == len(reader.data)


@given(st.integers(1, 70_000), st.lists(responses, max_size=10), st.sampled_from([1_000, 5_000, 1 << 20]))
def test_no_foreign_byte_is_passed_on(size: int, drawn: list[Response], piece: int) -> None:
    reader = Reader(object_of(size), piece)
    for response in drawn:
        if reader.whole:
            break
        try:
            reader.read(response)
        except Truncated:
            continue
        except BadAnswer:
            return  # by name: bytes that are passed on may be foreign
    end(reader)


@given(st.integers(1, 70_000), st.lists(counts, max_size=10), st.sampled_from([1_000, 1 << 20]))
def test_right_bytes_are_never_refused(size: int, drawn: list[int], piece: int) -> None:
    reader = Reader(object_of(size), piece)
    for count in drawn:
        if not reader.whole:
            reader.read(broken(count))
    while not reader.whole:
        reader.read(whole)
    assert reader.requests <= len(drawn) + 1
    assert reader.passed == size


@pytest.mark.parametrize("text", [1, 63, 64, 500, 1_500])
@pytest.mark.parametrize("offset", [0, 1, 100, DOUBTED - 1, DOUBTED, DOUBTED + 1, 50_000])
def test_a_text_that_grows_is_not_its_own_proof(offset: int, text: int) -> None:
    """A server breaks at one byte; the first response lost the end of its text on the way."""
    reader = Reader(object_of(100_000), 1 << 20)
    for length in range(text, text + 4):
        with contextlib.suppress(Truncated):
            reader.read(at_byte(offset, text_of(length, 1)))
    assert reader.passed <= offset
    end(reader)


@pytest.mark.parametrize("length", [DOUBTED, DOUBTED + 1, 2 * DOUBTED])
def test_a_text_that_is_too_long_ends_by_name(length: int) -> None:
    """Its first bytes may be passed on already. None of the right ones after them may follow."""
    reader = Reader(object_of(100_000), 1_000)
    try:
        reader.read(broken(30_000, text_of(length, 1)))
    except AssertionError:
        assert length > DOUBTED
    with pytest.raises(BadAnswer, match="may be delivered"):
        reader.read(whole)


@pytest.mark.parametrize(
    "count", [2 * LEAST_OVERLAP, 900, 1_025, DOUBTED - 1, DOUBTED, DOUBTED + 1, DOUBTED + 500, 40_000]
)
def test_a_server_that_cuts_each_response_is_read_to_the_end(count: int) -> None:
    """Several responses bring half as many bytes as one of them has; it was one byte for `DOUBTED` + 1."""
    reader = Reader(object_of(20 * count), 1 << 20)
    while not reader.whole:
        reader.read(lambda data, first: data[first:][:count])
        assert reader.requests < 500
    assert reader.passed == len(reader.data)


@given(st.integers(1, 1 << 21), st.integers(0, 30))
def test_an_overlap_is_in_doubt_and_long_enough(doubted: int, misses: int) -> None:
    found = overlap(doubted, misses)
    assert 1 <= found <= min(doubted, DOUBTED)
    assert found >= min(LEAST_OVERLAP, doubted / 2)
    assert overlap(doubted, misses + 1) <= found


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 300))
def test_earlier_bytes_are_right_if_the_first_repeated_ones_are(
    right: int, before: int, foreign: int
) -> None:
    data = object_of(before + right + foreign)
    doubted = data[: before + right] + text_of(foreign, 1)
    assert all_differ(doubted, data[before:]) == (right < LEAST_OVERLAP)
