"""What a server does where servers differ: each habit is one question, asked by botocore or a plain request.

The answers are rows of the table in docs/how-to/s3-compatible-servers.md. They are found anew by each run, so
a server's new version shows in the table.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import ssl
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import botocore.session
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError

from tests.machines.servers.checks import ODD_NAMES
from tests.machines.servers.servers import Server

REGION = "us-east-1"
BODY = b"0123456789" * 10
STATUS = "HTTPStatusCode"


def s3(server: Server, *, region: str = REGION, secret_key: str | None = None, **config: Any) -> Any:
    """A botocore client of the server; the default credentials are right."""
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=server.url,
        verify=server.ca_bundle,
        region_name=region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=secret_key or server.secret_key,
        config=Config(
            **{
                "s3": {"addressing_style": "path"},
                "retries": {"total_max_attempts": 4},
                "read_timeout": 20,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "max_pool_connections": 16,
            }
            | config
        ),
    )


def _code(error: ClientError) -> str:
    """Status and code of an error response."""
    status = error.response["ResponseMetadata"][STATUS]
    code = str(error.response["Error"].get("Code", ""))
    return str(status) if code in ("", str(status)) else f"{status} `{code}`"


def _get(server: Server, host: str, target: str) -> tuple[http.client.HTTPResponse, bytes]:
    """A signed GET that names `host` and asks the server's address, whatever the name resolves to."""
    address = urlsplit(server.url)
    request = AWSRequest("GET", f"{address.scheme}://{host}:{address.port}{target}")
    S3SigV4Auth(Credentials(server.access_key, server.secret_key), "s3", REGION).add_auth(request)
    connection: http.client.HTTPConnection
    if address.scheme == "https":
        context = ssl.create_default_context(cafile=server.ca_bundle)
        connection = http.client.HTTPSConnection("127.0.0.1", address.port, timeout=20, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=20)
    with contextlib.closing(connection):
        headers = dict(request.headers.items()) | {"Host": f"{host}:{address.port}"}
        connection.request("GET", target, headers=headers)
        response = connection.getresponse()
        return response, response.read()


def bucket_in_host(server: Server, bucket: str) -> str:
    """Whether the server finds a bucket in the host name, which `Endpoint.PathStyle: false` needs."""
    _, body = _get(server, f"{bucket}.localhost", "/?list-type=2&prefix=probe")
    return "yes" if b"<Key>probe</Key>" in body else "no: `PathStyle: true`"


def redirects(server: Server, bucket: str) -> str:
    """Which of the ways to name a bucket is answered with a redirect."""
    found = []
    for host, target in (
        ("127.0.0.1", f"/{bucket}?list-type=2"),
        ("127.0.0.1", f"/{bucket}/?list-type=2"),
        (f"{bucket}.localhost", "/?list-type=2"),
    ):
        response, _ = _get(server, host, target)
        if 300 <= response.status < 400:
            found.append(f"{response.status} for `{target.replace(bucket, 'BUCKET')}`")
    return ", ".join(found) or "none"


def region(server: Server, bucket: str) -> str:
    """What a request that is signed for another region is answered with."""
    with contextlib.closing(s3(server, region="eu-central-9")) as client:
        try:
            client.list_objects_v2(Bucket=bucket, Prefix="probe")
        except ClientError as error:
            return _code(error)
    return "accepted"


def wrong_secret(server: Server, bucket: str) -> str:
    """What a signature by a wrong secret key is answered with."""
    with contextlib.closing(s3(server, secret_key="WRONG" * 8)) as client:
        try:
            client.list_objects_v2(Bucket=bucket, Prefix="probe")
        except ClientError as error:
            return _code(error)
    return "accepted"


def missing_bucket(server: Server, bucket: str) -> str:
    """What the listing of a bucket is answered with that does not exist."""
    with contextlib.closing(s3(server)) as client:
        try:
            found = client.list_objects_v2(Bucket=f"{bucket}-missing")
        except ClientError as error:
            return _code(error)
    return "an empty listing" if not found.get("Contents") else "a listing"


def ranged_get(server: Server, bucket: str) -> str:
    """Status of a ranged GET."""
    with contextlib.closing(s3(server)) as client:
        found = client.get_object(Bucket=bucket, Key="probe", Range="bytes=10-19")
        whole = found["Body"].read() != BODY[10:20]
    status = str(found["ResponseMetadata"][STATUS])
    return f"{status}, Range ignored" if whole else status


def wrong_etag(server: Server, bucket: str) -> str:
    """What a ranged GET with If-Match of another ETag is answered with."""
    with contextlib.closing(s3(server)) as client:
        try:
            client.get_object(Bucket=bucket, Key="probe", Range="bytes=0-0", IfMatch='"' + "0" * 32 + '"')
        except ClientError as error:
            return str(error.response["ResponseMetadata"][STATUS])
    return "ignored"


