"""What is selected of a manifest: by globs and limits, with requests for what is selected alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamer.errors import ConfigError, Missing
from streamer.plan import Plan, S3Uri
from streamer.plan.selection import Limit, Selection
from streamer.s3.pages.sources import Sources
from tests.kit.harness import PagesFrom, clients_of
from tests.kit.planning import alone, plan_augmented, plan_manifest
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

MANIFEST = S3Uri("b", "manifest")


def write(stub: S3Stub, *suffixes: str, prefix: str = "s3://b/d/") -> None:
    """Write a manifest and put an object of three bytes for each entry."""
    stub.objects |= {f"{prefix}{suffix}".removeprefix("s3://"): b"abc" for suffix in suffixes}
    stub.objects["b/manifest"] = json.dumps([{"prefix": prefix}, *suffixes]).encode()


async def planned(stub: S3Stub, **selection: Any) -> Plan:
    async with clients_of(stub) as clients:
        return await plan_manifest(alone(clients), MANIFEST, selection=Selection(**selection))


def keys_in(plan: Plan) -> list[str]:
    return [ref.key for ref in plan.refs(0)]


async def test_globs_see_the_key_after_the_prefix_of_the_manifest(stub: S3Stub) -> None:
    """Objects that are left out cost no request, even if they do not exist."""
    write(stub, "x/2.tar", "x/1.tar", "x/1.idx", "y/1.tar")
    del stub.objects["b/d/x/1.idx"], stub.objects["b/d/y/1.tar"]
    plan = await planned(stub, include=("x/*",), exclude=("*.idx",))
    assert keys_in(plan) == ["d/x/2.tar", "d/x/1.tar"]
    assert stub.head_count == 2


async def test_a_limit_by_objects_reads_the_manifest_no_further(stub: S3Stub) -> None:
    write(stub, *(f"{number}" for number in range(50)))
    stub.objects["b/manifest"] += b"no end of a manifest"
    plan = await planned(stub, exclude=("0",), limit=Limit(objects=3))
    assert keys_in(plan) == ["d/1", "d/2", "d/3"]
    assert stub.head_count == 3


async def test_a_limit_by_bytes_counts_what_was_found(stub: S3Stub) -> None:
    write(stub, "1", "2", "3")
    assert keys_in(await planned(stub, limit=Limit(bytes=8))) == ["d/1", "d/2"]
    with pytest.raises(ConfigError, match="no object is cut"):
        await planned(stub, limit=Limit(bytes=2))


async def test_a_sample_costs_requests_for_the_sample_alone(stub: S3Stub, pages_from: PagesFrom) -> None:
    """Objects draw by their names, so the sample is that of a prefix with the same objects."""
    write(stub, *(f"{number:03}" for number in range(100)))
    limit = Limit(objects=7, seed=5)
    plan = await planned(stub, limit=limit)
    assert stub.head_count == 7
    async with pages_from(stub) as pages:
        listed = await Sources(pages, [S3Uri("b", "d/")], selection=Selection(limit=limit)).plan()
    assert plan.digest == listed.digest
    by_bytes = await planned(stub, limit=Limit(bytes=21, seed=5))
    assert by_bytes.digest == plan.digest


async def test_versions_keep_their_ids_in_a_sample(stub: S3Stub) -> None:
    write(stub, *(f"{number}" for number in range(9)))
    names = [f"{number}?versionId=v{number}" for number in range(9)]
    stub.versions |= {f"b/d/{name}".replace("versionId=", ""): b"old" for name in names}
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/d/"}, *names]).encode()
    plan = await planned(stub, limit=Limit(objects=4, seed=1))
    assert len(plan.entries) == 4
    assert all(ref.version == f"v{ref.key[-1]}" for ref in plan.refs(0))


async def test_an_error_names_the_entry_of_the_manifest(stub: S3Stub) -> None:
    """Also when entries before it were left out."""
    write(stub, "0.idx", "1.idx", "2.tar")
    del stub.objects["b/d/2.tar"]
    with pytest.raises(Missing, match="entry 4: .*s3://b/d/2.tar"):
        await planned(stub, exclude=("*.idx",))
    with pytest.raises(Missing, match="entry 4: "):
        await planned(stub, exclude=("*.idx",), limit=Limit(objects=5, seed=1))


async def test_a_selection_of_nothing_is_an_error_that_shows_what_globs_see(stub: S3Stub) -> None:
    write(stub, "x/1.tar")
    with pytest.raises(Missing, match=r"leave out every object.*'x/1.tar'"):
        await planned(stub, include=("d/*",))


async def test_lines_of_an_augmented_manifest_are_limited_and_drawn_by_number(stub: S3Stub) -> None:
    """Equal lines are drawn one by one."""
    stub.objects |= {"b/image": b"abc"}
    lines = [{"image-ref": "s3://b/image", "label": str(number)} for number in range(30)]
    stub.objects["b/manifest"] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    async def labels(limit: Limit) -> list[int]:
        async with clients_of(stub) as clients:
            plan = await plan_augmented(
                alone(clients), MANIFEST, ["image-ref", "label"], selection=Selection(limit=limit)
            )
        return [int(items[1]) for items in plan.entries if isinstance(items[1], bytes)]

    assert await labels(Limit(objects=4)) == [0, 1, 2, 3]
    sample = await labels(Limit(objects=6, seed=2))
    assert len(sample) == len(set(sample)) == 6
    assert sample == sorted(sample) != list(range(6))
    assert len(await labels(Limit(bytes=20))) == 5  # an image of 3 bytes and a label of one digit
