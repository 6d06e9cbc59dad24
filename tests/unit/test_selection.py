"""Selection: globs against a matcher that tries everything, limits and samples against their definitions."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.plan import Entries, ObjectRef, Plan
from streamer.plan.selection import Limit, Selection, Selector
from streamer.plan.split import Split, parse_folds


def selects(glob: str, key: str, *, prefix: str = "") -> bool:
    return Selection(include=(glob,)).keys(prefix)(prefix + key)


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("*.tar", ["a.tar", "a/b/c.tar", ".tar"], ["a.tar/x", "a.tar.gz", "a.TAR"]),
        ("2024/*.tar", ["2024/a.tar"], ["x/2024/a.tar", "2024/b/a.tar", "a.tar"]),
        ("/*.tar", ["a.tar"], ["x/a.tar"]),
        (
            "_temporary/",
            ["_temporary/0/x", "a/_temporary/x"],
            ["_temporary", "a/_temporary", "x_temporary/x"],
        ),
        ("/a/", ["a/x", "a/b/c"], ["b/a/x", "a"]),
        ("a/b/", ["a/b/c/d"], ["x/a/b/c", "a/bc/d"]),
        (".*/", [".cache/x", "a/.cache/b/x"], [".cache", "a.b/x"]),
        ("**", ["a", "a/b", ""], []),
        ("**/x", ["x", "a/b/x"], ["ax", "x/a"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab/c"]),
        ("a/**/b", ["a/b", "a/x/y/b", "a//b"], ["a/xb", "ab", "x/a/b"]),
        ("**/a/*/b", ["a/a/b", "a/a/c/b", "x/a/y/b"], ["a/b"]),
        ("a?c", ["abc", "x/abc"], ["ac", "a/c"]),
        ("[a-c]?.[!x]", ["b1.y"], ["d1.y", "b1.x"]),
        ("a[!x]b/c", ["ayb/c"], ["a/b/c"]),
        (r"\*\[\{\\", [r"*[{\ ".strip()], ["a[{"]),
        ("[]!^]", ["]", "!", "^"], ["a"]),
        ("a b\nc", ["a b\nc"], ["a b"]),
    ],
)
def test_globs_select_by_their_rules(glob: str, yes: list[str], no: list[str]) -> None:
    assert [key for key in yes if not selects(glob, key)] == []
    assert [key for key in no if selects(glob, key)] == []


@pytest.mark.parametrize(
    ("glob", "words"),
    [
        ("", "names nothing"),
        ("/", "names nothing"),
        ("s3://b/train/*.tar", "write it without bucket and prefix"),
        ("!*.tar", "put it into Exclude"),
        ("*.{jpg,png}", "one glob for each alternative"),
        ("a[b", "a [ has no ]"),
        ("[a/b]", "cannot hold a slash"),
        ("[z-a]", "write a-z"),
        (r"[\]]", "write a ] as its first character"),
        ("[[:digit:]]", "digits as 0-9"),
        ("a\\", "ends in a backslash"),
        ("**.tar", "as in **/*.tar"),
        ("a/b**/c", "as in **/*.tar"),
        ("x" * 1025, "more than 1024 characters"),
    ],
)
def test_a_glob_that_breaks_a_rule_is_refused(glob: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Selection(exclude=(glob,))
    assert words in str(refused.value)


def reference(glob: str, key: str) -> bool:
    """The rules of globs, by trying every way; for globs of letters, slashes, `*` and `?`."""
    folder, anchored = glob.endswith("/"), "/" in glob[:-1]
    components = glob.strip("/").split("/")
    if not anchored and not folder:
        return _name(components[0], key.rpartition("/")[2])
    if not anchored:
        components = ["**", *components]
    if folder:
        components = [*components, "**"]
    return _path(components, key.split("/"))


def _path(globs: list[str], names: list[str]) -> bool:
    if not globs:
        return not names
    if globs[0] == "**":
        if len(globs) == 1:
            return bool(names)
        return any(_path(globs[1:], names[start:]) for start in range(len(names)))
    return bool(names) and _name(globs[0], names[0]) and _path(globs[1:], names[1:])


def _name(glob: str, name: str) -> bool:
    if not glob:
        return not name
    if glob[0] == "*":
        return any(_name(glob[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and glob[0] in ("?", name[0]) and _name(glob[1:], name[1:])


names = st.text("ab", min_size=1, max_size=4)
parts = st.lists(st.sampled_from(["a", "b", "*", "?"]), min_size=1, max_size=5).map("".join)
globs = st.builds(
    lambda front, inner, end: front + "/".join(inner) + end,
    st.sampled_from(["", "/"]),
    st.lists(st.one_of(parts.filter(lambda part: "**" not in part), st.just("**")), min_size=1, max_size=6),
    st.sampled_from(["", "/"]),
)


@given(globs, st.lists(names, min_size=1, max_size=7).map("/".join))
def test_a_glob_selects_what_trying_every_way_selects(glob: str, key: str) -> None:
    assert selects(glob, key) == reference(glob, key)


def test_a_glob_is_compared_with_the_key_after_the_last_slash_of_the_prefix() -> None:
    assert selects("part-*/x", "part-1/x", prefix="data/train/")
    keys = Selection(include=("part-1/x",)).keys("data/part-")
    assert keys("data/part-1/x")
    assert not keys("data/part-2/x")
    assert (keys.left_out, keys.example) == (1, "part-2/x")


def test_exclude_wins_over_include() -> None:
    keys = Selection(include=("*.tar", "*.txt"), exclude=("b*",)).keys("")
    assert [key for key in ("a.tar", "b.tar", "a.txt", "a.jpg") if keys(key)] == ["a.tar", "a.txt"]


@pytest.mark.parametrize("limit", [{}, {"objects": 1, "bytes": 1}, {"objects": 0}, {"bytes": -1}])
def test_a_limit_is_of_objects_or_of_bytes(limit: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="of objects or of bytes"):
        Limit(**limit)


sizes = st.lists(st.integers(0, 100), max_size=60)
limits = st.one_of(
    st.builds(Limit, objects=st.integers(1, 70)),
    st.builds(Limit, bytes=st.integers(1, 2000)),
)
seeds = st.integers(-(2**63), 2**63 - 1)


def some(found: list[int]) -> list[ObjectRef]:
    return [ObjectRef("b", f"k{index:05}", size, "e") for index, size in enumerate(found)]


def run(refs: list[ObjectRef], limit: Limit, cuts: list[int]) -> list[ObjectRef]:
    """What is selected of the objects, which come in runs that end at these positions."""
    selector, selected, start = Selector(limit, Entries), Entries(), 0
    for end in [*sorted(cuts), len(refs)]:
        if selector.full:
            break
        selected.extend(selector.take(Plan.of(refs[start:end]).entries))
        start = max(start, end)
    selected.extend(selector.finish())
    return [item for items in selected for item in items if isinstance(item, ObjectRef)]


def selected(refs: list[ObjectRef], limit: Limit, cuts: list[int]) -> list[ObjectRef]:
    """The entries that the limit takes; nothing, if the first object is refused as too large."""
    try:
        return run(refs, limit, cuts)
    except ConfigError:
        return []


def within(refs: list[ObjectRef], limit: Limit) -> list[ObjectRef]:
    """The first objects that fit the limit together."""
    if limit.objects is not None:
        return refs[: limit.objects]
    fits = [
        count for count in range(len(refs) + 1) if sum(r.size for r in refs[:count]) <= (limit.bytes or 0)
    ]
    return refs[: max(fits)]


@given(sizes, limits, st.lists(st.integers(0, 60), max_size=5))
def test_a_limit_takes_the_first_objects_that_fit_whole(
    found: list[int], limit: Limit, cuts: list[int]
) -> None:
    refs = some(found)
    assert selected(refs, limit, cuts) == within(refs, limit)


@given(sizes, limits, seeds, st.lists(st.integers(0, 60), max_size=5))
def test_a_sample_is_of_the_smallest_numbers_in_plan_order(
    found: list[int], limit: Limit, seed: int, cuts: list[int]
) -> None:
    """docs/explanation/semantics.md specifies it; the runs in which entries come change nothing."""

    def drawn(ref: ObjectRef) -> bytes:
        key = seed.to_bytes(8, "little", signed=True)
        return hashlib.blake2b(f"{ref.bucket}/{ref.key}".encode(), digest_size=8, key=key).digest()

    refs = some(found)
    sample = within(sorted(refs, key=drawn), limit)
    limited = Limit(objects=limit.objects, bytes=limit.bytes, seed=seed)
    assert selected(refs, limited, cuts) == [ref for ref in refs if ref in sample]


def test_a_sample_of_a_long_listing_keeps_few_entries_in_memory() -> None:
    """Entries are dropped while the listing goes on, and the sample is the same."""
    refs = some([1] * 50_000)
    limit = Limit(objects=100, seed=7)
    selector = Selector(limit, Entries)
    for start in range(0, len(refs), 1000):
        selector.take(Plan.of(refs[start : start + 1000]).entries)
        assert selector.kept <= 2 * 100 + 10_000
    keys = [items[0] for items in selector.finish()]
    assert keys == run(refs, limit, [])
    assert len(keys) == 100


def test_a_limit_is_full_as_soon_as_no_further_entry_fits() -> None:
    selector = Selector(Limit(objects=3), Entries)
    assert len(selector.take(Plan.of(some([1, 1])).entries)) == 2
    assert not selector.full
    assert len(selector.take(Plan.of(some([1])).entries)) == 1
    assert selector.full


def test_lines_of_a_manifest_are_drawn_by_number() -> None:
    """Equal lines draw different numbers."""
    selector = Selector(Limit(objects=5, seed=1), Entries, by_number=True)
    same = Entries()
    for _ in range(20):
        same.add(b"text", ObjectRef("b", "k", 1, "e"))
    selector.take(same)
    assert len(selector.finish()) == 5
    assert selects("*", "k")


def test_a_large_object_does_not_end_a_sample_before_a_later_one_is_drawn() -> None:
    """The listing is long enough that the sample is cut in the middle, when nothing fits yet."""
    limit = Limit(bytes=10, seed=0)
    refs = [ObjectRef("b", f"k{index:05}", 11, "e") for index in range(11_000)]
    drawn = {
        ref.key: hashlib.blake2b(f"b/{ref.key}".encode(), digest_size=8, key=bytes(8)).digest()
        for ref in refs
    }
    last = next(
        ref
        for ref in (ObjectRef("b", f"z{index:06}", 10, "e") for index in range(1_000_000))
        if hashlib.blake2b(f"b/{ref.key}".encode(), digest_size=8, key=bytes(8)).digest()
        < min(drawn.values())
    )
    assert run([*refs, last], limit, [10_500]) == [last]
    with pytest.raises(ConfigError, match="no object is cut"):
        run(refs, limit, [10_500])


keys = st.lists(st.text(max_size=12), unique=True, max_size=60)


@given(keys, st.integers(2, 12), st.data(), seeds)
def test_complementary_folds_are_disjoint_and_together_whole(
    found: list[str], of: int, data: st.DataObject, seed: int
) -> None:
    """Also below several prefixes, whose filters are apart."""
    taken = data.draw(st.sets(st.integers(0, of - 1)))
    selections = [
        Selection(split=Split(of, tuple(range(fold, fold + 1) for fold in sorted(folds)), seed))
        for folds in (taken, {*range(of)} - taken)
    ]
    for prefix in ("", "a/"):
        one, other = ({key for key in found if each.keys(prefix)(prefix + key)} for each in selections)
        assert one & other == set()
        assert one | other == set(found)


@given(st.text(max_size=20), st.integers(2, 1000), seeds)
def test_a_fold_depends_on_key_seed_and_number_alone(key: str, of: int, seed: int) -> None:
    """docs/explanation/semantics.md specifies it; so no other key can move an object."""
    hashed = hashlib.blake2b(
        f"split {key}".encode(), digest_size=8, key=seed.to_bytes(8, "little", signed=True)
    )
    fold = int.from_bytes(hashed.digest(), "big") * of // 2**64
    assert Split(of, (range(of),), seed).fold(key) == fold
    assert Split(of, (range(fold, fold + 1),), seed).takes(key)
    assert not Split(of, (range(fold), range(fold + 1, of)), seed).takes(key)


def test_the_example_of_the_page_is_what_a_split_computes() -> None:
    split = Split(100, (range(99),))
    assert [split.fold(key) for key in ("train/a.tar", "train/b.tar", "train/c.tar")] == [39, 43, 34]
    assert Split(100, (range(99),), 7).fold("train/a.tar") == 95


def test_folds_have_equal_shares_of_many_keys() -> None:
    split, counts = Split(10, (range(10),)), [0] * 10
    for number in range(20_000):
        counts[split.fold(f"train/{number:06}.jpg")] += 1
    assert 1800 < min(counts) <= max(counts) < 2200


def test_folds_of_a_multiple_divide_each_fold() -> None:
    """So a holdout set can be taken from a fold, and `Of` be refined."""
    coarse, fine = Split(10, (range(10),)), Split(100, (range(100),))
    for number in range(500):
        assert fine.fold(str(number)) // 10 == coarse.fold(str(number))


@pytest.mark.parametrize(
    ("text", "folds"),
    [("0-98", [range(99)]), ("7", [range(7, 8)]), ("5-6 , 0 - 2,9", [range(3), range(5, 7), range(9, 10)])],
)
def test_folds_are_numbers_and_ranges(text: str, folds: list[range]) -> None:
    assert [*parse_folds(text, 100)] == folds


@pytest.mark.parametrize("text", ["", ",", "-1", "1-", "1-2-3", "a", "0,,1", "\u0661", "9999999999", "0x1"])
def test_other_texts_are_no_folds(text: str) -> None:
    with pytest.raises(ConfigError, match="names no folds"):
        parse_folds(text, 100)


def test_a_split_that_leaves_nothing_says_so() -> None:
    keys = Selection(include=("*.tar",), split=Split(100, (range(1),))).keys("")
    assert not keys("x.jpg")
    assert "Include and Exclude leave out" in keys.nothing_left
    assert not keys("y.tar")
    assert "1 key is in other folds of the 100" in keys.nothing_left
