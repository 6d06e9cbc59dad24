"""Channels of every kind on real FIFOs, over both transports, against the reference model."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ConfigError, Denied, Missing
from streamer.plan import Arrangement, Balance, S3Uri, Shard
from streamer.plan.plan import Plan
from streamer.s3.client.session import Clients
from streamer.s3.pages.object_info import HEADS
from tests.kit.harness import MORE_THAN_A_FIFO, RunChannel, clients_of, fill
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.planning import alone, plan_augmented, plan_manifest, plan_prefix
from tests.kit.raw import etag
from tests.kit.stub import S3Stub, cut_after, fails, stalls
from tests.kit.trailers import published_trailer
from tests.unit import reference

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

MANIFEST = S3Uri("b", "manifest")
ATTRIBUTES = ["label", "image-ref", "box"]


Reader = Callable[[Clients], Any]
"""Chooses what reads the manifest: our own client, or aiobotocore's."""


@pytest.fixture(params=["http", "aiobotocore"])
def reader(request: pytest.FixtureRequest) -> Reader:
    return (lambda clients: clients) if request.param == "http" else alone


def store(stub: S3Stub) -> dict[str, bytes]:
    return {f"s3://{name}": data for name, data in stub.objects.items()}


def write_manifest(
    stub: S3Stub, kind: str, *, count: int = 40, seed: int = 1, pack: Callable[..., bytes] = bytes
) -> None:
    """Name the objects of the store in some order, some twice."""
    source = random.Random(seed)
    keys = [name for name in stub.objects if name.startswith("b/data/")]
    chosen = source.choices(keys, k=count)
    if kind == "ManifestFile":
        text = json.dumps([{"prefix": "s3://b/data/"}, *(name.removeprefix("b/data/") for name in chosen)])
    else:
        rows = [
            {"image-ref": f"s3://{name}", "label": number % 3, "box": {"x": [number, 0.5]}, "more": "ignored"}
            for number, name in enumerate(chosen)
        ]
        text = "\r\n".join([*map(json.dumps, rows), ""])
    stub.objects["b/manifest"] = pack(text.encode())


def planner(kind: str, arrangement: Arrangement) -> Callable[[Clients], Coroutine[Any, Any, Plan]]:
    async def make(clients: Clients) -> Plan:
        match kind:
            case "S3Prefix":
                return await plan_prefix(clients, S3Uri("b", "data/"), arrangement)
            case "ManifestFile":
                return await plan_manifest(clients, MANIFEST, arrangement)
            case _:
                return await plan_augmented(clients, MANIFEST, ATTRIBUTES, arrangement)

    return make


@pytest.mark.parametrize(
    ("kind", "wrap", "by"),
    [
        ("S3Prefix", True, "count"),
        ("S3Prefix", False, "bytes"),
        ("ManifestFile", True, "bytes"),
        ("ManifestFile", False, "count"),
        ("AugmentedManifestFile", True, "count"),
        ("AugmentedManifestFile", False, "bytes"),
    ],
)
async def test_a_fifo_holds_what_the_reference_says(
    run: RunChannel, stub: S3Stub, tmp_path: Path, *, kind: str, wrap: bool, by: Balance
) -> None:
    """Two epochs of a shuffled half: literals and bodies in their order, totals in the trailer."""
    fill(stub, [0, 1, 2, 3, 4, 5, 65_536, 120_001, 49_999, 50_000, 50_001])
    write_manifest(stub, kind)
    shard = Shard(1, 2, by)
    found = reference.rows(
        kind, store(stub), "s3://b/manifest" if kind != "S3Prefix" else "s3://b/data/", ATTRIBUTES
    )
    make = planner(kind, Arrangement(wrap, 7, shard))
    async with run(stub, tmp_path, make_plan=make) as running:
        for epoch in range(2):
            due = reference.stream(found, epoch=epoch, wrap=wrap, seed=7, host=1, hosts=2, by=by)
            assert await off_loop(read_all, running.fifo(epoch)) == due
            trailer = published_trailer(tmp_path, "train", epoch)
            assert (trailer.state, trailer.bytes_total) == ("complete", len(due))
            assert trailer.objects == running.plan.objects(epoch)


