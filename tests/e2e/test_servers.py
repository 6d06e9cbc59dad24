"""Streams from two real S3 servers, each with its own habits, compared with the truth by hash.

SeaweedFS checks signatures and credentials and lists bare and out-of-order things that S3 would not;
moto is faithful in listings (odd keys, pages, quoted ETags) and slow.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.config import Config

from examples.demo.server import S3Server, free_ports, running_s3
from tests.kit.pipes import read_all
from tests.kit.processes import job, penstock, sidecar, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ODD_NAMES = ("a b", "a+b", "a&b<>\"'", "é✓", "a.b", "a0", "%41", "x=1?y#z")


@pytest.fixture(scope="module", params=["weed", "moto"])
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    if request.param == "weed":
        with running_s3("data") as found:
            yield found
        return
    [port] = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "Running on" in line:
                    break
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
            yield S3Server(f"http://127.0.0.1:{port}", "AKID", "secret", process.pid)
        finally:
            process.terminate()
            drain.wait()


@pytest.fixture
def client(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A plain botocore client; and the credentials in this test's environment."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 8})
    found = botocore.session.get_session().create_client("s3", endpoint_url=server.url, config=config)
    yield found
    found.close()


@pytest.fixture
def bucket(client: Any) -> str:
    name = f"b{random.randrange(10**12)}"
    client.create_bucket(Bucket=name)
    return name


def put(client: Any, bucket: str, contents: dict[str, bytes]) -> bytes:
    """Upload; return the concatenation in plan order."""
    for key, data in contents.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)
    return b"".join(contents[key] for key in sorted(contents, key=str.encode))


def test_cat_is_the_concatenation(server: S3Server, client: Any, bucket: str) -> None:
    truth = put(client, bucket, {f"train/{i:02d}": os.urandom(9_000_000 + i) for i in range(6)})
    uri = f"s3://{bucket}/train/"
    done = penstock("cat", uri, "--endpoint-url", server.url, "--path-style", text=False)
    assert done.returncode == 0, done.stderr
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(truth).digest()


def test_odd_keys_keep_their_bytes_and_their_order(server: S3Server, client: Any, bucket: str) -> None:
    truth = put(client, bucket, {f"train/{name}": name.encode() * 3 for name in ODD_NAMES})
    client.put_object(Bucket=bucket, Key="train/folder/", Body=b"")
    uri = f"s3://{bucket}/train/"
    done = penstock("cat", uri, "--endpoint-url", server.url, "--path-style", text=False)
    assert done.stdout == truth, done.stderr


def test_two_epochs_through_fifos(server: S3Server, client: Any, bucket: str, tmp_path: Path) -> None:
    truth = put(client, bucket, {f"train/{i}": os.urandom(700_000) for i in range(5)})
    with sidecar(
        write_job(tmp_path / "j.yaml", job(server.url, tmp_path / "ml", f"{bucket}/train/"))
    ) as running:
        running.wait_for("ready")
        for epoch in range(2):
            assert read_all(tmp_path / "ml" / "input" / "data" / f"train_{epoch}") == truth
        assert running.end() == 0


def test_multipart_objects_are_one_object(server: S3Server, client: Any, bucket: str) -> None:
    upload = client.create_multipart_upload(Bucket=bucket, Key="train/big")["UploadId"]
    pieces = [os.urandom(5 << 20), os.urandom(5 << 20), os.urandom(1000)]
    parts = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(
                Bucket=bucket, Key="train/big", UploadId=upload, PartNumber=number, Body=piece
            )["ETag"],
        }
        for number, piece in enumerate(pieces, 1)
    ]
    client.complete_multipart_upload(
        Bucket=bucket, Key="train/big", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    arguments = ("cat", f"s3://{bucket}/train/big", "--endpoint-url", server.url, "--path-style")
    assert penstock(*arguments, text=False).stdout == b"".join(pieces)


def test_an_object_replaced_between_epochs_fails_by_name(
    server: S3Server, client: Any, bucket: str, tmp_path: Path
) -> None:
    """Really, with If-Match on a real server: no byte of the new version is delivered."""
    truth = put(client, bucket, {f"train/{i}": os.urandom(2_000_000) for i in range(12)})
    document = job(server.url, tmp_path / "ml", f"{bucket}/train/", MemoryBudget="2MiB", RequestsInFlight=1)
    with sidecar(write_job(tmp_path / "j.yaml", document)) as running:
        running.wait_for("ready")
        with open(tmp_path / "ml" / "input" / "data" / "train_0", "rb", buffering=0) as reader:
            got = reader.read(1000)
            client.put_object(Bucket=bucket, Key="train/9", Body=os.urandom(2_000_000))
            while len(got) < 22_000_000:
                got += reader.read(1 << 20)
            assert got == truth[:22_000_000]
            failed = running.wait_for("epoch failed")
        assert "train/9" in failed["error"]
        assert "replaced" in failed["error"]
        assert running.end() == 6


@pytest.mark.parametrize(
    ("uri", "code"), [("s3://{bucket}/nothing/", 4), ("s3://no-such-bucket-here/train/", 4)]
)
def test_missing_things(server: S3Server, client: Any, bucket: str, uri: str, code: int) -> None:
    client.put_object(Bucket=bucket, Key="train/x", Body=b"x")
    done = penstock("cat", uri.format(bucket=bucket), "--endpoint-url", server.url, "--path-style")
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("server", ["weed"], indirect=True)  # moto takes any credentials
@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_denied(
    server: S3Server, client: Any, bucket: str, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    client.put_object(Bucket=bucket, Key="train/x", Body=b"x")
    monkeypatch.setenv(wrong, "WRONG")
    done = penstock("cat", f"s3://{bucket}/train/", "--endpoint-url", server.url, "--path-style")
    assert done.returncode == 3
    assert "WRONG" not in done.stderr
