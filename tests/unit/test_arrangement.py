"""Entries, wrapping, shuffle, shards and cutting, against the reference model."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.formats.recordio import MAX_PAYLOAD, encode
from streamer.plan import (
    Arrangement,
    Entries,
    ObjectRef,
    Permutation,
    Plan,
    Segment,
    Shard,
    cut,
    parse_object_uri,
)
from streamer.plan.parts import MAX_LITERALS
from streamer.s3.manifests.lines import RowScanner
from streamer.s3.manifests.text import ArrayScanner
from tests.unit import reference

contents = st.binary(max_size=40)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/?"), min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=4,
)
shards = st.integers(1, 5).flatmap(
    lambda count: st.builds(
        Shard, st.integers(0, count - 1), st.just(count), st.sampled_from(["count", "bytes"])
    )
)
arrangements = st.builds(Arrangement, st.booleans(), st.none() | st.integers(-(2**63), 2**63 - 1), shards)


Stored = tuple[str, dict[str, bytes], str, Sequence[str]]
"""Kind, store, URI and attributes of a channel."""


@st.composite
def channels(draw: st.DrawFn) -> Stored:
    """A store, and what to read of it: kind, URI, attributes."""
    keys = draw(st.lists(names, min_size=1, max_size=12, unique=True))
    store = {f"s3://b/data/{key}": draw(contents) for key in keys}
    store["s3://b/data/folder/"] = b""
    kind = draw(st.sampled_from(["S3Prefix", "ManifestFile", "AugmentedManifestFile"]))
    if kind == "S3Prefix":
        return kind, store, "s3://b/data/", ()
    if kind == "ManifestFile":
        chosen = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=15))
        store["s3://b/manifest"] = json.dumps([{"prefix": "s3://b/data/"}, *chosen]).encode()
        return kind, store, "s3://b/manifest", ()
    attributes = draw(st.permutations(["image-ref", "label", "other", "mask-ref"]))[: draw(st.integers(1, 4))]
    lines = [
        json.dumps(
            {
                "mask-ref": f"s3://b/data/{draw(st.sampled_from(keys))}",
                "label": draw(values),
                "image-ref": f"s3://b/data/{draw(st.sampled_from(keys))}",
                "other": draw(values),
                "unlisted": draw(values),
            },
        )
        for _ in range(draw(st.integers(1, 10)))
    ]
    store["s3://b/manifest"] = "\n".join([*lines, ""]).encode()
    return kind, store, "s3://b/manifest", attributes


def planned(channel: Stored, arrangement: Arrangement, *, piece: int = 17) -> Plan:
    """The plan of a channel, its manifest scanned in pieces."""
    kind, store, uri, attributes = channel

    def ref(name: str) -> ObjectRef:
        (bucket, key), version = parse_object_uri(name)
        return ObjectRef(bucket, key, len(store[name]), "e", version)

    if kind == "S3Prefix":
        markers = (name for name in store if name.endswith("/") and not store[name])  # a listing has none
        found = [ref(name) for name in sorted(store.keys() - markers) if name.startswith(uri)]
        return Plan.of(found, arrangement)
    text = store[uri]
    each = sum(name.endswith("-ref") for name in attributes) if attributes else 1
    entries = Entries(wrap=arrangement.wrap, objects_each=each)
    scanner = RowScanner(uri, attributes) if attributes else ArrayScanner(uri)
    for start in range(0, len(text) + 1, piece):
        for items in scanner.feed(text[start : start + piece], last=start + piece > len(text)):
            for row in [items] if attributes else [[item] for item in items]:
                entries.add(*(ref(item) if isinstance(item, str) else item for item in row))
    return Plan(entries, arrangement)


def bytes_of(store: dict[str, bytes], object_: ObjectRef, start: int, end: int) -> bytes:
    return store[f"s3://{object_.bucket}/{object_.key}"][start:end]


@settings(max_examples=4 * settings().max_examples)
@given(channels(), arrangements, st.integers(0, 3), st.integers(1, 50), st.integers(1, 100))
def test_any_channel_streams_what_the_reference_says(
    channel: Stored, arrangement: Arrangement, epoch: int, part_size: int, piece: int
) -> None:
    """Type, wrap, shuffle, shard and epoch: segments, parts and totals agree with the contract's model."""
    kind, store, uri, attributes = channel
    shard = arrangement.shard
    due = reference.stream(
        reference.rows(kind, store, uri, attributes),
        epoch=epoch,
        wrap=arrangement.wrap,
        seed=arrangement.seed,
        host=shard.index,
        hosts=shard.count,
        by=shard.by,
    )
    plan = planned(channel, arrangement, piece=piece)
    assert plan.total_bytes(epoch) == len(due)
    found = b"".join(
        part if isinstance(part, bytes) else bytes_of(store, part.object, part.start, part.end)
        for part in plan.segments(epoch)
    )
    assert found == due
    delivered = b""
    for part in cut(plan.segments(epoch), part_size=lambda: part_size, epoch=epoch):
        assert (part.epoch, part.offset) == (epoch, len(delivered))
        assert part.body <= part_size
        assert part.size - part.body <= MAX_LITERALS
        assert part.requests <= 1
        for item in part.items:
            if isinstance(item, bytes):
                delivered += item
            else:
                delivered += bytes_of(store, item.object, item.start, item.end)
        assert len(delivered) - part.offset == part.size > 0
    assert delivered == due


