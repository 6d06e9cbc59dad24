"""`penstock manifest`: makes a ManifestFile or an augmented manifest from prefixes or from a list of keys.

    prefixes ─ listing ─ plan ─┐
    file of keys ─ globs ──────┴─▶ items ─ labels ─▶ text ─▶ file, or standard output

Nothing is written before all objects and labels are known, because a manifest that ends early may look like a
shorter one. Objects of a list are not looked up: no request is sent.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sidecar.commands.manifest_text import (
    SOURCE,
    Item,
    augmented_manifest,
    check_ids,
    common_prefix,
    find_labels,
    ids_text,
    manifest_file,
    number_labels,
)
from sidecar.job.strays import option_advice, warn_of_strays
from sidecar.process.memory import memory_limit
from sidecar.process.progress import progress_line
from sidecar.process.wait_log import WaitLog
from streamer.errors import ConfigError, SinkError
from streamer.file_reads import read_file
from streamer.plan import S3Uri, parse_object_uri, parse_s3_uri
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.catalog.pages import open_pages
from streamer.s3.catalog.sources import Sources
from streamer.s3.catalog.validation import PlanMemory
from streamer.s3.client.endpoint import STALL_TIMEOUT
from streamer.s3.client.session import open_clients
from streamer.schedule.concurrency import MOST_REQUESTS
from streamer.trailer import replace_file
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

    from sidecar.commands.manifest_text import Ids, Label, Labelled
    from streamer.plan import Plan
    from streamer.plan.selection import Selection
    from streamer.s3.client.endpoint import Endpoint

LONGEST_KEY = 1024
"""Most bytes of a key in UTF-8 (Amazon S3 User Guide, "Naming Amazon S3 objects")."""
LONGEST_LINE = 4096
"""Most characters of a line of a list: a key, and perhaps bucket and version id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """What is written where, and what of it is left out."""

    labels: Sequence[Label] = ()
    skip_unmatched: bool = False
    """Leave out objects that lack a label."""
    ids: str | None = None
    """File of the labels' numbers."""
    to: str | None = None
    """File of the manifest; None: standard output."""


class Found(NamedTuple):
    """The objects of a manifest, in its order."""

    items: Collection[Item]
    prefix: Callable[[], str]
    """Returns the start of every object's URI. Raises ConfigError for several buckets."""


