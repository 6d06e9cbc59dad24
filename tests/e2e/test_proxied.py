"""A real S3 server behind a proxy that spoils connections: signatures are checked, and no byte is wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
from botocore.config import Config

from examples.demo.server import S3Server, running_s3
from tests.kit.pipes import read_all
from tests.kit.processes import job, sidecar, write_job
from tests.kit.proxy import Line, TcpProxy, random_lines, standing_before

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_s3("data") as found:
        yield found


@pytest.fixture
def truth(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> bytes:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 8})
    client = botocore.session.get_session().create_client("s3", endpoint_url=server.url, config=config)
    contents = {f"train/{i:02d}": random.Random(i).randbytes(3_000_000 + i) for i in range(16)}
    for key, data in contents.items():
        client.put_object(Bucket="data", Key=key, Body=data)
    client.close()
    return b"".join(contents[key] for key in sorted(contents))


@pytest.fixture
def proxy(server: S3Server) -> Iterator[TcpProxy]:
    with standing_before(server.url) as found:
        yield found


@pytest.mark.parametrize("transport", ["aiobotocore", "buffered", "splice"])
def test_connections_that_break_in_every_way(
    server: S3Server, truth: bytes, proxy: TcpProxy, tmp_path: Path, transport: str
) -> None:
    """Reset, half-closed or silent after some megabytes; two epochs, checksums compared where they can be."""
    proxy.lines = random_lines(5, share=0.4, typical=3_000_000)
    document = job(
        f"http://127.0.0.1:{proxy.port}", tmp_path / "ml", "data/train/", Transport=transport, StallTimeout=1
    )
    if transport != "splice":
        document["InputDataConfig"][0]["Penstock"] = {"Integrity": "checksum"}
    with sidecar(write_job(tmp_path / "j.yaml", document)) as running:
        running.wait_for("ready")
        for epoch in range(2):
            assert read_all(tmp_path / "ml" / "input" / "data" / f"train_{epoch}") == truth
        statistics = running.status()["channels"]["train"]
        assert sum(statistics["retries"].values()) > 0
        if transport != "splice":
            assert statistics["checked"].keys() == {"verified"}
        assert running.end() == 0


def test_an_endpoint_that_refuses_for_a_while_is_waited_for(
    server: S3Server, truth: bytes, proxy: TcpProxy, tmp_path: Path
) -> None:
    """In mid-epoch every connection is cut and every new one refused; then all is well again."""
    proxy.lines = lambda _: Line(bandwidth=30e6)
    document = job(f"http://127.0.0.1:{proxy.port}", tmp_path / "ml", "data/train/", RequestsInFlight=2)
    with sidecar(write_job(tmp_path / "j.yaml", document)) as running:
        running.wait_for("ready")
        with open(tmp_path / "ml" / "input" / "data" / "train_0", "rb", buffering=0) as reader:
            got = bytearray(os.read(reader.fileno(), 1000))
            proxy.refuse()
            proxy.cut_all()
            while running.status()["channels"]["train"]["requests"].get("transient", 0) < 3:
                pass  # each look is a request to the sidecar; the test's own time limit ends it
            proxy.accept()
            while data := os.read(reader.fileno(), 1 << 20):
                got += data
        assert got == truth
        assert running.end() == 0
