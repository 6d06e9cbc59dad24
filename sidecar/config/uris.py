"""S3 URIs of a job file: `s3://…`, or an `https://` address of Amazon S3."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field, StrictStr

from streamer.errors import ConfigError
from streamer.plan import S3Uri, checked_uri, parse_s3_uri

_AWS_HOST = re.compile(r"(?:(?P<bucket>.+)\.)?s3(?:[.-][a-z0-9.-]+)?\.amazonaws\.com(?:\.cn)?")


def parse_source(uri: str) -> S3Uri:
    """Parse `s3://…` or an `https://` address of Amazon S3. Raises ConfigError."""
    if not uri.startswith("https://"):
        return parse_s3_uri(uri)
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"{uri!r} is not a URL ({error}): write s3://BUCKET/PREFIX") from error
    host = _AWS_HOST.fullmatch(parts.netloc)
    bucket, key = (host["bucket"] if host else None), parts.path.removeprefix("/")
    if host and not bucket:
        bucket, _, key = key.partition("/")
    if not bucket or parts.query or parts.fragment:
        raise ConfigError(f"{uri!r} is not an address of an object in Amazon S3: write s3://BUCKET/PREFIX")
    return checked_uri(uri, unquote(bucket), unquote(key))


def _s3_uri(value: str) -> str:
    try:
        parse_source(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


SourceUri = Annotated[StrictStr, Field(max_length=1024), AfterValidator(_s3_uri)]
"""A URI of objects, as text; `parse_source` parses it."""
