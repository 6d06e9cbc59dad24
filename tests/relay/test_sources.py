"""What is planned of the objects below several prefixes: globs, limits, samples, and what they cost."""

from __future__ import annotations

import pytest

from streamer.errors import ConfigError, Missing
from streamer.plan import Arrangement, Plan, S3Uri, Shard
from streamer.plan.selection import Limit, Selection
from streamer.s3.pages.pages import PageSource
from streamer.s3.pages.sources import Sources
from streamer.s3.pages.validation import PlanMemory
from tests.kit import stub as kit
from tests.kit.harness import PagesFrom
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials", "small_pages")

URI = S3Uri("b", "d/")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten keys a page instead of a thousand."""
    monkeypatch.setattr(kit, "PAGE", 10)


def keys_in(plan: Plan) -> list[str]:
    return [ref.key for ref in plan.refs(0)]


def put(stub: S3Stub, *keys: str, bucket: str = "b") -> None:
    """Put an object of three bytes for each key."""
    stub.objects |= {f"{bucket}/{key}": b"abc" for key in keys}


async def test_globs_decide_before_an_object_takes_memory(stub: S3Stub, pages_from: PagesFrom) -> None:
    put(stub, *(f"d/{n:02}.{kind}" for n in range(40) for kind in ("tar", "idx")))
    memory = PlanMemory()
    selection = Selection(include=("*.tar",), exclude=("3*",))
    async with pages_from(stub) as pages:
        plan = await Sources(pages, [URI], selection=selection, memory=memory).plan()
    assert keys_in(plan) == [f"d/{n:02}.tar" for n in range(30)]
    assert memory.objects == 30


@pytest.mark.parametrize("limit", [Limit(objects=15), Limit(bytes=45), Limit(bytes=47)])
async def test_a_limit_ends_the_listing(stub: S3Stub, pages_from: PagesFrom, limit: Limit) -> None:
    """The page that has the last object is the last one requested, or the one after it."""
    put(stub, *(f"d/{n:03}" for n in range(100)))
    memory = PlanMemory()
    async with pages_from(stub) as pages:
        plan = await Sources(pages, [URI], selection=Selection(limit=limit), memory=memory).plan()
    assert keys_in(plan) == [f"d/{n:03}" for n in range(15)]
    assert len(stub.listings) == 2
    assert memory.objects == 15


async def test_a_limit_ends_before_the_next_prefix(stub: S3Stub, pages_from: PagesFrom) -> None:
    put(stub, "d/1", "d/2")
    async with pages_from(stub) as pages:
        plan = await Sources(
            pages, [URI, S3Uri("b", "none/")], selection=Selection(limit=Limit(objects=2))
        ).plan()
    assert keys_in(plan) == ["d/1", "d/2"]
    assert stub.listings == ["d/"]


@pytest.mark.parametrize("selection", [Selection(), Selection(limit=Limit(objects=4))])
async def test_several_prefixes_follow_each_other_in_the_order_given(
    stub: S3Stub, pages_from: PagesFrom, selection: Selection
) -> None:
    put(stub, "z/2", "z/1", "a/1", "a/2")
    put(stub, "m/1", bucket="other")
    uris = [S3Uri("b", "z/"), S3Uri("other", "m/"), S3Uri("b", "a/")]
    async with pages_from(stub) as pages:
        plan = await Sources(pages, uris, selection=selection).plan()
    found = [(ref.bucket, ref.key) for ref in plan.refs(0)]
    assert found == [("b", "z/1"), ("b", "z/2"), ("other", "m/1"), ("b", "a/1"), ("b", "a/2")][: len(found)]
    assert len(found) == (4 if selection.limit else 5)
    assert plan.base is None


@pytest.mark.parametrize("limit", [None, Limit(objects=13), Limit(objects=13, seed=5)])
async def test_a_server_s_own_order_changes_nothing(
    stub: S3Stub, pages_from: PagesFrom, limit: Limit | None
) -> None:
    put(stub, *(f"d/{n:02}" for n in range(35)))
    selection = Selection(exclude=("00", "01"), limit=limit)
    async with pages_from(stub) as pages:
        expected = await Sources(pages, [URI], selection=selection).plan()
        stub.unsorted_pages = True
        plan = await Sources(pages, [URI], selection=selection, memory=(memory := PlanMemory())).plan()
    assert keys_in(plan) == keys_in(expected)
    assert plan.digest == expected.digest
    assert memory.objects == len(plan.entries)


async def test_a_sample_is_equal_on_all_hosts_and_dealt_over_them(
    stub: S3Stub, pages_from: PagesFrom
) -> None:
    put(stub, *(f"d/{n:02}" for n in range(60)))
    memory = PlanMemory()

    async def sample(pages: PageSource, seed: int, shard: Shard | None = None) -> list[str]:
        selection = Selection(limit=Limit(objects=20, seed=seed))
        arrangement = Arrangement(shard=shard or Shard())
        return keys_in(await Sources(pages, [URI], arrangement, selection, memory=memory).plan())

    async with pages_from(stub) as pages:
        whole = await sample(pages, 1)
        assert memory.objects == 20
        assert len(whole) == 20
        assert whole == sorted(whole)
        assert whole != await sample(pages, 2)
        hosts = [await sample(pages, 1, Shard(index, 3)) for index in range(3)]
    assert sorted(key for host in hosts for key in host) == whole


async def test_a_sample_of_more_than_there_is_is_everything(stub: S3Stub, pages_from: PagesFrom) -> None:
    put(stub, *(f"d/{n:02}" for n in range(25)))
    async with pages_from(stub) as pages:
        everything = await Sources(pages, [URI]).plan()
        sample = await Sources(pages, [URI], selection=Selection(limit=Limit(bytes=10**9, seed=0))).plan()
    assert sample.digest == everything.digest


async def test_a_prefix_without_an_object_is_an_error_that_names_it(
    stub: S3Stub, pages_from: PagesFrom
) -> None:
    put(stub, "d/1")
    memory = PlanMemory()
    async with pages_from(stub) as pages:
        with pytest.raises(Missing, match=r"no object matches this prefix.*s3://b/gone/"):
            await Sources(pages, [URI, S3Uri("b", "gone/")], memory=memory).plan()
    assert memory.objects == 0


async def test_a_selection_of_nothing_is_an_error_that_shows_what_globs_see(
    stub: S3Stub, pages_from: PagesFrom
) -> None:
    put(stub, "d/x/1.tar")
    async with pages_from(stub) as pages:
        with pytest.raises(Missing, match=r"leave out every object.*'x/1.tar'.*s3://b/d/"):
            await Sources(pages, [URI], selection=Selection(include=("d/*",))).plan()


@pytest.mark.parametrize("seed", [None, 3])
async def test_a_limit_below_the_first_object_is_an_error_that_names_it(
    stub: S3Stub, pages_from: PagesFrom, seed: int | None
) -> None:
    put(stub, "d/1")
    async with pages_from(stub) as pages:
        with pytest.raises(ConfigError, match=r"limit of 2 B.* s3://b/d/1, has 3 bytes"):
            await Sources(pages, [URI], selection=Selection(limit=Limit(bytes=2, seed=seed))).plan()


@pytest.mark.parametrize("selection", [Selection(), Selection(limit=Limit(objects=9))])
async def test_an_exact_key_is_that_object(stub: S3Stub, pages_from: PagesFrom, selection: Selection) -> None:
    put(stub, "d/1", "d/12", "d/13")
    uris = [S3Uri("b", "d/1"), S3Uri("b", "d/1")]
    async with pages_from(stub) as pages:
        plan = await Sources(pages, uris, selection=selection, exact=True).plan()
        assert keys_in(plan) == ["d/1", "d/1"]
        with pytest.raises(Missing, match="leave out every object"):
            await Sources(pages, uris, selection=Selection(exclude=("1",)), exact=True).plan()


async def test_objects_that_may_not_be_data_are_found_anywhere(stub: S3Stub, pages_from: PagesFrom) -> None:
    """Empty ones add nothing to a stream, unless each object becomes a record."""
    put(stub, *(f"d/{n:02}" for n in range(25)), "d/.cache/x", "d/y/.part-0.crc", "d/z.idx", "d/zz.index")
    stub.objects["b/d/_SUCCESS"] = b""
    async with pages_from(stub) as pages:
        plan = await Sources(pages, [URI]).plan()
        wrapped = await Sources(pages, [URI], Arrangement(wrap=True)).plan()
        excluded = await Sources(
            pages, [URI], selection=Selection(exclude=(".*/", "*.crc", "*.idx", "*.index"))
        ).plan()
        asked_for = await Sources(pages, [URI], selection=Selection(include=("**",))).plan()
        exact = await Sources(pages, [S3Uri("b", "d/z.idx")]).plan()
    assert plan.strays is not None
    assert plan.strays.keys == ["d/.cache/x", "d/y/.part-0.crc", "d/z.idx"]
    assert plan.strays.globs == [".*/", "*.crc", "*.idx", "*.index"]
    assert wrapped.strays is not None
    assert wrapped.strays.keys == ["d/.cache/x", "d/_SUCCESS", "d/y/.part-0.crc"]
    assert excluded.strays is not None
    assert excluded.strays.keys == []
    assert asked_for.strays is None
    assert exact.strays is not None
    assert exact.strays.keys == []


async def test_objects_that_are_not_streamed_are_not_warned_of(stub: S3Stub, pages_from: PagesFrom) -> None:
    """Those after a limit, outside of a sample, or beside an object that a URI of `cat` names."""
    put(stub, "d/1", "d/1.crc", "d/2", "d/3.crc", "d/4")
    async with pages_from(stub) as pages:
        first = await Sources(pages, [URI], selection=Selection(limit=Limit(objects=2))).plan()
        sample = await Sources(pages, [URI], selection=Selection(limit=Limit(objects=1, seed=0))).plan()
        exact = await Sources(pages, [S3Uri("b", "d/1")], exact=True).plan()
    assert first.strays is not None
    assert first.strays.keys == ["d/1.crc"]
    assert sample.strays is not None
    assert sample.strays.keys == [key for key in keys_in(sample) if key.endswith(".crc")]
    assert exact.strays is not None
    assert exact.strays.keys == []
