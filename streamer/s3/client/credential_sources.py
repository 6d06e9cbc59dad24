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
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto
from botocore.credentials import AssumeRoleProvider

from streamer.errors import ClockSkew, Denied, ErrorContext, Expired, PenstockError, SourceError, Transient
from streamer.retry import SILENCE, noting_silence
from streamer.s3.client.bounded import interactive
from streamer.s3.client.faults import error_text, mapped
from streamer.s3.client.redirects import token_unanswered
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

_CERTAIN = re.compile(
    r"non 200 response 4(?!08|25|29)\d\d|Unsupported version|Missing required key|No credentials found in"
)
"""In a `CredentialRetrievalError`: the agent has refused, or the program has printed no keys."""
LONGEST_QUESTION = 86_400.0
"""Most seconds of a program that may ask a person; GiveUpAfter ends the wait before."""
_LOGINS = (
    (boto.SSOError | boto.TokenRetrievalError, "aws sso login"),
    (boto.LoginError, "aws login"),
)
"""Commands after which a source has credentials, by the class of its error."""
_WRITTEN_LATER = ("container-role", "assume-role-with-web-identity")
"""Sources whose token is in a file that another program writes."""


class CodeWanted(Exception):
    """A source asks for a code of MFA, and has none."""

    def __str__(self) -> str:
        return f"it asks for {self.args[0]!r}, and nobody can be asked now; use a source that needs no code"


_code: ContextVar[str | None] = ContextVar("code", default=None)
"""The code that the next question of a source gets."""


def _prompt(text: str) -> str:
    code = _code.get()
    if code is None:
        raise CodeWanted(text.strip().removesuffix(":"))
    _code.set(None)
    return code


def prompt_no_terminal() -> None:
    """Let no source that this process creates from now on wait for a person in the event loop."""
    defaults = AssumeRoleProvider.__init__.__defaults__
    AssumeRoleProvider.__init__.__defaults__ = (_prompt, *defaults[1:])


async def first_credentials(
    providers: Iterable[Any],
    limit: float,
    profile: str | None,
    ask: Callable[[str], Awaitable[str]] | None = None,
) -> Any:
    """Return the credentials of the first of botocore's providers that has any, else None.

    `limit`: seconds for each, unless a program may ask a person. `profile`: for the text of an error.
    `ask`: see `open_clients`. Raises ConfigError, SourceError.
    """
    token = interactive.set(ask is not None)
    try:
        return await _first(providers, limit, profile, ask)
    finally:
        interactive.reset(token)


async def _first(
    providers: Iterable[Any],
    limit: float,
    profile: str | None,
    ask: Callable[[str], Awaitable[str]] | None,
) -> Any:
    for provider in providers:
        method: str = provider.METHOD
        seconds = LONGEST_QUESTION if ask is not None and method == "custom-process" else limit
        try:
            try:
                credentials = await _loaded(provider, seconds)
            except CodeWanted as wanted:
                if ask is None:
                    raise
                _code.set(await ask(f"{wanted.args[0]}: "))
                credentials = await _loaded(provider, seconds)
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


async def _loaded(provider: Any, seconds: float) -> Any:
    with noting_silence(lambda: Expired(_missing(f"no answer for {SILENCE:g} s", provider.METHOD))):
        async with asyncio.timeout(seconds):
            credentials = await provider.load()
            if credentials is not None:
                await credentials.get_frozen_credentials()
            return credentials


def _failed(error: Exception, method: str, limit: float, profile: str | None) -> PenstockError:
    """Return the error for that of a source."""
    if isinstance(error, CodeWanted):
        return Denied(_missing(str(error), method))
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
