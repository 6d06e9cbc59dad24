"""Poison against every reader that can be had, behind every kind of record; and where records end."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.doctor.remedies import CAUSES
from sidecar.job.failures import advice
from streamer import errors
from streamer.errors import CorruptRecord
from streamer.formats import recordio, tfrecord
from streamer.formats.crc import masked_crc32c
from streamer.formats.recordio import RecordIOReader
from streamer.formats.tfrecord import TFRecordReader
from streamer.relay.deliver import frame_aligner as failures
from streamer.relay.deliver.failure_policy import FailurePolicy
from streamer.relay.deliver.frame_aligner import MOST_HELD, POISON, FrameAligner, Framing, WhenFailed
from streamer.s3.client.faults import EXPLANATIONS, NOT_BY_CREDENTIALS, error_from_response
from streamer.s3.ranges import suggest_omission
from tests.sidecar import foreign

ENCODE = {"RecordIO": recordio.encode, "TFRecord": tfrecord.encode}
OURS = {"RecordIO": RecordIOReader, "TFRecord": TFRecordReader}
FOREIGN = [
    ("RecordIO", foreign.dmlc),
    ("RecordIO", foreign.incumbent_recordio),
    ("RecordIO", foreign.mlio_recordio),
    ("RecordIO", foreign.sdk_recordio),
    ("TFRecord", foreign.incumbent_tfrecord),
    ("TFRecord", foreign.skipping_tfrecord),
    ("TFRecord", foreign.unchecked_tfrecord),
]
payloads = st.lists(st.binary(max_size=60), max_size=8)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.Denied("x"), "give the credentials s3:GetObject"),
        (errors.ObjectMissing("x"), "put the object back"),
        (errors.SourceChanged("x"), "put the listed version back"),
        (errors.GaveUp("x"), "see to the endpoint"),
        (errors.BadAnswer("x"), "see to the endpoint"),
        (errors.Mismatch("x"), "replace the corrupt object"),
    ],
)
def test_the_operator_is_told_what_to_do(error: Any, words: str) -> None:
    """A restart alone helps where the FIFO is held and its place in the plan known; damage it never mends."""
    assert words in advice(error, mendable=False)
    assert "restart sidecar and trainer" in advice(error, mendable=False)
    mends = not isinstance(error, errors.Mismatch)
    assert ("`penstock restart` goes on" in advice(error, mendable=True)) == mends


@pytest.mark.parametrize("code", sorted(NOT_BY_CREDENTIALS))
def test_an_object_that_nobody_may_read_now_is_no_matter_of_credentials(code: str) -> None:
    """As one that a lifecycle rule has archived: neither a policy nor If-Match is named, and it is final."""
    error = error_from_response(
        status=400 if code.startswith("KMS") else 403,
        code=code,
        message="",
        request_id=None,
        retry_after=None,
        date=None,
        context=errors.ErrorContext("b", "k"),
    )
    suggest_omission(error)
    assert isinstance(error, errors.Denied)
    assert not error.retryable
    assert EXPLANATIONS[code] in str(error)
    assert "If-Match" not in str(error)
    assert advice(error, mendable=False) == "do as the error says, and restart sidecar and trainer"
    assert error.code in CAUSES


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("reader_came", [False, True])
@pytest.mark.parametrize("at_border", [False, True])
def test_a_fifo_ends_only_where_the_policy_can_be_carried_out(
    local: bool, reader_came: bool, at_border: bool
) -> None:
    fates = {
        policy: policy.fifo_fate(local=local, reader_came=reader_came, at_border=at_border)
        for policy in (FailurePolicy("hold"), FailurePolicy("close"), FailurePolicy("poison", "TFRecord"))
    }
    can_end = reader_came and not local
    assert list(fates.values()) == [
        "held",
        "closed" if can_end else "held",
        "poisoned" if can_end and at_border else "held",
    ]


@pytest.mark.parametrize(
    ("when_failed", "framing"), [("poison", None), ("hold", "RecordIO"), ("close", "TFRecord")]
)
def test_a_policy_has_a_framing_for_poison_alone(when_failed: WhenFailed, framing: Framing | None) -> None:
    with pytest.raises(ValueError, match="poison needs a framing"):
        FailurePolicy(when_failed, framing)


def test_a_policy_makes_what_its_framing_needs() -> None:
    assert FailurePolicy("close").aligner(at_record=True) is None
    assert FailurePolicy("close").poison == b""
    policy = FailurePolicy("poison", "RecordIO")
    assert policy.poison == POISON["RecordIO"]
    aligners = [policy.aligner(at_record=known) for known in (True, False)]
    assert [each.at_border for each in aligners if each is not None] == [True, False]


def parts(payload: bytes) -> bytes:
    """A RecordIO record in three frames."""
    found = []
    for flag, part in zip((1, 2, 3), (payload[:4], payload[4:8], payload[8:]), strict=True):
        found.append(struct.pack("<II", recordio.MAGIC, flag << 29 | len(part)) + part)
        found.append(recordio.padding(len(part)))
    return b"".join(found)


def test_the_checksum_is_wrong_in_every_bit() -> None:
    length, crc = struct.unpack("<QI", POISON["TFRecord"])
    assert crc ^ masked_crc32c(struct.pack("<Q", length)) == 0xFFFFFFFF
    magic, word = struct.unpack("<II", POISON["RecordIO"])
    assert (magic ^ recordio.MAGIC, word) == (0xFFFFFFFF, 0xFFFFFFFF)


@pytest.mark.parametrize("framing", ["RecordIO", "TFRecord"])
@given(records=payloads, skip=st.integers(0, 5))
def test_our_readers_refuse_it(framing: Framing, records: list[bytes], skip: int) -> None:
    options = {"max_corrupted_records_to_skip": skip} if framing == "TFRecord" else {}
    stream = b"".join(map(ENCODE[framing], records)) + POISON[framing]
    reader = iter(OURS[framing](io.BytesIO(stream), **options))
    assert [next(reader) for _ in records] == records
    with pytest.raises(CorruptRecord):
        next(reader)


@pytest.mark.parametrize(("framing", "reader"), FOREIGN, ids=lambda each: getattr(each, "__name__", None))
@pytest.mark.parametrize("records", [[], [b"one", b"", b"three" * 100]], ids=["alone", "behind"])
def test_other_people_s_readers_refuse_it(
    tmp_path: Path, framing: Framing, reader: Callable[[str, int, str], list[list[str]]], records: list[bytes]
) -> None:
    """And take the stream without it."""
    whole = b"".join(map(ENCODE[framing], records))
    path = tmp_path / "train_0"
    path.write_bytes(whole)
    assert len(reader(str(tmp_path), 1, "train")[0]) == len(records)
    path.write_bytes(whole + POISON[framing])
    with pytest.raises(foreign.REFUSALS):
        reader(str(tmp_path), 1, "train")


@pytest.mark.parametrize("reader", [foreign.dmlc, foreign.incumbent_recordio, foreign.mlio_recordio])
def test_poison_between_the_parts_of_a_record(
    tmp_path: Path, reader: Callable[[str, int, str], list[list[str]]]
) -> None:
    (tmp_path / "train_0").write_bytes(parts(b"abcdefghijkl")[:12] + POISON["RecordIO"])
    with pytest.raises(foreign.REFUSALS):
        reader(str(tmp_path), 1, "train")


def test_why_a_record_is_never_cut(tmp_path: Path) -> None:
    """Known readers take the first part of a record for all of it, or fill it up."""
    (tmp_path / "train_0").write_bytes(recordio.encode(b"whole") + recordio.encode(b"a record")[:-4])
    assert len(foreign.incumbent_recordio(str(tmp_path), 1, "train")[0]) == 2
    assert len(foreign.sdk_recordio(str(tmp_path), 1, "train")[0]) == 2


@given(
    data=st.data(), framing=st.sampled_from(["RecordIO", "TFRecord"]), most=st.sampled_from([MOST_HELD, 24])
)
def test_what_leaves_are_whole_records(data: st.DataObject, framing: Framing, most: int) -> None:
    """However the bytes come in; a frame that is too long to be held leaves as it comes, and says so."""
    frames = [ENCODE[framing](each) for each in data.draw(payloads)]
    stream = b"".join(frames)
    borders = {sum(map(len, frames[:count])) for count in range(len(frames) + 1)}
    held_back, failures.MOST_HELD = failures.MOST_HELD, most
    try:
        records, sent, at = FrameAligner(framing, at_record=True), b"", 0
        while at < len(stream):
            size = data.draw(st.integers(1, 40))
            sent += records.pass_on(stream[at : at + size])
            at = min(len(stream), at + size)
            assert stream.startswith(sent)
            assert len(sent) + records.held == at
            assert records.held < max(most, 13)
            assert records.at_border == (len(sent) in borders)
            assert records.at_border or most < MOST_HELD
        assert (sent + records.rest(), records.held) == (stream, 0)
    finally:
        failures.MOST_HELD = held_back


def test_the_parts_of_a_record_may_leave_one_by_one() -> None:
    whole = parts(b"abcdefghijkl")
    records = FrameAligner("RecordIO", at_record=True)
    assert [len(records.pass_on(whole[at : at + 6])) for at in range(0, 36, 6)] == [0, 12, 0, 12, 0, 12]


def test_a_long_record_is_not_copied_for_each_piece() -> None:
    """What is held is looked at when it is whole, so the time is that of its bytes."""
    frame = tfrecord.encode(os.urandom(MOST_HELD - 100))
    records = FrameAligner("TFRecord", at_record=True)
    assert [records.pass_on(frame[at : at + 1000]) for at in range(0, len(frame) - 1000, 1000)].count(
        b""
    ) > 8000
    assert records.held > MOST_HELD - 2000


@pytest.mark.parametrize("framing", ["RecordIO", "TFRecord"])
def test_what_is_not_known_passes_and_is_no_border(framing: Framing) -> None:
    frame = ENCODE[framing](b"0123456789")
    records = FrameAligner(framing, at_record=False)
    assert records.pass_on(frame[3:]) == frame[3:]
    assert not records.at_border
    records.begins()
    assert records.at_border
    assert records.pass_on(frame[:5]) == b""
    assert records.pass_on(frame[5:] + b"\xff" * 20) == frame + b"\xff" * 20  # of another format
    assert not records.at_border
    records.begins()
    assert not records.at_border
