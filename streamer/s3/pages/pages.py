"""Fetches the pages of a listing, by our own client or by aiobotocore.

    page() ─┬─ our own HTTP client: sign, send, parse (`page_parser`)        nearly all LISTs
            └─ aiobotocore's list_objects_v2                                 all others
    stat() ── HEAD (`object_info`), for objects that are listed as empty

aiobotocore sends the LISTs that our own client does not support (`why_not`), and repeats those that end in a
redirect, or in 400, which S3 also sends for a request signed for another region. Both return the same pages
and raise the same errors.

A page that fails is requested again for `PAGE_PATIENCE` seconds. A longer outage is an error, so that the
caller can log that it waits for storage. A page that cannot be is requested twice more, because a proxy may
have damaged it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from datetime import UTC
from functools import partial
from typing import TYPE_CHECKING, Any

from streamer.errors import ErrorContext, SourceError
from streamer.retry import ANSWER_FAILED, Attempts, RetryPolicy, raising_the_last, retry
from streamer.s3.client.credentials import renewing
from streamer.s3.client.endpoint import is_aws
from streamer.s3.client.faults import error_inside
from streamer.s3.pages.object_get import ControlClient
from streamer.s3.pages.object_info import ObjectInspector
from streamer.s3.pages.page_parser import (
    Page,
    entry_fields,
    missing_keys,
    next_token,
    parse_page,
    refuse_folders,
)
from streamer.s3.pages.validation import check_page
from streamer.s3.range_gets import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import ObjectRef
    from streamer.s3.client.session import Clients, S3Client

PAGE_PATIENCE = 10.0
"""Seconds for which a page that fails is requested again."""
_PARAMETERS = {"prefix": "Prefix", "continuation-token": "ContinuationToken", "start-after": "StartAfter"}
"""botocore's names of a request's parameters; it adds `encoding-type` itself."""


class PageSource:
    """Fetches pages of listings."""

    def __init__(self, control: ControlClient) -> None:
        clients = control.clients
        self.ends_are_certain = is_aws(clients.endpoint_url)
        """Whether IsTruncated can be believed: at AWS's own hosts."""
        self._control = control
        patience = min(PAGE_PATIENCE, clients.stall_timeout)
        self._policy = RetryPolicy(give_up_after=patience)
        self._inspector = ObjectInspector(control, give_up_after=patience)
        self._worked = False
        """Whether a page has come."""
        self._miscounts = 0
        """Successive pages with fewer entries than their KeyCount."""
        self._parser = asyncio.Lock()
        """Held for the turn of the event loop in which a page is parsed, 2 ms: pages often come together."""

    async def page(
        self, bucket: str, prefix: str, *, token: str | None = None, start_after: str = ""
    ) -> Page:
        """Fetch one page of the keys that begin with `prefix`, and check it. Raises SourceError.

        `token`: the token of the page before it. `start_after`, without a token: list only keys after it.
        """
        parameters = {"encoding-type": "url", "prefix": prefix}
        if token is not None:
            parameters["continuation-token"] = token
        if start_after:
            parameters["start-after"] = start_after
        attempts: Attempts[SourceError] = Attempts(self._policy, ANSWER_FAILED, what="a page")
        attempts.worked = self._worked
        with raising_the_last():
            return await retry(partial(self._request_page, bucket, parameters), attempts)

    async def stat(self, bucket: str, key: str) -> ObjectRef:
        """Return size and ETag of a listed object by a HEAD. Raises SourceError."""
        with raising_the_last():
            return await self._inspector.stat(bucket, key)

    async def _request_page(self, bucket: str, parameters: dict[str, str]) -> Page:
        try:
            page = await self._request_own(bucket, parameters)
            if page is None:
                page = await page_by_aiobotocore(self._control.clients.control, bucket, parameters)
        except SourceError as error:
            if error.code == "NoSuchKey":  # to a request that has no key
                error.message += (
                    "; the server took the bucket for a key: Penstock.Endpoint.Url must not have the bucket "
                    "in it, for S3Uri names it"
                )
            raise
        self._worked = True
        # What a server says as often as a page is requested is its way of counting, and no damage.
        self._miscounts = self._miscounts + 1 if page.missing > 0 else 0
        if page.missing > 0 and (not page.keys or self._miscounts < self._policy.wrong_answers):
            raise missing_keys(page, ErrorContext(bucket, parameters["prefix"]))
        return page

    async def _request_own(self, bucket: str, parameters: dict[str, str]) -> Page | None:
        """Request a page once; return None if aiobotocore must request it."""
        context = ErrorContext(bucket, parameters["prefix"])
        control = self._control
        if not control.supports(bucket):
            return None
        signer = control.signer
        endpoint = await signer.endpoint(bucket)
        with renewing(signer.credentials):
            response = await control.send(
                "ListObjectsV2", endpoint, context, lambda: signer.list_page(endpoint, bucket, parameters)
            )
            header = response.header
            if header.status == http.HTTPStatus.OK:
                document = await response.document(context)
                if error := error_inside(header.status, document, header.fields, context):
                    raise error
                async with self._parser:
                    await asyncio.sleep(0)
                    page = parse_page(document, context)
                    check_page(page, context)
                    return page
            if 200 <= header.status < 400:
                response.end(reuse=False)
                if header.status >= 300:
                    control.leave_to_aiobotocore(bucket)  # botocore caches the bucket's region
                return None
            if header.status == http.HTTPStatus.BAD_REQUEST:
                await response.error_body()
                return None
            if error := await refusal(response, context, signer):
                raise error
            return None


@contextlib.contextmanager
def open_pages(clients: Clients) -> Iterator[PageSource]:
    """Open a source of pages for the block."""
    with contextlib.closing(ControlClient(clients)) as control:
        yield PageSource(control)


async def page_by_aiobotocore(client: S3Client, bucket: str, parameters: dict[str, str]) -> Page:
    """Request a page once by aiobotocore. Raises SourceError."""
    context = ErrorContext(bucket, parameters["prefix"])
    named = {_PARAMETERS[name]: value for name, value in parameters.items() if name in _PARAMETERS}
    response = await client.send("list_objects_v2", context, Bucket=bucket, **named)
    page = _page(response, context)
    check_page(page, context)
    return page


def _page(response: dict[str, Any], context: ErrorContext) -> Page:
    """Return the page that aiobotocore has parsed. Raises InvalidResponse."""
    refuse_folders(context, found=any(each.get("Prefix") for each in response.get("CommonPrefixes", ())))
    token, entries = response.get("NextContinuationToken"), response.get("Contents", ())
    token = next_token(token, context, truncated=response.get("IsTruncated"), keys=len(entries))
    page = Page(token=token, missing=response.get("KeyCount", 0) - len(entries))
    for entry in entries:
        time = entry.get("LastModified")
        if time is not None and time.tzinfo is not None:
            time = time.astimezone(UTC)
        fields = entry | {"LastModified": "" if time is None else time.isoformat()}
        key, size, etag = entry_fields(fields, context)
        page.keys.append(key.encode())
        page.sizes.append(size)
        page.etags.append(etag.encode())
    return page
