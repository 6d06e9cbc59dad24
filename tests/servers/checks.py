"""What is tried on each server, over each transport. A check raises Broken for what must never happen."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.errors import PenstockError
from streamer.readers import PipeStream
from tests.kit.processes import Sidecar, job, sidecar, write_job
from tests.servers.servers import Server

ODD_NAMES = ("a b", "a+b", "a&b<>\"'", "é✓", "a.b", "a0", "%41", "x=1?y#z", "~-_.!*()", "back\\slash")
MB = 1_000_000


class Broken(AssertionError):
    """Wrong bytes, a silent end, or an error that does not say what is wrong."""


class Told(Exception):
    """Penstock refused by name: legal where the server lacks what the check tries."""


@dataclass
class Site:
    """One server, one transport, a fresh bucket, and a directory for the job."""

    server: Server
    transport: str
    client: Any
    bucket: str
    directory: Path
    filled: bool = False
    """Whether another transport's turn has uploaded everything already."""

    def put(self, contents: dict[str, bytes]) -> bytes:
        """Upload, unless that is done; return the concatenation in plan order."""
        pending = {} if self.filled else contents
        with ThreadPoolExecutor(8) as several:
            for done in [
                several.submit(self.client.put_object, Bucket=self.bucket, Key=key, Body=data)
                for key, data in pending.items()
            ]:
                done.result()
        return b"".join(contents[key] for key in sorted(contents, key=str.encode))

    def cat(self, prefix: str) -> bytes:
        """The output of `penstock cat`; Told if it ends with an error."""
        options = [
            "--endpoint-url",
            self.server.url,
            "--path-style",
            "--transport",
            self.transport,
            "--give-up-after",
            "20",
        ]
        if self.server.ca_bundle:
            options += ["--ca-bundle", self.server.ca_bundle]
        command = [sys.executable, "-m", "sidecar", "cat", f"s3://{self.bucket}/{prefix}", *options]
        done = subprocess.run(command, capture_output=True, timeout=300, check=False)
        if done.returncode:
            raise _told(done.returncode, done.stderr.decode())
        return done.stdout

    def job(self, prefix: str, **source: object) -> str:
        document = job(self.server.url, self.directory / "ml", f"{self.bucket}/{prefix}")
        document["Penstock"] |= {"Transport": self.transport, "GiveUpAfter": 20}
        if self.server.ca_bundle:
            document["Penstock"]["Endpoint"]["CaBundle"] = self.server.ca_bundle
        [channel] = document["InputDataConfig"]
        channel["ChannelName"] = "train"
        channel["InputMode"] = source.pop("InputMode", "Pipe")
        channel["DataSource"]["S3DataSource"] |= source
        return write_job(self.directory / "job.yaml", document)

    @contextlib.contextmanager
    def running(self, prefix: str, **source: object) -> Iterator[Sidecar]:
        with sidecar(self.job(prefix, **source)) as running:
            yield running

    def fifo(self, epoch: int = 0) -> PipeStream:
        return PipeStream(self.directory / "ml/input/data" / f"train_{epoch}", timeout=60)


def _told(code: int, text: str) -> Exception:
    """An error of ours, by its exit code; a crash is Broken."""
    line = text.strip().splitlines()[-1] if text.strip() else "nothing on standard error"
    return (
        Broken(f"exit {code}: {text[-800:]}") if code == 1 or "Traceback" in text else Told(f"{code}: {line}")
    )


def _equal(got: bytes, truth: bytes) -> None:
    if hashlib.sha256(got).digest() != hashlib.sha256(truth).digest():
        raise Broken(f"{len(got)} bytes of {len(truth)}, or others")


def bodies(site: Site) -> None:
    """Six objects of 9 MB: many ranged GETs each."""
    truth = site.put({f"train/{i:02d}": random.Random(i).randbytes(9 * MB + i) for i in range(6)})
    _equal(site.cat("train/"), truth)


def odd_keys(site: Site) -> None:
    """Keys with spaces, quotes, percent signs, non-ASCII; and the mark of a folder, which is left out."""
    kept = {}
    for name in ODD_NAMES:
        try:
            site.client.put_object(Bucket=site.bucket, Key=f"train/{name}", Body=name.encode() * 3)
            kept[f"train/{name}"] = name.encode() * 3
        except Exception:  # noqa: BLE001 - the server does not take such a key
            continue
    _equal(site.cat("train/"), b"".join(kept[key] for key in sorted(kept, key=str.encode)))


