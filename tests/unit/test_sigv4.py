"""The signer against botocore's, byte for byte, and against AWS's own published example."""

from __future__ import annotations

import calendar
import datetime as dt
from typing import Any
from unittest import mock
from urllib.parse import quote

import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from streamer.s3.client.endpoint import RequestOptions
from streamer.s3.signing.sigv4 import GetSigner

AKID, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
REGIONS = ("us-east-1", "eu-central-1", "cn-north-1", "auto")
MIDNIGHT = calendar.timegm((2024, 2, 29, 0, 0, 0))


def by_botocore(url: str, headers: dict[str, str], credentials: Any, region: str, now: int) -> dict[str, str]:
    """What botocore would send of its own accord, `Host` aside."""
    moment = dt.datetime.fromtimestamp(now, dt.UTC)
    request = AWSRequest("GET", url, headers=dict(headers))
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=moment):
        botocore.auth.S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items() if name.lower() != "host"}


keys = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
odd_keys = st.sampled_from(
    ["a b", "a+b", "a%2Fb", "a//b", "./a", "../a", "a/../b", "~x", "ü/é", "a&b=c", "a?b", "a#b", "x'\"*()!"]
)
extras = st.fixed_dictionaries(
    {},
    optional={
        "Range": st.builds("bytes={}-{}".format, st.integers(0, 2**40), st.integers(0, 2**40)),
        "If-Match": st.text("0123456789abcdef-", min_size=1, max_size=40).map('"{}"'.format),
    },
)
readings = st.builds(
    RequestOptions,
    requester_pays=st.booleans(),
    sse_customer_key=st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
)
tokens = st.one_of(st.none(), st.text("ABCxyz019/+=", min_size=1, max_size=300))


@given(
    key=keys | odd_keys,
    version=st.one_of(st.just(""), keys),
    extra=extras,
    reading=readings,
    token=tokens,
    region=st.sampled_from(REGIONS),
    host=st.sampled_from(["b.s3.eu-central-1.amazonaws.com", "localhost:9000", "[::1]:81"]),
    now=st.integers(0, 2**32),
)
def test_the_same_as_botocore(
    *,
    key: str,
    version: str,
    extra: dict[str, str],
    reading: RequestOptions,
    token: str | None,
    region: str,
    host: str,
    now: int,
) -> None:
    path = "/b/" + quote(key, safe="/~")
    query = f"versionId={quote(version, safe='~')}" if version else ""
    headers = extra | reading.headers()
    credentials = ReadOnlyCredentials(AKID, SECRET, token)
    url = f"http://{host}{path}" + (f"?{query}" if query else "")
    signed = GetSigner(region).sign(host, path, query, headers, credentials, now=now)
    assert {name.lower(): value for name, value in signed.items()} == by_botocore(
        url, headers, credentials, region, now
    )


@given(
    steps=st.lists(
        st.tuples(st.integers(-100_000, 100_000), st.sampled_from([SECRET, "other", "third"])), min_size=2
    )
)
def test_one_signer_over_midnight_and_new_secrets(steps: list[tuple[int, str]]) -> None:
    """The derived key is kept for a day and a secret, and for no other."""
    signer = GetSigner("eu-west-1")
    for offset, secret in steps:
        credentials, now = ReadOnlyCredentials(AKID, secret, None), MIDNIGHT + offset
        signed = signer.sign("h", "/b/k", "", {}, credentials, now=now)
        due = by_botocore("http://h/b/k", {}, credentials, "eu-west-1", now)
        assert signed["Authorization"] == due["authorization"]


def test_the_derived_key_changes_with_the_day() -> None:
    signer, credentials = GetSigner("eu-west-1"), ReadOnlyCredentials(AKID, SECRET, None)
    for now, day in ((MIDNIGHT - 1, "20240228"), (MIDNIGHT, "20240229"), (MIDNIGHT - 1, "20240228")):
        signed = signer.sign("h", "/b/k", "", {}, credentials, now=now)
        due = by_botocore("http://h/b/k", {}, credentials, "eu-west-1", now)
        assert f"/{day}/eu-west-1/s3/aws4_request" in signed["Authorization"]
        assert signed["Authorization"] == due["authorization"]


def test_the_published_example() -> None:
    """AWS, "Authenticating Requests: Using the Authorization Header", Example: GET Object."""
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    credentials = ReadOnlyCredentials("AKIAIOSFODNN7EXAMPLE", secret, None)
    now = calendar.timegm((2013, 5, 24, 0, 0, 0))
    signed = GetSigner("us-east-1").sign(
        "examplebucket.s3.amazonaws.com", "/test.txt", "", {"Range": "bytes=0-9"}, credentials, now=now
    )
    assert signed["Authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