@given(channels(), st.booleans(), st.none() | st.integers(0, 9), st.integers(1, 20), st.integers(0, 2))
def test_shards_by_count_are_disjoint_whole_and_even(
    channel: Stored, wrap: bool, seed: int | None, count: int, epoch: int
) -> None:
    """Any number of hosts, with and without shuffle: numbers differ by one at most (contract §3.3)."""
    whole = planned(channel, Arrangement(wrap, seed))
    parts = [planned(channel, Arrangement(wrap, seed, Shard(index, count))) for index in range(count)]
    orders = [list(plan.order(epoch)) for plan in parts]
    assert sorted(itertools.chain(*orders)) == sorted(whole.order(epoch)) == list(range(len(whole.entries)))
    sizes = [len(order) for order in orders]
    assert max(sizes) - min(sizes) <= 1
    assert sum(plan.total_bytes(epoch) for plan in parts) == whole.total_bytes(epoch)
    assert sum(plan.objects(epoch) for plan in parts) == whole.objects(epoch) == len(list(whole.refs(epoch)))


@settings(max_examples=4 * settings().max_examples)
@given(channels(), arrangements, st.integers(0, 3), st.integers(1, 6))
def test_rank_fifos_stream_what_the_reference_says(
    channel: Stored, arrangement: Arrangement, epoch: int, count: int
) -> None:
    """Every FIFO of a channel of any kind, and that no entry is in two of them or in none."""
    kind, store, uri, attributes = channel
    rows, shard = reference.rows(kind, store, uri, attributes), arrangement.shard
    whole = planned(channel, arrangement)
    ranks = whole.ranks(count)
    for rank, plan in enumerate(ranks):
        due = reference.stream(
            rows,
            epoch=epoch,
            wrap=arrangement.wrap,
            seed=arrangement.seed,
            host=shard.index,
            hosts=shard.count,
            by=shard.by,
            rank=rank,
            ranks=count,
        )
        found = b"".join(
            part if isinstance(part, bytes) else bytes_of(store, part.object, part.start, part.end)
            for part in plan.segments(epoch)
        )
        assert found == due
        assert plan.total_bytes(epoch) == len(due)
    dealt = [list(plan.order(epoch)) for plan in ranks]
    if shard.by == "count":  # then rank FIFOs change nothing for a host
        assert sorted(itertools.chain(*dealt)) == sorted(whole.order(epoch))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    everywhere = [
        index
        for host in range(shard.count)
        for of_host in [replace(arrangement, shard=Shard(host, shard.count, shard.by))]
        for plan in Plan(whole.entries, of_host).ranks(count)
        for index in plan.order(epoch)
    ]
    assert sorted(everywhere) == list(range(len(whole.entries)))


@given(st.lists(st.integers(0, 1000), max_size=40), st.none() | st.integers(0, 9), st.integers(1, 8))
def test_rank_fifos_by_bytes_differ_by_one_entry(sizes: list[int], seed: int | None, count: int) -> None:
    refs = [ObjectRef("b", f"{i}", size, "e") for i, size in enumerate(sizes)]
    ranks = Plan.of(refs, Arrangement(seed=seed, shard=Shard(by="bytes"))).ranks(count)
    loads = [sum(max(1, sizes[entry]) for entry in plan.order(1)) for plan in ranks]
    assert sum(loads) == sum(max(1, size) for size in sizes)
    assert max(loads) - min(loads) <= max(1, *sizes, 1)