def multipart(site: Site) -> None:
    """An object that was uploaded in parts, whose ETag is no MD5."""
    upload = site.client.create_multipart_upload(Bucket=site.bucket, Key="train/big")["UploadId"]
    pieces = [os.urandom(5 << 20), os.urandom(5 << 20), os.urandom(1000)]
    arguments = {"Bucket": site.bucket, "Key": "train/big", "UploadId": upload}
    parts = [
        {"PartNumber": n, "ETag": site.client.upload_part(**arguments, PartNumber=n, Body=piece)["ETag"]}
        for n, piece in enumerate(pieces, 1)
    ]
    site.client.complete_multipart_upload(**arguments, MultipartUpload={"Parts": parts})
    _equal(site.cat("train/big"), b"".join(pieces))


def versions(site: Site) -> None:
    """An older version, named in a manifest: its bytes, or a refusal; never the newest ones."""
    try:
        site.client.put_bucket_versioning(Bucket=site.bucket, VersioningConfiguration={"Status": "Enabled"})
        old = os.urandom(100_000)
        version = site.client.put_object(Bucket=site.bucket, Key="train/x", Body=old).get("VersionId", "1")
    except Exception:  # noqa: BLE001 - a server without versions, to which a manifest may still name one
        old, version = b"never there", "3HL4kqtJvjVBH40Nrjfkd"
    site.client.put_object(Bucket=site.bucket, Key="train/x", Body=os.urandom(100_000))
    manifest = json.dumps([{"prefix": f"s3://{site.bucket}/"}, f"train/x?versionId={version}"])
    site.client.put_object(Bucket=site.bucket, Key="manifest", Body=manifest.encode())
    with site.running("manifest", S3DataType="ManifestFile") as running:
        _equal(_read(site, running), old)


def many(site: Site) -> None:
    """20,000 objects: twenty pages of a listing."""
    truth = site.put({f"train/{i:05d}": b"%d\n" % i for i in range(20_000)})
    _equal(site.cat("train/"), truth)


def epochs(site: Site) -> None:
    """Two epochs through FIFOs."""
    truth = site.put({f"train/{i}": os.urandom(700_000) for i in range(5)})
    with site.running("train/") as running:
        _equal(_read(site, running), truth)
        _equal(_read(site, running, 1), truth)
        if running.end():
            raise Broken("the sidecar did not end with 0")


def files(site: Site) -> None:
    """A File channel: every object under its key, and nothing beside it."""
    contents = {f"train/a/{i}": os.urandom(300_000) for i in range(3)} | {"trainee": b"another prefix"}
    site.put(contents)
    with site.running("train/", InputMode="File") as running:
        running.wait_for("ready")
        root = site.directory / "ml/input/data/train"
        found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        if found != {f"a/{i}": contents[f"train/a/{i}"] for i in range(3)}:
            raise Broken(f"other files: {sorted(found)}")


def replaced(site: Site) -> None:
    """Replaced in mid-epoch: bytes of the listed version, then an error by name."""
    _changed(site, lambda key: site.client.put_object(Bucket=site.bucket, Key=key, Body=os.urandom(2 * MB)))


def deleted(site: Site) -> None:
    """Deleted in mid-epoch: likewise."""
    _changed(site, lambda key: site.client.delete_object(Bucket=site.bucket, Key=key))


def _changed(site: Site, change: Callable[[str], object]) -> None:
    truth = site.put({f"train/{i:02d}": random.Random(i).randbytes(2 * MB) for i in range(40)})
    with site.running("train/") as running:
        running.wait_for("ready")
        with site.fifo() as stream:
            got = bytearray(stream.read(1000))
            change("train/39")
            try:
                while data := stream.read(1 << 20):
                    got += data
            except PenstockError as error:
                if "train/39" not in str(error):
                    raise Broken(f"does not name the object: {error}") from error
            else:
                raise Broken(f"a clean end after {len(got)} of {len(truth)} bytes")
        if not truth.startswith(got) or len(got) > 39 * 2 * MB:
            raise Broken("bytes of another version")


def doctor(site: Site) -> None:
    """It says that all is well, where the stream is."""
    site.put({"train/x": os.urandom(3 * MB)})
    command = [sys.executable, "-m", "sidecar", "doctor", "-c", site.job("train/")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise Broken(f"exit {done.returncode}: {done.stdout[-1500:]}{done.stderr[-500:]}")


def _read(site: Site, running: Sidecar, epoch: int = 0) -> bytes:
    try:
        running.wait_for("ready")
    except AssertionError:  # it has ended before
        raise _told(running.wait(), str(running.events[-2])) from None
    try:
        with site.fifo(epoch) as stream:
            return stream.read()
    except PenstockError as error:
        raise Told(str(error)) from error


READ_ONLY = {"bodies", "many"}
"""Checks that upload much and change nothing: their bucket serves all transports."""
CHECKS: dict[str, Callable[[Site], None]] = {
    check.__name__: check
    for check in (bodies, odd_keys, multipart, versions, epochs, files, replaced, deleted, doctor, many)
}
