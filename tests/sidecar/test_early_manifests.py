"""A sidecar that streams the first objects of a manifest while it looks for the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar.process.exits import Exit
from tests.kit import stub as kit
from tests.kit.pipes import read_all
from tests.kit.processes import Sidecar, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer

COUNT = 18_000
"""Rows of more than two blocks."""
REPEATED = 9
"""Rows that name one object, which costs one HEAD if it is empty."""
EVERY = 100
"""Distance of the objects with content; the others cost no GET."""
GATE = "data/00833.bin"
"""Pages that begin after this key are answered once the stub is released."""


def key(number: int) -> str:
    """The key of a row."""
    return f"data/{number // REPEATED:05}.bin"


@pytest.fixture
def truth(stub: S3Stub) -> list[bytes]:
    """The contents of the objects, in the order of the manifest."""
    objects = [number // REPEATED for number in range(COUNT)]
    contents = [f"object {n}\n".encode() if n % EVERY == 5 else b"" for n in objects]
    stub.objects |= {f"b/{key(number)}": data for number, data in enumerate(contents)}
    return contents


@pytest.fixture
def gated(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = kit.S3Stub.answer_listing

    async def after_release(self: S3Stub, request: web.Request, bucket: str) -> web.Response:
        if request.query.get("start-after", "") > GATE:
            await self.released.wait()
        return await answer(self, request, bucket)

    monkeypatch.setattr(kit.S3Stub, "answer_listing", after_release)


@pytest.fixture(params=["ManifestFile", "AugmentedManifestFile"])
def document(request: pytest.FixtureRequest, stub: S3Stub, tmp_path: Path) -> dict[str, Any]:
    """The job of a channel with a manifest of all objects."""
    keys = [key(number) for number in range(COUNT)]
    document = job(stub.url, tmp_path / "ml", "b/train/")
    source = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
    source |= {"S3DataType": request.param, "S3Uri": "s3://b/manifest"}
    if request.param == "ManifestFile":
        text = json.dumps([{"prefix": "s3://b/"}, *keys])
    else:
        source["AttributeNames"] = ["x-ref"]
        text = "\n".join(json.dumps({"x-ref": f"s3://b/{each}"}) for each in keys)
    stub.objects["b/manifest"] = text.encode()
    return document


@pytest.fixture
def serve(document: dict[str, Any], tmp_path: Path) -> Callable[[], Any]:
    @contextlib.contextmanager
    def start() -> Iterator[Sidecar]:
        with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
            running.wait_for("ready")
            yield running

    return start


@pytest.mark.usefixtures("gated")
def test_the_first_rows_are_read_while_later_ones_are_looked_for(
    stub: S3Stub, truth: list[bytes], serve: Any, tmp_path: Path
) -> None:
    data = tmp_path / "ml" / "input" / "data"
    with serve() as running:
        with open(data / "train_0", "rb", buffering=0) as file:
            first = b"".join(truth[:7000])
            got = b""
            while len(got) < len(first):
                got += file.read(len(first) - len(got))
            assert got == first
            assert running.wait_for("listing goes on")["objects"] < COUNT
            assert not [each for each in running.events if each["event"] == "planned"]
            stub.release()
            assert got + file.readall() == b"".join(truth)
        assert running.wait_for("planned")["objects"] == COUNT
        trailer = published_trailer(data, "train", 0)
        assert (trailer.state, trailer.objects) == ("complete", COUNT)
        assert read_all(data / "train_1") == b"".join(truth)
        assert running.end() == 0
    empty = {key(number) for number, content in enumerate(truth) if not content}
    # One is compared with the listing, and two blocks end between rows of one object.
    assert stub.head_count <= len(empty) + 3


@pytest.mark.usefixtures("gated")
def test_a_later_row_without_an_object_fails_the_epoch(
    stub: S3Stub, truth: list[bytes], serve: Any, tmp_path: Path
) -> None:
    """The stream has begun, so it cannot fail the start."""
    del stub.objects[f"b/{key(COUNT - 1)}"]
    with serve() as running:
        with open(tmp_path / "ml" / "input" / "data" / "train_0", "rb", buffering=0) as file:
            assert file.read(len(truth[5 * REPEATED])) == truth[5 * REPEATED]
            stub.release()
            failed = running.wait_for("listing failed")
            row = COUNT - REPEATED + (1 if "line" in failed["error"] else 2)
            assert f" {row}: no such object" in failed["error"]
            running.wait_for("epoch failed")
        assert running.end() == Exit.MISSING


@pytest.mark.parametrize("document", ["ManifestFile"], indirect=True)
def test_a_mistake_in_a_short_manifest_fails_the_start(
    stub: S3Stub, document: dict[str, Any], tmp_path: Path
) -> None:
    """Up to 128 objects are looked for at once, and all are found before the first one is streamed."""
    keys = [f"data/{number:05}.bin" for number in range(101)]
    stub.objects |= {f"b/{each}": b"x" for each in keys[:100]}
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/"}, *keys]).encode()
    done = penstock("run", "-c", write_job(tmp_path / "job.yaml", document))
    assert done.returncode == Exit.MISSING
    assert "entry 102: no such object" in done.stderr
    assert '"ready"' not in done.stderr
