"""Asks botocore's sources of credentials in turn, at the start.

    no source is configured           None
    a source has credentials          they are fetched now, even where botocore would wait for a request
    a source may have some later      Expired: its agent or STS is not up, is overloaded, or its program fails
    a source cannot have any          Denied: the role is refused, a login has ended, a key is unknown

A chain in which one source fails does not go on with the next one: it would sign as somebody else.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto

from streamer.errors import ClockSkew, Denied, ErrorContext, Expired, PenstockError, SourceError, Transient
from streamer.retry import SILENCE, noting_silence
from streamer.s3.client.faults import error_text, mapped
from streamer.s3.client.redirects import token_unanswered
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

_CERTAIN = re.compile(
    r"non 200 response 4(?!08|25|29)\d\d|Unsupported version|Missing required key|No credentials found in"
)
"""In a `CredentialRetrievalError`: the agent has refused, or the program has printed no keys."""
_LOGINS = (
    (boto.SSOError | boto.TokenRetrievalError, "aws sso login"),
    (boto.LoginError, "aws login"),
)
"""Commands after which a source has credentials, by the class of its error."""
_WRITTEN_LATER = ("container-role", "assume-role-with-web-identity")
"""Sources whose token is in a file that another program writes."""


async def first_credentials(providers: Iterable[Any], limit: float, profile: str | None) -> Any:
    """Return the credentials of the first of botocore's providers that has any, else None.

    `limit`: seconds for each. `profile`: for the text of an error. Raises ConfigError, SourceError.
    """
    for provider in providers:
        method: str = provider.METHOD
        try:
            with noting_silence(lambda: Expired(_missing(f"no answer for {SILENCE:g} s", method))):  # noqa: B023
                async with asyncio.timeout(limit):
                    credentials = await provider.load()
                    if credentials is not None:
                        await credentials.get_frozen_credentials()
        except PenstockError:
            raise
        except Exception as error:
            # Processes, files, STS and metadata services each have their own classes of errors.
            raise _failed(error, method, limit, profile) from error
        if credentials is not None:
            return credentials
    if token_unanswered.get():
        raise Denied(
            "no usable credentials: no source is configured, and the instance's metadata service does not "
            "answer the request for a token; in a container set its hop limit to 2 (aws ec2 "
            "modify-instance-metadata-options --http-put-response-hop-limit 2)"
        )
    return None


def _failed(error: Exception, method: str, limit: float, profile: str | None) -> PenstockError:
    """Return the error for that of a source."""
    if isinstance(error, TimeoutError):
        return Expired(_missing(f"their source did not respond in {limit:g} s", method))
    common = mapped(error, ErrorContext())
    if not isinstance(common, SourceError):
        return common
    foreign = not isinstance(error, boto.BotoCoreError | boto.ClientError)
    reason = quoted(error_text(error))
    text = _missing(f"{type(error).__name__}: {reason}" if foreign else reason, method)
    for kind, command in _LOGINS:
        if isinstance(error, kind):
            text += f"; log in by `{command}{f' --profile {profile}' if profile else ''}`"
    return Expired(text) if _may_come(error, common, method) else Denied(text)


def _missing(reason: str, method: str) -> str:
    return f"no usable credentials ({reason}); check their source, which is {method}"


def _may_come(error: Exception, common: SourceError, method: str) -> bool:
    """Return whether the source may have credentials later. `common`: the error for any other request."""
    if isinstance(error, boto.CredentialRetrievalError):
        return _CERTAIN.search(str(error)) is None
    if isinstance(error, FileNotFoundError):
        return method in _WRITTEN_LATER
    return isinstance(common, Transient | ClockSkew) and not isinstance(error, OSError)
