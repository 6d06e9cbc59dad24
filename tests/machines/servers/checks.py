"""What is tried on each server, over each transport. A check raises Broken for what must never happen."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.errors import PenstockError
from streamer.readers import PipeStream
from tests.kit.processes import PENSTOCK, Sidecar, job, sidecar, write_job
from tests.machines.servers.servers import Server

ODD_NAMES = ("a b", "a+b", "a&b<>\"'", "é✓", "a.b", "a0", "%41", "x=1?y#z", "~-_.!*()", "back\\slash")
MB = 1_000_000


class Broken(AssertionError):
    """Wrong bytes, a silent end, or an error that does not say what is wrong."""


class Refused(Exception):
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
        """The output of `penstock cat`; Refused if it ends with an error."""
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
            raise _error(done.returncode, done.stderr.decode())
        return done.stdout

    def job(
        self,
        prefix: str,
        *,
        url: str | None = None,
        bucket: str | None = None,
        trusting: bool = True,
        give_up_after: float = 20,
        **source: Any,
    ) -> str:
        """The path of a job file. `trusting`: whether it names the authority of the server's certificate."""
        url = url or self.server.url
        document = job(url, self.directory / "ml", f"{bucket or self.bucket}/{prefix}")
        document["Penstock"] |= {"Transport": self.transport, "GiveUpAfter": give_up_after}
        if self.server.ca_bundle and trusting and url.startswith("https"):
            document["Penstock"]["Endpoint"]["CaBundle"] = self.server.ca_bundle
        [channel] = document["InputDataConfig"]
        channel["ChannelName"] = "train"
        channel["InputMode"] = source.pop("InputMode", "Pipe")
        channel["DataSource"]["S3DataSource"] |= source
        return write_job(self.directory / "job.yaml", document)

    @contextlib.contextmanager
    def running(self, prefix: str, **source: Any) -> Iterator[Sidecar]:
        with sidecar(self.job(prefix, **source)) as running:
            yield running

    def fifo(self, epoch: int = 0) -> PipeStream:
        return PipeStream(self.directory / "ml/input/data" / f"train_{epoch}", timeout=60)


def _error(code: int, text: str) -> Exception:
    """An error of ours, by its exit code; a crash is Broken."""
    line = text.strip().splitlines()[-1] if text.strip() else "nothing on standard error"
    return (
        Broken(f"exit {code}: {text[-800:]}")
        if code == 1 or "Traceback" in text
        else Refused(f"{code}: {line}")
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
    with contextlib.suppress(Exception):
        site.client.put_object(Bucket=site.bucket, Key="train/folder/", Body=b"")
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
    """6,000 objects: more pages of a listing than Penstock takes in turn before it splits the prefix."""
    truth = site.put({f"train/{i:05d}": b"%d\n" % i for i in range(6_000)})
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
    """Its findings are what `penstock run` meets: it names no failure, and the stream is whole."""
    truth = site.put({"train/x": os.urandom(3 * MB)})
    _agree(site, site.job("train/"), truth, expected=True)


def refusals(site: Site) -> None:
    """Wrong keys, bucket, prefix, scheme, authority: `penstock run` ends with the code that doctor names."""
    truth = site.put({"train/x": os.urandom(100_000)})
    quick: dict[str, Any] = {"give_up_after": 10}  # a loaded machine takes 2 s to import a client
    _agree(site, site.job("train/", **quick), truth, AWS_SECRET_ACCESS_KEY="WRONG" * 8)
    _agree(site, site.job("train/", **quick), truth, AWS_ACCESS_KEY_ID="WRONG" * 4)
    _agree(site, site.job("train/", bucket=f"{site.bucket}-missing", **quick), truth, expected=False)
    _agree(site, site.job("missing/", **quick), truth, expected=False)
    scheme, _, rest = site.server.url.partition("://")
    other = f"{'http' if scheme == 'https' else 'https'}://{rest}"
    if site.transport != "splice":
        _agree(site, site.job("train/", url=other, **quick), truth, expected=False)
    if site.server.ca_bundle:
        _agree(site, site.job("train/", trusting=False, **quick), truth, expected=False)


def _agree(site: Site, path: str, truth: bytes, *, expected: bool | None = None, **environment: str) -> None:
    """Compare `penstock doctor` with `penstock run`. `expected`: whether the job can run, if known."""
    prefix = ["env", *(f"{name}={value}" for name, value in environment.items())]
    case = ", ".join(environment) or " ".join(Path(path).read_text().split())
    command = [*prefix, *PENSTOCK, "doctor", "--json", "-c", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    findings = json.loads(done.stdout)["findings"]
    failures = [finding for finding in findings if finding["state"] == "failure"]
    if expected is not None and expected == bool(failures):
        raise Broken(f"{case}: doctor found {failures or 'no failure'}")
    with sidecar(path, prefix=prefix) as running:
        if not failures:
            _equal(_read(site, running), truth)
            return
        try:
            code = running.wait()
        except subprocess.TimeoutExpired:
            raise Broken(f"{case}: run goes on; doctor found {failures}") from None
        error = str(running.events[-2].get("error"))
    if code != done.returncode:
        raise Broken(f"{case}: run ended with {code}, {error}; doctor with {done.returncode}, {failures}")
    # A server that waits for the rest of a request line may outlast GiveUpAfter.
    if "no answer came" not in error and _cause(failures[0]["text"]) not in error:
        raise Broken(f"{case}: run said {error}; doctor {failures[0]['text']}")


def _cause(text: str) -> str:
    """What an error says before the response of the server, which differs from request to request."""
    return re.split(r" \(|: s3://", text)[0]


def _read(site: Site, running: Sidecar, epoch: int = 0) -> bytes:
    try:
        running.wait_for("ready")
    except AssertionError:  # it has ended before
        raise _error(running.wait(), str(running.events[-2])) from None
    try:
        with site.fifo(epoch) as stream:
            return stream.read()
    except PenstockError as error:
        raise Refused(str(error)) from error


READ_ONLY = {"bodies", "many"}
"""Checks that upload much and change nothing: their bucket serves all transports."""
OVER_TLS = ("bodies", "epochs", "files", "replaced", "doctor", "refusals")
"""Checks that a server that serves HTTPS is tried with; the others differ in the requests alone."""
CHECKS: dict[str, Callable[[Site], None]] = {
    check.__name__: check
    for check in (
        bodies,
        odd_keys,
        multipart,
        versions,
        epochs,
        files,
        replaced,
        deleted,
        doctor,
        refusals,
        many,
    )
}
