"""Whole objects against the checksums that S3 keeps: a wrong bit is an error by name, and no end."""

from __future__ import annotations

import base64
import functools
import gzip
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums

from streamer.errors import ConfigError
from streamer.plan import Arrangement, ObjectRef, Part, Plan, S3Uri, Segment
from streamer.relay.staging.taps import ChecksumTap
from streamer.s3.checksums import StoredChecksums, stored_sum
from streamer.s3.client.session import Clients
from tests.kit.faults import flips
from tests.kit.harness import RunChannel, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub, cut_after, fails
from tests.relay.test_changes import failure

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SIZES = [120_000, 1, 0, 50_000, 77_777]
WIDTH = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}


@pytest.fixture(params=["aiobotocore", "buffered"])
def run(request: pytest.FixtureRequest) -> RunChannel:
    return functools.partial(running_channel, transport=request.param, check=True)


def keep(stub: S3Stub, algorithm: str, **more: str) -> None:
    """Let the server keep this CRC of every object."""
    for name, data in stub.objects.items():
        value = zlib.crc32(data) if algorithm == "crc32" else getattr(checksums, algorithm)(data)
        stated = base64.b64encode(value.to_bytes(WIDTH[algorithm], "big")).decode()
        stub.checksums[name] = {f"x-amz-checksum-{algorithm}": stated} | more


def test_the_names_are_those_of_the_catalogue() -> None:
    """Check values of the CRC RevEng catalogue, for the text 123456789."""
    text = b"123456789"
    found = checksums.crc32(text), checksums.crc32c(text), checksums.crc64nvme(text)
    assert found == (0xCBF43926, 0xE3069283, 0xAE8B14860A799888)


@pytest.mark.parametrize("algorithm", sorted(WIDTH))
async def test_every_kind_is_compared_in_any_number_of_parts(
    run: RunChannel, stub: S3Stub, tmp_path: Path, algorithm: str
) -> None:
    """One HEAD for each object of several parts, though it is streamed twice; the others' GETs bring it."""
    truth = fill(stub, SIZES)
    keep(stub, algorithm, **{"x-amz-checksum-type": "FULL_OBJECT"})
    stub.script(*[cut_after(7000)] * 5, fails(503, "SlowDown"))
    async with run(stub, tmp_path) as running:
        for epoch in (0, 1):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
        await eventually(lambda: len(running.states) == 2)
        assert running.channel.statistics().counts["checked"] == {"verified": 8}
        assert [trailer.state for trailer in running.states] == ["complete"] * 2
    assert stub.head_count == sum(size > 50_000 for size in SIZES) + SIZES.count(0)


@pytest.mark.parametrize("algorithm", sorted(WIDTH))
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
async def test_a_wrong_bit_fails_the_epoch_with_both_sums(
    run: RunChannel, stub: S3Stub, tmp_path: Path, algorithm: str, at: float
) -> None:
    truth = fill(stub, SIZES)
    keep(stub, algorithm)
    stub.script(flips(at), key="b/data/0003")
    async with run(stub, tmp_path) as running:
        got, error = await failure(running)
        assert running.channel.statistics().counts["checked"] == {"verified": 2, "mismatch": 1}
    assert len(got) == sum(SIZES[:4])
    assert got[: sum(SIZES[:3])] == truth[: sum(SIZES[:3])]
    assert "s3://b/data/0003" in error
    stored = base64.b64decode(stub.checksums["b/data/0003"][f"x-amz-checksum-{algorithm}"]).hex()
    assert f"S3 stores {stored}" in error
    assert algorithm.upper() in error


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "COMPOSITE"},
        {"x-amz-checksum-crc32": "AAAAAA==-3"},
        {"x-amz-checksum-sha256": "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="},
    ],
    ids=["none", "composite", "composite by its dash", "of a kind that cannot be combined"],
)
async def test_where_nothing_can_be_compared_it_is_counted(
    run: RunChannel, stub: S3Stub, tmp_path: Path, stated: dict[str, str]
) -> None:
    truth = fill(stub, SIZES)
    stub.checksums = dict.fromkeys(stub.objects, stated)
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        await eventually(lambda: running.states)
        assert running.channel.statistics().counts["checked"] == {"unverifiable": 4}


async def test_a_compressed_object_is_compared_as_it_is_stored(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    content = [random.Random(i).randbytes(90_000) for i in range(3)]
    stub.objects = {f"b/data/{i}": gzip.compress(data) for i, data in enumerate(content)}
    keep(stub, "crc64nvme")

    async with run(stub, tmp_path, arrangement=Arrangement(inflate=True), inflate=True) as running:
        assert await off_loop(read_all, running.fifo(0)) == b"".join(content)
        await eventually(lambda: running.states)
        assert running.channel.statistics().counts["checked"] == {"verified": 3}


async def test_what_is_changed_before_its_sum_is_asked_for_fails(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """The sum that would be compared is of another version than that which is streamed."""
    truth = fill(stub, SIZES)
    keep(stub, "crc32c")

    async def make(clients: Clients) -> Plan:
        found = await plan_prefix(clients, S3Uri("b", "data/"))
        stub.objects["b/data/0003"] = b"another" * 20_000
        keep(stub, "crc32c")
        return found

    async with run(stub, tmp_path, make_plan=make) as running:
        got, error = await failure(running)
        assert got == truth[: sum(SIZES[:3])]
        assert "the object was replaced after it was listed" in error
        assert "s3://b/data/0003" in error
        assert "mismatch" not in running.channel.statistics().counts["checked"]


async def test_bytes_that_stay_in_the_kernel_cannot_be_summed(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES)
    with pytest.raises(ConfigError, match="checksums are computed in memory"):
        async with running_channel(stub, tmp_path, transport="splice", check=True):
            pass


def test_what_is_no_base64_is_no_sum() -> None:
    assert stored_sum({"ChecksumCRC32": "%%%"}) is None


class OneChecksum:
    """A client whose objects have one checksum."""

    async def send(self, *_: object, **_named: str) -> dict[str, Any]:
        crc = base64.b64encode(zlib.crc32(b"abcd").to_bytes(4, "big")).decode()
        return {"ETag": '"e"', "ResponseMetadata": {"HTTPHeaders": {"x-amz-checksum-crc32": crc}}}


async def test_an_object_that_is_continued_in_its_middle_is_not_compared() -> None:
    """What an earlier sidecar delivered of it was summed there; the next object is whole again."""
    reported = []
    checksums = StoredChecksums(OneChecksum(), None)
    tap = ChecksumTap(checksums, lambda ref, outcome: reported.append((ref.key, outcome)))
    refs = [ObjectRef("b", key, 4, "e") for key in "xy"]
    for ref, start, data in ((refs[0], 2, b"cd"), (refs[1], 0, b"ab"), (refs[1], 2, b"cd")):
        each = Segment(ref, start, start + len(data))
        part = Part.of(0, start, [each])
        await tap.before(part, 1)
        for byte in data:
            tap.see(each, memoryview(bytes([byte])))
        tap.delivered(part)
    assert reported == [("x", "unverifiable"), ("y", "verified")]
