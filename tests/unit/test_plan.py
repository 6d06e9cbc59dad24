"""The plan: order, ranges, parts, digest."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.plan import (
    Arrangement,
    Entries,
    ObjectRef,
    Plan,
    S3Uri,
    Segment,
    Shard,
    bare_etag,
    cut,
    parse_address,
    parse_s3_uri,
)
from streamer.plan.folds import number_of_parts

objects = st.lists(
    st.builds(
        ObjectRef, st.just("bucket"), st.text(min_size=1, max_size=20), st.integers(0, 5000), st.just("e")
    ),
    unique_by=lambda ref: ref.key,
    max_size=30,
)


def frozen_order(found: list[ObjectRef]) -> list[Any]:
    """The objects of a listing in plan order."""
    return [item for (item,) in Plan.of(found).entries.in_key_order()]


def ref(key: str, size: int, etag: str = "e") -> ObjectRef:
    return ObjectRef("b", key, size, etag)


@given(objects)
def test_order_is_the_utf8_byte_order_of_keys(found: list[ObjectRef]) -> None:
    """Byte order and code point order agree in UTF-8; UTF-16 order (Java, Windows) would not."""
    ordered = frozen_order(found)
    assert [r.key.encode() for r in ordered] == sorted(r.key.encode() for r in ordered)


def test_order_is_not_the_server_s() -> None:
    found = [ref(key, 1) for key in ("a0", "a/b", "a.b", "é", "z")]
    assert [r.key for r in frozen_order(found)] == ["a.b", "a/b", "a0", "z", "é"]


MD5S = st.sampled_from(["0123456789abcdef" * 2, "0123456789abcdef" * 2 + "-7", "e"])


arrangements = st.builds(
    Arrangement,
    wrap=st.booleans(),
    seed=st.none() | st.integers(0, 3),
    shard=st.sampled_from([Shard(), Shard(1, 3), Shard(2, 3, "bytes")]),
    inflate=st.booleans(),
    join=st.sampled_from(["tar", "lines", None]),
)


@given(st.lists(st.tuples(st.integers(0, 5000), MD5S), max_size=30), arrangements, st.integers(1, 700))
def test_parts_are_counted_as_they_are_cut(
    found: list[tuple[int, str]], arrangement: Arrangement, part_size: int
) -> None:
    refs = [ref(f"{number}", size, etag) for number, (size, etag) in enumerate(found)]
    plan = Plan.of(refs, arrangement)
    parts = [1 for _ in cut(plan.segments(0), part_size=lambda: part_size, epoch=0)]
    assert number_of_parts(plan, part_size) == len(parts)


@given(objects, st.integers(1, 700), st.integers(0, 3))
def test_parts_cover_the_stream_once_in_order(found: list[ObjectRef], part_size: int, epoch: int) -> None:
    """Every byte of every object is in exactly one part, and every part knows its place."""
    plan = Plan.of(found)
    place, covered = 0, []
    for part in cut(plan.segments(0), part_size=lambda: part_size, epoch=epoch):
        assert (part.epoch, part.offset) == (epoch, place)
        (item,) = part.items
        assert isinstance(item, Segment)
        assert 0 < part.size <= part_size
        assert list(part.ends()) == [(part.size, item.object.size)] * (item.end == item.object.size)
        place += part.size
        covered += [(item.object.key, byte) for byte in range(item.start, item.end)]
    assert place == plan.total_bytes(0)
    assert covered == [(r.key, byte) for r in plan.refs(0) for byte in range(r.size)]


def test_digest_tells_plans_apart() -> None:
    """Order, version, size and name each change it; an empty object, which adds no byte, does not."""
    base = Plan.of((ref("a", 1), ref("b", 2)))
    assert base.digest == Plan.of((ref("a", 1), ref("b", 2), ref("c", 0))).digest
    others = [
        (ref("b", 2), ref("a", 1)),
        (ref("a", 1, "f"), ref("b", 2)),
        (ref("a", 2), ref("b", 2)),
        (ref("a", 1),),
    ]
    assert len({base.digest, *(Plan.of(each).digest for each in others)}) == 5


def test_digest_is_stable() -> None:
    """Another implementation can reproduce it: SHA-256 over a header and a JSON line per segment."""
    import hashlib

    lines = b'penstock plan 1\n["b", "k\\u00e9y", "e", 0, 7]\n'
    assert Plan.of((ref("kéy", 7),)).digest == hashlib.sha256(lines).hexdigest()


def test_a_segment_lies_inside_its_object() -> None:
    with pytest.raises(ValueError, match="no such range"):
        Segment(ref("a", 5), 0, 6)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("s3://b", S3Uri("b", "")),
        ("s3://b/", S3Uri("b", "")),
        ("s3://b/p/q", S3Uri("b", "p/q")),
        ("s3://b//p", S3Uri("b", "/p")),
        ("s3://b/with\nnewline", S3Uri("b", "with\nnewline")),
    ],
)
def test_uris(text: str, uri: S3Uri) -> None:
    assert parse_s3_uri(text) == uri


ACCOUNT = "123456789012"
POINT = f"arn:aws:s3:us-west-2:{ACCOUNT}:accesspoint/ap"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("s3a://b/p", "s3://b/p"), ("S3://b/p", "s3://b/p"), ("s3:/b/p", "s3://b/p"), ("s3//b/p", "s3://b/p"),
        ("gs://b/p", "s3://b/p"), ("arn:aws:s3:::b/p", "s3://b/p"), ("s3://arn:aws:s3:::b", "s3://b/"),
        ("https://b.s3.amazonaws.com/p%20q?X-Amz-Signature=x", "s3://b/p q"),
        ("http://s3.eu-west-1.amazonaws.com/b/p", "s3://b/p"),
        (f"https://ap-{ACCOUNT}.s3-accesspoint.us-west-2.amazonaws.com/p", f"s3://{POINT}/p"),
        ("https://us-east-1.console.aws.amazon.com/s3/buckets/b?region=x&prefix=p/q/&c=1", "s3://b/p/q/"),
        ("https://s3.console.aws.amazon.com/s3/buckets/b", "s3://b/"),
        ("http://minio:9000/b/p", "s3://b/p, and http://minio:9000 as Penstock.Endpoint.Url"),
        ("s3://minio:9000/b/p", "s3://b/p, and http://minio:9000 as Penstock.Endpoint.Url"),
        ("https://b.oss-cn-x.aliyuncs.com/p", "s3://b/p, and https://oss-cn-x.aliyuncs.com as "),
        ("https://storage.googleapis.com/b/p", "s3://b/p, and https://storage.googleapis.com as "),
    ],
)  # fmt: skip
def test_another_form_of_a_bucket_is_written_as_a_uri(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"write {meant}")):
        parse_address(text)


@pytest.mark.parametrize(
    "text", ["https://b.s3.dualstack.x.amazonaws.com/p", "https://s3.amazonaws.com.cn/b/p"]
)
def test_addresses_of_amazon_s3(text: str) -> None:
    assert parse_address(text) == S3Uri("b", "p")


@pytest.mark.parametrize("text", ["", "b/p", "/b/p", "file:///p", "https://b", "s3:///p", "s3://u:p@b/k"])
def test_not_uris(text: str) -> None:
    with pytest.raises(ConfigError, match="s3://BUCKET/PREFIX"):
        parse_s3_uri(text)


@pytest.mark.parametrize("etag", ['"x-3"', "x-3", 'W/"x-3"'])
def test_etags_compare_bare(etag: str) -> None:
    assert bare_etag(etag) == "x-3"


def test_what_no_plan_can_hold_is_refused() -> None:
    """Sizes that a server gives, version ids that a manifest gives: no struct.error, no OverflowError."""
    for refs in ([ObjectRef("b", "k", 1 << 60, "e")] * 16, [ObjectRef("b", "k", 1, "e", "v" * 70_000)]):
        with pytest.raises(ConfigError, match="S3 has no object with such"):
            Entries(objects_each=len(refs)).add(*refs)
