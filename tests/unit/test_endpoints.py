"""Settings and bucket endpoints that are computed without botocore equal those that botocore resolves."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamer.errors import ConfigError, Denied
from streamer.s3.client.endpoint import (
    Endpoint,
    Keys,
    RequestOptions,
    Settings,
    check_variables,
    is_aws,
    settings_of,
)
from streamer.s3.client.session import open_clients
from streamer.s3.signing.endpoints import BucketEndpoint, endpoint_of
from streamer.s3.signing.requests import RangeSigner

PAIR = ("AKIDTEST", "not-a-secret")
KEYS = {"AWS_ACCESS_KEY_ID": PAIR[0], "AWS_SECRET_ACCESS_KEY": PAIR[1]}
NO_FILES = {"AWS_CONFIG_FILE": "/no/config", "AWS_SHARED_CREDENTIALS_FILE": "/no/credentials"}

ODD_BUCKETS = """
    abc a.b a-b a..b -ab ab- a.-b A-bucket under_score 10.0.0.1 1.2.3.400 xn--bucket s3 ab a.b.c
    b.--s3 x--use1-az1--x-s3 x-s3alias x--op-s3 x--ol-s3 x--xa-s3 b--table-s3
    arn:aws:s3:us-east-1:1:accesspoint/x
""".split()  # noqa: SIM905 - a list of words
HOSTS = """
    10.0.0.1 127.0.0.1 1.2.3 256.1.1.1 localhost minio s3.example.org S3.Example.ORG a_b.example h.
    123 [::1] s3.amazonaws.com s3.eu-west-1.amazonaws.com s3-accelerate.amazonaws.com
    s3-fips.us-east-1.amazonaws.com s3.dualstack.us-east-1.amazonaws.com
    bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com
""".split()  # noqa: SIM905 - a list of words
REGIONS = """
    us-east-1 eu-central-1 us-west-2 ap-southeast-7 mx-central-1 cn-north-1 us-gov-west-1
    us-iso-east-1 auto eusc-de-east-1 aws-global s3-external-1 garage us-east-1-fips fips-us-east-1
    123 eu-nowhere-9 US-EAST-1 a.b