async def test_literals_alone_need_no_request(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """A manifest without any object is streamed from memory, also if it is larger than the budget."""
    labels = [f"{number:09}" for number in range(30_000)]
    stub.objects["b/manifest"] = "\n".join(json.dumps({"label": label}) for label in labels).encode()

    async def make(clients: Clients) -> Plan:
        return await plan_augmented(clients, MANIFEST, ["label"])

    async with run(stub, tmp_path, parts=2, make_plan=make) as running:
        stub.seen.clear()
        for epoch in range(2):
            assert await off_loop(read_all, running.fifo(epoch)) == "".join(labels).encode()
    assert stub.seen == []


async def test_a_wrapped_object_is_one_request(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """Header and padding ride along, and the object is not cut for their sake."""
    truth = fill(stub, [49_999, 50_000, 3])
    async with run(
        stub, tmp_path, part_size=50_000, make_plan=planner("S3Prefix", Arrangement(wrap=True))
    ) as running:
        bodies = [truth[:49_999], truth[49_999:99_999], truth[99_999:]]
        assert await off_loop(read_all, running.fifo(0)) == b"".join(map(reference.record, bodies))
        assert running.channel.statistics().objects_completed == 3
        assert running.channel.statistics().records == 3
    assert len({(seen.key, seen.range) for seen in stub.seen}) == 3


async def test_a_body_that_stops_keeps_its_literals_in_place(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """The header is out before the body comes, and a resumed body is not mixed with the padding."""
    truth = fill(stub, [MORE_THAN_A_FIFO + 1])
    stub.script(stalls(stub, after=0), cut_after(100_001), cut_after(7))

    def read_header_then_rest(path: Path) -> Any:
        with open(path, "rb", buffering=0) as file:
            header = file.read(8)
            stub.release()
            chunks = []
            while chunk := file.read(1 << 20):
                chunks.append(chunk)
            return header + b"".join(chunks)

    async with run(
        stub, tmp_path, part_size=1_000_000, make_plan=planner("S3Prefix", Arrangement(wrap=True))
    ) as running:
        assert await off_loop(read_header_then_rest, running.fifo(0)) == reference.record(truth)


async def test_sizes_and_versions_come_from_many_heads_at_once(stub: S3Stub) -> None:
    """Never one after the other, and never more than the bound."""
    fill(stub, [10] * 300)
    names = [f"{number:04}" for number in range(300)]
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/data/"}, *names]).encode()
    stub.together = {f"head b/data/{name}" for name in names[: HEADS // 2]}
    async with clients_of(stub) as clients:
        plan = await plan_manifest(alone(clients), MANIFEST)
    assert [ref.key for ref in plan.refs(0)] == [f"data/{name}" for name in names]
    assert HEADS // 2 <= stub.most_heads <= HEADS
    assert {ref.etag for ref in plan.refs(0)} <= {etag(data) for data in stub.objects.values()}


async def test_a_gzipped_manifest_is_read_as_its_text(stub: S3Stub, reader: Reader) -> None:
    fill(stub, [10] * 5)
    async with clients_of(stub) as clients:
        write_manifest(stub, "AugmentedManifestFile")
        plain = await plan_augmented(reader(clients), MANIFEST, ATTRIBUTES)
        write_manifest(stub, "AugmentedManifestFile", pack=gzip.compress)
        assert (await plan_augmented(reader(clients), MANIFEST, ATTRIBUTES)).digest == plain.digest


async def test_a_manifest_whose_body_breaks_off_is_resumed(stub: S3Stub, reader: Reader) -> None:
    """A manifest cut at the end of a line would be a shorter one."""
    fill(stub, [10] * 5)
    write_manifest(stub, "AugmentedManifestFile")
    whole = stub.objects["b/manifest"]
    first = whole.index(b"\n", 500) + 1
    stub.script(cut_after(first), cut_after(3), key="b/manifest")
    async with clients_of(stub) as clients:
        plan = await plan_augmented(reader(clients), MANIFEST, ATTRIBUTES)
    assert len(plan.entries) == 40
    # The last bytes of a response that broke may be foreign, so the next one repeats them.
    assert [seen.range for seen in stub.seen][1:] == [
        f"bytes=0-{len(whole) - 1}",
        f"bytes={first - first // 2}-{len(whole) - 1}",
    ]


async def test_a_manifest_that_names_what_is_not_there_says_where(stub: S3Stub, reader: Reader) -> None:
    fill(stub, [10] * 5)
    stub.objects["b/manifest"] = b'[{"prefix": "s3://b/data/"}, "0001", "absent", "0002"]'
    async with clients_of(stub) as clients:
        with pytest.raises(Missing, match=r"s3://b/manifest: entry 3: .*s3://b/data/absent"):
            await plan_manifest(reader(clients), MANIFEST)
        with pytest.raises(Missing):
            await plan_manifest(reader(clients), S3Uri("b", "no manifest"))
        refused = fails(403, "AccessDenied")
        stub.script(refused, refused, key="b/manifest")  # asked for again if the connection was used before
        with pytest.raises(Denied):
            await plan_manifest(reader(clients), MANIFEST)


@pytest.mark.parametrize("text", [b"", b"\n\n", b'{"image-ref": "s3://b/data/0000"}\n{"image-ref": 1}'])
async def test_a_manifest_that_breaks_a_rule_makes_no_plan(stub: S3Stub, reader: Reader, text: bytes) -> None:
    fill(stub, [10])
    stub.objects["b/manifest"] = text
    async with clients_of(stub) as clients:
        with pytest.raises(ConfigError, match="s3://b/manifest"):
            await plan_augmented(reader(clients), MANIFEST, ["image-ref"])
        with pytest.raises(ConfigError, match="AttributeNames is empty"):
            await plan_augmented(reader(clients), MANIFEST, [])


async def test_an_old_version_and_another_bucket_are_read(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """`?versionId=` pins what is read, and one manifest may name several buckets."""
    stub.objects |= {"b/data/x": b"new", "other/y": b"elsewhere"}
    rows = [{"a-ref": "s3://b/data/x?versionId=v+1é"}, {"a-ref": "s3://other/y"}, {"a-ref": "s3://b/data/x"}]
    stub.versions["b/data/x?v+1é"] = b"as it was"
    stub.objects["b/manifest"] = "\n".join(map(json.dumps, rows)).encode()

    async def make(clients: Clients) -> Plan:
        return await plan_augmented(clients, MANIFEST, ["a-ref"])

    async with run(stub, tmp_path, make_plan=make) as running:
        assert await off_loop(read_all, running.fifo(0)) == b"as it was" + b"elsewhere" + b"new"
        assert running.plan.entries.buckets == {"b", "other"}


async def test_a_host_without_entries_gives_empty_epochs(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """More hosts than objects is legal (contract §3.3): its FIFOs end at once, proven."""
    fill(stub, [10])
    make = planner("S3Prefix", Arrangement(shard=Shard(1, 2)))
    async with run(stub, tmp_path, make_plan=make) as running:
        for epoch in range(2):
            assert await off_loop(read_all, running.fifo(epoch)) == b""
        await eventually(lambda: len(running.states) == 2)
        assert [trailer.state for trailer in running.states] == ["complete"] * 2