@given(st.booleans(), st.none() | st.integers(0, 9), shards, st.integers(1, 4))
def test_digests_made_together_are_those_made_alone(
    wrap: bool, seed: int | None, shard: Shard, count: int
) -> None:
    entries = Entries(wrap=wrap)
    for size in (0, 3):
        entries.add(ObjectRef("b", f"{size}", size, "e"))
    ranks = Plan(entries, Arrangement(wrap, seed, shard)).ranks(count)
    assert len({plan.digest for plan in ranks}) == count
    for plan in reversed(ranks):
        assert plan.digest == Plan(entries, Arrangement(wrap, seed, plan.shard)).digest


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_fifo_outside_the_rank_fifos_is_refused(index: int, count: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {index} of {count}"):
        Shard().rank(index, count)


@given(st.lists(st.integers(0, 1000), max_size=40), st.none() | st.integers(0, 9), st.integers(1, 8))
def test_shards_by_bytes_are_disjoint_whole_and_differ_by_one_entry(
    sizes: list[int], seed: int | None, count: int
) -> None:
    refs = [ObjectRef("b", f"{i}", size, "e") for i, size in enumerate(sizes)]
    parts = [Plan.of(refs, Arrangement(seed=seed, shard=Shard(i, count, "bytes"))) for i in range(count)]
    orders = [list(plan.order(1)) for plan in parts]
    assert sorted(itertools.chain(*orders)) == list(range(len(sizes)))
    loads = [sum(max(1, sizes[entry]) for entry in order) for order in orders]
    assert max(loads) - min(loads) <= max(1, *sizes, 1)


@given(st.integers(0, 3000), st.integers(-(2**63), 2**63 - 1), st.integers(0, 5))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(n, seed=seed, epoch=epoch).over(range(n))) == list(range(n))


def test_the_shuffle_is_that_of_the_documentation() -> None:
    """The test vector of docs/explanation/semantics.md, and the reference model for sizes around squares."""
    assert list(Permutation(10, seed=42, epoch=0).over(range(10))) == VECTOR[0]
    assert list(Permutation(10, seed=42, epoch=1).over(range(10))) == VECTOR[1]
    for n in (1, 2, 3, 4, 5, 15, 16, 17, 101):
        assert list(Permutation(n, seed=7, epoch=3).over(range(n))) == reference.permutation(n, 7, 3)


def test_every_order_of_few_entries_occurs_about_as_often() -> None:
    """Twenty-four orders of four entries over 4,800 epochs: each is due 200 times."""
    orders = Counter(tuple(Permutation(4, seed=1, epoch=epoch).over(range(4))) for epoch in range(4800))
    assert len(orders) == 24
    assert 120 < min(orders.values()) <= max(orders.values()) < 300


def test_neighbours_do_not_stay_together() -> None:
    """A shuffle of a sorted list is to part what lies together: one pair in n stays, by chance."""
    order = list(Permutation(20_000, seed=3, epoch=0).over(range(20_000)))
    assert sum(abs(one - two) == 1 for one, two in itertools.pairwise(order)) < 20
    assert sum(position == entry for position, entry in enumerate(order)) < 10


def test_without_a_seed_every_epoch_is_the_same_and_with_one_each_is_another() -> None:
    refs = [ObjectRef("b", f"{i:03}", 1, "e") for i in range(100)]
    plain, shuffled = Plan.of(refs), Plan.of(refs, Arrangement(seed=5))
    assert list(plain.order(0)) == list(plain.order(1)) == list(range(100))
    assert len({tuple(shuffled.order(epoch)) for epoch in range(20)} | {tuple(range(100))}) == 21


def test_an_object_moves_between_hosts_from_epoch_to_epoch() -> None:
    """Shuffle goes before sharding (contract §3.2)."""
    refs = [ObjectRef("b", f"{i:03}", 1, "e") for i in range(50)]
    plan = Plan.of(refs, Arrangement(seed=5, shard=Shard(0, 2)))
    assert set(plan.order(0)) != set(plan.order(1))


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_host_outside_the_hosts_is_refused(index: int, count: int) -> None:
    with pytest.raises(ConfigError, match=f"host {index} of {count}"):
        Shard(index, count)


def test_more_hosts_than_entries_leave_some_with_nothing() -> None:
    """Legal (contract §3.3), and no search for bytes that never come."""
    refs = [ObjectRef("b", "one", 5, "e"), ObjectRef("b", "empty", 0, "e")]
    for seed in (None, 1):
        for by in ("count", "bytes"):
            plan = Plan.of(refs, Arrangement(seed=seed, shard=Shard(2, 3, by)))
            assert not plan.streams
            assert (plan.total_bytes(0), plan.objects(0), list(plan.segments(0))) == (0, 0, [])
    assert Plan.of(refs, Arrangement(seed=1, shard=Shard(1, 2))).streams


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5])
def test_a_wrapped_object_is_one_record(size: int) -> None:
    (part,) = cut(
        Plan.of([ObjectRef("b", "k", size, "e")], Arrangement(wrap=True)).segments(0),
        part_size=lambda: 16,
        epoch=0,
    )
    body = b"12345"[:size]
    assert b"".join(item if isinstance(item, bytes) else body for item in part.items) == encode(body)
    assert list(part.ends()) == ([(8 + size, size)] if size else [])