""".split()  # noqa: SIM905 - a list of words
buckets = st.one_of(
    st.text("ab09.-", min_size=1, max_size=12),
    st.text("abAB09.-_", min_size=1, max_size=70),
    st.sampled_from([*ODD_BUCKETS, "a" * 63, "a" * 64, "a" * 255]),
)
paths = st.sampled_from(["", "/", "/path", "/a/b/", "//", "/a//b", "/%20", "/a b", "/~u", "/a?b", "/a.b"])
ports = st.sampled_from(["", ":80", ":443", ":9000", ":0", ":65535", ":65536", ":"])
schemes = st.sampled_from(["http", "https"])
urls = st.none() | st.builds("{}://{}{}{}".format, schemes, st.sampled_from(HOSTS), ports, paths)
regions = st.none() | st.sampled_from(REGIONS)


def computed(endpoint: Endpoint, bucket: str, environment: Mapping[str, str]) -> BucketEndpoint | None:
    found = settings_of(endpoint, environment)
    return None if found is None else endpoint_of(found, bucket)


async def resolved(endpoint: Endpoint, bucket: str) -> BucketEndpoint:
    """By botocore, whose way an unknown variable asks for."""
    with mock.patch.dict(os.environ, {"AWS_UNKNOWN": "1"}):
        async with open_clients(endpoint, connections=1) as clients:
            signer = RangeSigner(
                clients.data, clients.credentials, anonymous=endpoint.anonymous, reading=RequestOptions()
            )
            return await signer.endpoint(bucket)


def facts(endpoint: BucketEndpoint) -> tuple[object, ...]:
    region = endpoint.signer.region
    return endpoint.host, endpoint.port, endpoint.tls, endpoint.authority, endpoint.prefix, region


@given(bucket=buckets, url=urls, region=regions, path_style=st.none() | st.booleans())
@example(bucket="a.b.c", url="http://minio:9000", region=None, path_style=False)
@example(bucket="a.b.c", url="https://minio:9000/", region=None, path_style=False)
@example(bucket="bucket", url=None, region=None, path_style=False)
@example(bucket="bucket", url=None, region="us-east-1", path_style=False)
@example(bucket="bucket", url=None, region="us-east-1", path_style=True)
@example(bucket="bucket", url="http://10.0.0.1:80/p", region="us-east-1", path_style=False)
def test_a_computed_endpoint_is_botocore_s(
    bucket: str, url: str | None, region: str | None, *, path_style: bool | None
) -> None:
    with mock.patch.dict(os.environ, KEYS | NO_FILES):
        os.environ.pop("AWS_DEFAULT_REGION", None)
        endpoint = Endpoint(url=url, region=region, path_style=path_style)
        ours = computed(endpoint, bucket, os.environ)
        if ours is not None:
            assert facts(ours) == facts(asyncio.run(resolved(endpoint, bucket)))


ENDPOINT = Endpoint(url="http://10.0.0.1:9000")
PLAIN = KEYS | {"HOME": "/no/home"}


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        (
            ENDPOINT,
            PLAIN,
            Settings(ENDPOINT.url, None, path_style=None, keys=Keys(*PAIR), ca_bundle=None),
        ),
        (
            Endpoint(region="eu-west-1", path_style=True),
            PLAIN | {"AWS_SESSION_TOKEN": "t", "AWS_CA_BUNDLE": "ca", "AWS_DEFAULT_REGION": "us-east-2"},
            Settings(None, "eu-west-1", path_style=True, keys=Keys(*PAIR, "t"), ca_bundle="ca"),
        ),
        (
            Endpoint(anonymous=True, ca_bundle="mine"),
            {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b", "AWS_DEFAULT_REGION": "r"}
            | {"REQUESTS_CA_BUNDLE": "requests", "AWS_REGION": "unused"},
            Settings("http://b", "r", path_style=None, keys=None, ca_bundle="mine"),
        ),
    ],
)  # fmt: skip
def test_settings_that_the_environment_holds(
    endpoint: Endpoint, environment: dict[str, str], expected: Settings
) -> None:
    assert settings_of(endpoint, environment | NO_FILES) == expected


@pytest.mark.parametrize(
    ("endpoint", "environment"),
    [
        (ENDPOINT, {}),
        (ENDPOINT, {"AWS_ACCESS_KEY_ID": "AKIDTEST"}),
        (ENDPOINT, KEYS | {"AWS_SECRET_ACCESS_KEY": ""}),
        (Endpoint(profile="p"), KEYS),
        *(
            (ENDPOINT, KEYS | {name: "1"})
            for name in (
                "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "AWS_DATA_PATH",
                "AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT", "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT",
                "AWS_CREDENTIAL_EXPIRATION", "AWS_DEFAULTS_MODE", "BOTOCORE_EXPERIMENTAL__PLUGINS",
            )
        ),
        (Endpoint(region="cn-north-1"), KEYS),
        (Endpoint(url="http://h:99999"), KEYS),
    ],
)  # fmt: skip
def test_settings_that_botocore_must_resolve(endpoint: Endpoint, environment: dict[str, str]) -> None:
    assert settings_of(endpoint, environment | NO_FILES) is None


EMPTY = ("AWS_DEFAULT_REGION", "AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_variable_is_as_if_unset(name: str) -> None:
    """Charts and compose files set variables that have no value."""
    usual = settings_of(ENDPOINT, KEYS | NO_FILES)
    assert usual is not None
    assert settings_of(ENDPOINT, KEYS | NO_FILES | {name: ""}) == usual


async def test_botocore_takes_empty_variables_for_unset_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-west-3\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in EMPTY:
        monkeypatch.setenv(name, "")
    async with open_clients(Endpoint(), connections=1) as clients:
        assert "eu-west-3" in clients.endpoint_url


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_SECRET_ACCESS_KEY", '"secret"', 'has quotes (")'),
        ("AWS_DEFAULT_REGION", "'us-east-1'", "has quotes (')"),
        ("AWS_PROFILE", "train\r", "begins or ends with a space"),
        ("https_proxy", '"http://proxy:3128"', 'has quotes (")'),
    ],
)
def test_a_variable_with_quotes_or_spaces_around_it_is_named(name: str, value: str, words: str) -> None:
    error = Denied if name == "AWS_SECRET_ACCESS_KEY" else ConfigError
    with pytest.raises(error, match=f"^{name} {re.escape(words)}"):
        check_variables(Endpoint(), {name: value})


def test_a_variable_that_an_option_overrides_may_have_any_value() -> None:
    environment = {"AWS_ENDPOINT_URL": '"http://a"', "AWS_DEFAULT_REGION": '"r"', "AWS_PAGER": '""'}
    check_variables(Endpoint(url="http://b", region="s"), environment)


def test_an_aws_file_is_for_botocore(tmp_path: Path) -> None:
    """An empty one has no settings, nor does /dev/null."""
    path = tmp_path / "config"
    for name in NO_FILES:
        environment = KEYS | NO_FILES | {name: str(path)}
        assert settings_of(ENDPOINT, environment) is not None
        path.touch()
        assert settings_of(ENDPOINT, environment) is not None
        assert settings_of(ENDPOINT, environment | {name: "/dev/null"}) is not None
        path.write_text("[default]")
        assert settings_of(ENDPOINT, environment) is None
        path.unlink()


def test_an_address_of_ipv6_has_brackets_in_the_host_header() -> None:
    endpoint = BucketEndpoint.of_url("http://[::1]:9000/b/", "us-east-1")
    assert (endpoint.host, endpoint.port, endpoint.authority) == ("::1", 9000, "[::1]:9000")
    assert BucketEndpoint.of_url("https://[fe80::1]/b/", "us-east-1").authority == "[fe80::1]"


def test_a_key_is_in_no_text_of_the_settings() -> None:
    assert not {word for word in KEYS.values() if word in str(settings_of(ENDPOINT, KEYS | NO_FILES))}


@pytest.mark.parametrize(
    ("url", "aws"),
    [
        ("https://s3.amazonaws.com", True),
        ("https://s3.cn-north-1.amazonaws.com.cn", True),
        ("https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com:443/", True),
        ("https://s3.dualstack.us-east-1.api.aws", True),
        ("https://s3.eusc-de-east-1.amazonaws.eu", True),
        ("https://amazonaws.com.example.org", False),
        ("https://minio:9000", False),
        ("http://[::1]:9000", False),
        ("", False),
    ],
)
def test_aws_s_own_hosts_are_known(url: str, *, aws: bool) -> None:
    assert is_aws(url) == aws
