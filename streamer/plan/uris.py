"""Parses S3 URIs: of prefixes (contract §3), and of single objects, with a version id as an extension."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from streamer.errors import ConfigError


class S3Uri(NamedTuple):
    """A bucket and a key or key prefix (which may be empty)."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


LONGEST_KEY = 1024
"""Most bytes of a key in UTF-8 (Amazon S3 User Guide, "Naming Amazon S3 objects")."""
_URI = re.compile(r"s3://(arn:[^/]*:(?:outpost/[^/]+/)?accesspoint/[^/]+|[^/]+)/?(.*)", re.DOTALL)
"""A bucket and a key. The ARN of an access point may have slashes in place of its last colons."""
_BUCKET = re.compile(
    r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,255}"
    r"|arn:aws[^:]*:s3(?:-object-lambda|-outposts)?:[a-z0-9-]*:[0-9]{12}:[A-Za-z0-9.:_/-]{1,255}"
)
"""Bucket as AWS's clients accept it: a name, or the ARN of an access point. They take `.` and `..` too, but
in a URL's path such a name is a step: proxies and servers resolve it (RFC 3986 §5.2.4), to another bucket."""
_AWS = r"(?:[.-][a-z0-9.-]+)?\.amazonaws\.com(?:\.cn)?"
_AWS_URL = re.compile(
    rf"https://(?:s3{_AWS}/(?P<bucket>[^/?#]+)|(?P<host>[^/?#@]+)\.s3(?!-accesspoint){_AWS})(?:/(?P<key>[^?#]*))?"
)
"""An address of Amazon S3, with the bucket in the path or in the host name."""
_MEANT = tuple(
    re.compile(form, re.DOTALL | re.IGNORECASE).fullmatch
    for form in (
        r"https://[^/]*\bconsole\.[^/]+/s3/[a-z]+/(?P<bucket>[^/?]+)(?:.*[?&]prefix=(?P<key>[^&]*))?.*",
        r"https://(?P<point>[^/]+)-(?P<account>\d{12})\.s3-accesspoint\.(?P<region>[^/.]+)\.[^/]+/?(?P<key>[^?]*).*",
        r"(?P<scheme>https?://)(?P<bucket>[^/?]+)\.(?P<host>(?:s3|oss|obs|cos|storage)[.-][^/?@]+)/?(?P<key>[^?]*).*",
        r"(?P<scheme>https?://)(?P<host>[^/?@]+)/(?P<bucket>[^/?]+)/?(?P<key>[^?]*).*",
        r"s3://(?P<host>[^/@]+:\d+)/(?P<bucket>[^/]+)/(?P<key>.+)",
        r"(?:s3://)?arn:aws[^:]*:s3:::(?P<bucket>[^/]+)/?(?P<key>.*)",
        r"(?!file:|https?:|(?-i:s3://))(?:[a-z][a-z0-9+.-]*:/+|s3(?::|//))(?P<bucket>[^/]+)/?(?P<key>.*)",
    )
)
"""Other forms in which people write a bucket and a key, the first that fits."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_VERSION = re.compile(r"(.*)\?versionId=([^?&/]+)", re.DOTALL)


def parse_s3_uri(uri: str) -> S3Uri:
    """Split `s3://bucket/prefix` (contract §3). Raises ConfigError for anything else."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise ConfigError(f"{uri!r} is not an S3 URI: write {_meant(uri)}")
    return checked_uri(uri, *match.groups())


def parse_address(uri: str) -> S3Uri:
    """Parse `s3://…` or an `https://` address of Amazon S3. Raises ConfigError."""
    if (match := _AWS_URL.fullmatch(uri)) is None:
        return parse_s3_uri(uri)
    return checked_uri(uri, unquote(match["bucket"] or match["host"]), unquote(match["key"] or ""))


def _meant(uri: str) -> str:
    """Return the S3 URI for another form of a bucket and a key; the general form for any other text."""
    for form in _MEANT:
        if (match := form(uri)) is not None:
            found = match.groupdict("")
            bucket, key = unquote(found.get("bucket", "")), unquote(found["key"])
            if "point" in found:
                bucket = "arn:aws:s3:{region}:{account}:accesspoint/{point}".format(**found)
            if not _BUCKET.fullmatch(bucket):
                continue
            host, scheme = found.get("host", ".amazonaws.com"), found.get("scheme", "http://")
            url = "" if ".amazonaws.com" in host else f", and {scheme}{host} as Penstock.Endpoint.Url"
            return f"s3://{bucket}/{key}{url}"
    return "s3://BUCKET/PREFIX"


def checked_uri(uri: str, bucket: str, key: str) -> S3Uri:
    """Return bucket and key of `uri`. Raises ConfigError unless they can be such."""
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{uri!r} does not name a bucket: a name has letters, digits, dots, hyphens and underscores "
            f"alone, and is not . or ..; write {_meant(uri)}"
        )
    if _SURROGATE.search(uri):
        raise ConfigError(f"{uri!r} holds half a surrogate pair, which no key can")
    return S3Uri(bucket, key)


def parse_object_uri(uri: str) -> tuple[S3Uri, str | None]:
    """Split `s3://bucket/key`, or `s3://bucket/key?versionId=…`, into the object and its version id.

    Raises ConfigError for anything that does not name one object.
    """
    match = _VERSION.fullmatch(uri)
    bare, version = match.groups() if match else (uri, None)
    parsed = parse_s3_uri(bare)
    if not parsed.key:
        raise ConfigError(f"{uri!r} names no object: write s3://BUCKET/KEY")
    return parsed, version