def test_what_is_too_long_for_a_record_is_refused_by_name() -> None:
    """2^29 bytes have no encoding that all readers agree on (contract §5.1)."""
    Entries(wrap=True).add(ObjectRef("b", "just", MAX_PAYLOAD, "e"))
    with pytest.raises(ConfigError, match=r"s3://b/long has 536870912 bytes.*RecordWrapperType: None"):
        Entries(wrap=True).add(ObjectRef("b", "long", MAX_PAYLOAD + 1, "e"))
    Entries().add(ObjectRef("b", "long", MAX_PAYLOAD + 1, "e"))


def test_literals_ride_on_the_parts_beside_them() -> None:
    """A wrapped object of just the part size is one request; a long literal has parts of its own."""
    ref = ObjectRef("b", "k", 8, "e")
    parts = list(
        cut(
            [b"ab", Segment(ref, 0, 8), b"cd", Segment(ref, 0, 8)],
            part_size=lambda: 8,
            epoch=0,
        )
    )
    whole = Segment(ref, 0, 8)
    assert [part.items for part in parts] == [(b"ab", whole, b"cd"), (whole,)]
    (small, *_, last) = cut([b"x" * 200_000], part_size=lambda: 1 << 20, epoch=0)
    assert (small.size, small.body) == (65536, 0)
    assert last.offset + last.size == 200_000


def test_the_digest_covers_all_that_decides_the_stream() -> None:
    one, two = ObjectRef("b", "a", 1, "e"), ObjectRef("b", "b", 2, "e")

    def row(*items: bytes | ObjectRef) -> Plan:
        entries = Entries()
        entries.add(*items)
        return Plan(entries)

    plans = [
        *(
            Plan.of([one, two], Arrangement(wrap, seed, shard))
            for wrap in (False, True)
            for seed in (None, 1, 2)
            for shard in (Shard(), Shard(0, 2), Shard(1, 2), Shard(1, 2, "bytes"))
        ),
        Plan.of([ObjectRef("b", "a", 1, "e", "v1"), two]),
        row(one, two),
        row(one, b"7"),
        row(one, b"8"),
        row(b"7", one),
        row(b"7"),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


@pytest.mark.parametrize("version", [None, "v.1"])
def test_entries_give_back_what_was_added(version: str | None) -> None:
    entries = Entries(objects_each=2)
    items: list[ObjectRef | bytes] = [
        ObjectRef("b", "ké/y", 2**40, "abc-3", version),
        b"",
        b"text",
        ObjectRef("other", "k", 0, "", None),
    ]
    entries.add(*items)
    entries.add(b"last")
    assert list(entries) == [items, [b"last"]]
    assert entries.buckets == {"b", "other"}


def test_a_plan_takes_at_most_200_bytes_an_object() -> None:
    """With keys of 60 bytes and an MD5 for ETag, as S3 lists them."""
    tracemalloc.start()
    try:
        entries = Entries()
        for number in range(50_000):
            entries.add(
                ObjectRef(
                    "bucket", f"datasets/imagenet/train/n{number:08}/{number:022}.JPEG", 9, f"{number:032x}"
                )
            )
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / len(entries) <= 200


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("s3://b/k", (("b", "k"), None)),
        ("s3://b/k?versionId=a.B_1", (("b", "k"), "a.B_1")),
        ("s3://b/what?x=1", (("b", "what?x=1"), None)),
    ],
)
def test_the_uri_of_an_object_may_name_a_version(uri: str, found: tuple[tuple[str, str], str | None]) -> None:
    assert parse_object_uri(uri) == found


@pytest.mark.parametrize("uri", ["s3://b", "s3://b/", "http://b/k", "k"])
def test_what_names_no_object_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="s3://"):
        parse_object_uri(uri)


VECTOR = ([6, 4, 8, 9, 1, 2, 0, 5, 7, 3], [0, 8, 1, 5, 2, 4, 3, 9, 6, 7])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_records_are_known_where_the_plan_makes_them(count: int) -> None:
    """One of each object or attribute, on every shard; else nobody but a reader knows."""
    entries = Arrangement(wrap=True).entries()
    for index in range(4):
        entries.add(ObjectRef("b", f"{index}", index, "e"), b"label", b"note")
    plans = [Plan(entries, Arrangement(True, 3, Shard(index, count))) for index in range(count)]
    for epoch in range(2):
        found = [plan.records(epoch) for plan in plans]
        assert sum(count for count in found if count is not None) == 12
        assert found == [3 * len(list(plan.order(epoch))) for plan in plans]
    assert Plan.of([], Arrangement(wrap=True)).records(0) == 0
    assert Plan.of([ObjectRef("b", "k", 1, "e")]).records(0) is None