class _Planned:
    """The objects of a plan; their URIs are made anew each time, since a plan takes less memory."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return self._plan.objects(0)

    def __contains__(self, item: object) -> bool:
        return any(each == item for each in self)

    def __iter__(self) -> Iterator[Item]:
        """Raises ConfigError for a key that a manifest cannot have."""
        for ref in self._plan.refs(0):
            uri = f"s3://{ref.bucket}/{ref.key}"
            if "?versionId=" in ref.key and parse_object_uri(uri)[1] is not None:
                raise ConfigError(
                    f"the key of {uri} ends as a version id does, and a manifest could not name it; leave it "
                    "out with --exclude"
                )
            yield Item(uri, ref.key)


async def list_objects(
    uris: Sequence[S3Uri], *, endpoint: Endpoint, selection: Selection, give_up_after: float, quiet: bool
) -> Found:
    """List the objects of these URIs: an exact key is that object, anything else a prefix.

    `give_up_after`: seconds without progress. Raises SourceError, and what `Sources.plan` raises.
    """
    listed = 0

    def plan(progressed: Callable[[], None]) -> Awaitable[Plan]:
        def progress(number: int) -> None:
            nonlocal listed
            listed = number
            progressed()

        return Sources(
            pages,
            uris,
            selection=selection,
            exact=True,
            progress=progress,
            memory=PlanMemory(memory_limit() // 2),
        ).plan()

    with progress_line(lambda: f"listing: {counted(listed, 'object')}", quiet=quiet):
        async with open_clients(
            endpoint, connections=MOST_REQUESTS, stall_timeout=min(STALL_TIMEOUT, give_up_after)
        ) as clients:
            with open_pages(clients) as pages:
                policy = RetryPolicy(give_up_after=give_up_after)
                waits = WaitLog(give_up_after=give_up_after)
                found = await retry_while_unavailable(plan, policy, on_wait=waits.waiting)
    warn_of_strays(found.strays, advice=option_advice)
    return Found(_Planned(found), partial(common_prefix, uris))


def read_keys(path: str, prefix: str | None, selection: Selection) -> Found:
    """Return the objects of a file of keys, one on each line; `-` is standard input.

    `prefix`: URI that each line follows; None: each line is a URI. Blank lines count for nothing. Raises
    ConfigError for a line that names no object, SinkError for a file that cannot be read.
    """
    before = "" if prefix is None else str(parse_s3_uri(prefix))
    keys = selection.keys("" if prefix is None else parse_s3_uri(prefix).key)
    items: list[Item] = []
    buckets: dict[str, S3Uri] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line:
            continue
        if len(line) > LONGEST_LINE:
            raise _too_long(path, number, f"a line of {len(line.encode())} bytes")
        try:
            uri, _ = parse_object_uri(before + line)
        except ConfigError as error:
            advice = "" if prefix else "; write an S3URI that all keys of the list follow"
            raise ConfigError(f"{path}: line {number}: {error}{advice}") from None
        if (size := len(uri.key.encode())) > LONGEST_KEY:
            raise _too_long(path, number, f"a key of {size} bytes")
        if keys(uri.key):
            items.append(Item(before + line, uri.key))
            buckets.setdefault(uri.bucket, S3Uri(uri.bucket, ""))
    if not items and keys.left_out:
        raise ConfigError(f"{path}: {keys.nothing_left}")
    if not items:
        raise ConfigError(f"{path} names no object; write one key on each line")
    starts = list(buckets.values()) if prefix is None else [parse_s3_uri(prefix)]
    return Found(items, partial(common_prefix, starts))


def _too_long(path: str, line: int, found: str) -> ConfigError:
    """Return the error of a line that is longer than a key."""
    return ConfigError(
        f"{path}: line {line}: {found}, and a key of S3 has at most {LONGEST_KEY}; write one key on each line"
    )


def _lines(path: str) -> list[str]:
    """Return the lines of a text file, without their ends. Raises SinkError, ConfigError."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            data = file.read()
    except OSError as error:
        raise SinkError(f"cannot read the list of keys {path}: {error.strerror}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line} is no UTF-8 ({error.reason})") from None
    return [line.removesuffix("\r") for line in text.split("\n")]


def write(found: Found, options: ManifestOptions) -> dict[str, Any]:
    """Write the manifest, and the labels' numbers; return the figures. Raises ConfigError, SinkError."""
    if not options.labels:
        _put(manifest_file(found.items, found.prefix()), options.to)
        return {"objects": len(found.items), "s3_data_type": "ManifestFile"}
    labels = find_labels(found.items, options.labels, skip_unmatched=options.skip_unmatched)
    ids, new = _ids(labels, options.ids)
    if options.ids is not None and new:
        _replace(options.ids, ids_text(ids), "the file of --label-ids")
    _put(augmented_manifest(found.items, labels, ids), options.to)
    return {
        "objects": len(found.items) - labels.skipped,
        "skipped": labels.skipped,
        "s3_data_type": "AugmentedManifestFile",
        "attribute_names": [SOURCE, *labels.names],
        "labels": {name: len(texts) for name, texts in labels.texts().items()},
    }


def _ids(labels: Labelled, path: str | None) -> tuple[Ids, bool]:
    """Return the labels' numbers: those of the file at `path`, or new ones; and whether they are new."""
    if path is None:
        return {}, False
    try:
        text = read_file(path, again=True)
    except FileNotFoundError:
        return number_labels(labels), True
    except OSError as error:
        raise SinkError(f"cannot read the file of --label-ids, {path}: {error.strerror}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the file of --label-ids, {path}, is no JSON ({error}); remove it to number the labels anew"
        ) from None
    return check_ids(document, labels, path=path), False


def _put(pieces: Iterator[str], path: str | None) -> None:
    data = bytearray()
    for piece in pieces:
        data += piece.encode()
    if path is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        _replace(path, data, "the manifest")


def _replace(path: str, data: bytes | bytearray, what: str) -> None:
    """Replace the file at `path`, or make it. Raises SinkError."""
    try:
        target = os.path.realpath(path)
        if os.path.exists(target) and not stat.S_ISREG(os.stat(target).st_mode):
            raise SinkError(f"cannot write {what}, {path}: it is no file; name another one")
        replace_file(target, data)
    except OSError as error:
        raise SinkError(f"cannot write {what}, {path}: {error.strerror}") from error