def checksums(server: Server, bucket: str) -> str:
    """Which of S3's checksums are kept with an object that was uploaded with one, and told by HEAD."""
    kept, ranged = [], []
    with contextlib.closing(s3(server)) as client:
        for name in ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"):
            key, field = f"sum-{name}", f"Checksum{name}"
            try:
                client.put_object(Bucket=bucket, Key=key, Body=BODY, ChecksumAlgorithm=name)
                head = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
                part = client.get_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED", Range="bytes=0-1")
            except (ClientError, BotoCoreError):
                continue
            kept += [name] if field in head else []
            ranged += [name] if field in part else []
    note = "; sent with a range too" if ranged else ""
    return (", ".join(kept) or "none") + note


def versions(server: Server, bucket: str) -> str:
    """Whether an older version can be read by its id."""
    with contextlib.closing(s3(server)) as client:
        bucket = f"{bucket}-versions"
        try:
            client.create_bucket(Bucket=bucket)
            client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
            version = client.put_object(Bucket=bucket, Key="x", Body=b"old").get("VersionId")
        except ClientError as error:
            return f"no: {_code(error)}"
        if version is None:
            return "no"
        client.put_object(Bucket=bucket, Key="x", Body=b"new")
        try:
            old = client.get_object(Bucket=bucket, Key="x", VersionId=version)["Body"].read()
        except ClientError as error:
            return f"no: {_code(error)}"
    return "yes" if old == b"old" else "no: `versionId` is ignored"


def listing(server: Server, bucket: str) -> str:
    """Order and pages of a listing."""
    keys = [
        "list/a-b",
        "list/a/b",
        "list/a0",
        "list/B",
        "list/é",
        "list/z",
        "list/😀",
        "list/\uffee",
    ]
    taken, unpaged = [], ""
    with contextlib.closing(s3(server)) as client:
        for key in keys:
            with contextlib.suppress(ClientError):
                client.put_object(Bucket=bucket, Key=key, Body=b"x")
                taken.append(key)
        pages: list[list[str]] = []
        more: dict[str, Any] = {"MaxKeys": 3}
        while True:
            try:
                page = client.list_objects_v2(Bucket=bucket, Prefix="list/", **more)
            except ClientError as error:
                if not more:
                    raise
                unpaged, pages, more = _code(error), [], {}
                continue
            pages.append([entry["Key"] for entry in page.get("Contents", ())])
            if not page["IsTruncated"]:
                break
            more = {"MaxKeys": 3, "ContinuationToken": page["NextContinuationToken"]}
    found = [key for page in pages for key in page]
    stated = []
    stated.append("bytes of keys" if found == sorted(found, key=str.encode) else "another order")
    if unpaged:
        stated.append(f"one page alone, else {unpaged}")
    elif any(len(page) > 3 for page in pages):
        stated.append("`max-keys` is ignored")
    if missing := sorted(set(taken) - set(found)):
        stated.append("omits " + ", ".join(f"`{key}`" for key in missing))
    if added := sorted(set(found) - set(taken)):
        stated.append("adds " + ", ".join(f"`{key}`" for key in added))
    return "; ".join(stated)


def refused_keys(server: Server, bucket: str) -> str:
    """Which of the odd keys cannot be uploaded."""
    refused = []
    with contextlib.closing(s3(server, retries={"total_max_attempts": 1}, read_timeout=5)) as client:
        for name in ODD_NAMES:
            try:
                client.put_object(Bucket=bucket, Key=f"odd/{name}", Body=b"x")
            except (ClientError, BotoCoreError):
                refused.append(name)
        client.put_object(Bucket=bucket, Key="a", Body=b"x")
        try:
            client.put_object(Bucket=bucket, Key="a/b", Body=b"x")
        except (ClientError, BotoCoreError):
            refused.append("a/b` beside `a")
    return ", ".join(f"`{name}`".replace("|", "\\|") for name in refused) or "none"


HABITS: dict[str, Callable[[Server, str], str]] = {
    "Bucket in the host name": bucket_in_host,
    "Request signed for another region": region,
    "Redirects": redirects,
    "Wrong secret key": wrong_secret,
    "Missing bucket": missing_bucket,
    "Ranged GET": ranged_get,
    "GET with a wrong If-Match": wrong_etag,
    "Checksums kept": checksums,
    "Older versions": versions,
    "Order of a listing": listing,
    "Keys that an upload cannot have": refused_keys,
}
"""By the row of the table."""


def habits(server: Server) -> Iterator[tuple[str, str]]:
    """Every row of the table with the server's habit."""
    bucket = f"h{random.randrange(10**12)}"
    with contextlib.closing(s3(server)) as client:
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key="probe", Body=BODY)
    for row, ask in HABITS.items():
        try:
            yield row, ask(server, bucket)
        except Exception as error:  # noqa: BLE001 - an unexpected response is a habit too
            yield row, f"{type(error).__name__}: {error}"
