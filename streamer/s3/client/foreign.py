"""Classifies the exceptions of botocore and aiohttp.

Importing both packages takes 0.3 s, so `faults` imports this module when it maps the first foreign exception.
"""

from __future__ import annotations

from typing import Literal

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

Kind = Literal[
    "error response", "no credentials", "tls", "cut off", "short body", "no connection", "broken connection",
    "unparsable", "endless listing", "invalid parameter", "invalid configuration", "other",
]  # fmt: skip


class RefusalCutOff(boto.HTTPClientError):  # type: ignore[misc]
    """The body of an error response with a status of `faults.MANY_REASONS` broke off before its code.

    botocore repeats the request.
    """

    fmt = "the response with status {status} broke off before its error code"


_KINDS: tuple[tuple[Kind, tuple[type[BaseException], ...]], ...] = (
    ("error response", (boto.ClientError,)),
    (
        "no credentials",
        (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError),
    ),
    ("tls", (boto.SSLError,)),
    ("cut off", (RefusalCutOff,)),
    ("short body", (aiohttp.ClientPayloadError, boto.IncompleteReadError)),
    ("no connection", (boto.EndpointConnectionError,)),
    (
        "broken connection",
        (
            *(boto.HTTPClientError, boto.ConnectionError, boto.ResponseStreamingError),
            *(aiohttp.ClientError, OSError),
        ),
    ),
    ("unparsable", (ResponseParserError,)),
    ("endless listing", (boto.PaginationError,)),
    ("invalid parameter", (boto.ParamValidationError,)),
    (
        "invalid configuration",
        (boto.ProfileNotFound, boto.NoRegionError, boto.ConfigParseError, boto.InvalidConfigError),
    ),
    ("other", (boto.BotoCoreError,)),
)
"""The first class that fits decides."""


def kind_of(error: BaseException) -> Kind | None:
    """Return the kind of an exception of botocore or aiohttp, or of an OSError; None for any other."""
    return next((kind for kind, classes in _KINDS if isinstance(error, classes)), None)
