"""`penstock manifest`: makes a ManifestFile or an augmented manifest from prefixes or from a list of keys.

    prefixes ─ listing ─ plan ─┐
    file of keys ─ globs ──────┴─▶ items ─ labels in their keys ─▶ text ─▶ file, or standard output

Nothing is written before all is known, because a manifest that ends early may look like a shorter one. No
object of a list is looked up. The text is ASCII, because some programs end a line at U+2028 or U+0085.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from sidecar.process.logs import WaitLog
from sidecar.process.progress import progress_line
from sidecar.process.resources import memory_limit
from sidecar.records.endmarks import option_advice, warn_of_strays
from streamer.errors import ConfigError, SinkError
from streamer.plan import S3Uri, parse_address, parse_object_uri
from streamer.plan.uris import LONGEST_KEY
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.client.endpoint import STALL_TIMEOUT
from streamer.s3.client.session import open_clients
from streamer.s3.pages.pages import open_pages
from streamer.s3.pages.sources import Sources
from streamer.s3.pages.validation import PlanMemory
from streamer.schedule.concurrency import MOST_REQUESTS
from streamer.trailer import replace_file
from streamer.units import counted

if TYPE_CHECKING:
    import re
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from streamer.plan import Plan
    from streamer.plan.selection import Selection
    from streamer.s3.client.endpoint import Endpoint

SOURCE = "source-ref"
LONGEST_LINE = 4096
"""Most characters of a line of a list: a key, and perhaps bucket and version id."""
_TOO_LONG = f", and a key of S3 has at most {LONGEST_KEY}; write one key on each line"


class Found(NamedTuple):
    """The objects of a manifest, in its order."""

    items: Iterable[tuple[str, str]]
    """URI of each, with a version id if one is given; and key, in which labels are searched."""
    starts: Sequence[S3Uri]
    """URIs of which every object's URI begins with one."""


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

        memory = PlanMemory(memory_limit() // 2)
        return Sources(pages, uris, selection=selection, exact=True, progress=progress, memory=memory).plan()

    with progress_line(lambda: f"listing: {counted(listed, 'object')}", quiet=quiet):
        stall, waits = min(STALL_TIMEOUT, give_up_after), WaitLog(give_up_after=give_up_after)
        async with open_clients(
            endpoint,
            connections=MOST_REQUESTS,
            stall_timeout=stall,
            give_up_after=give_up_after,
            on_wait=waits.waiting,
        ) as clients:
            with open_pages(clients) as pages:
                policy = RetryPolicy(give_up_after=give_up_after)
                found = await retry_while_unavailable(plan, policy, on_wait=waits.waiting)
    warn_of_strays(found.strays, advice=option_advice)
    return Found(_items(found), uris)


def _items(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the objects of a plan. Raises ConfigError for a key that a manifest cannot have."""
    for ref in plan.refs(0):
        uri = f"s3://{ref.bucket}/{ref.key}"
        if "?versionId=" in ref.key and parse_object_uri(uri)[1] is not None:
            raise ConfigError(f"the key of {uri} ends as a version id does; leave it out with --exclude")
        yield uri, ref.key


def read_keys(path: str, prefix: str | None, selection: Selection) -> Found:
    """Return the objects of a file of keys, or `-`, which is standard input. Raises ConfigError, SinkError.

    `prefix`: URI that each line follows; None: each line is a URI. Blank lines count for nothing.
    """
    start = None if prefix is None else parse_address(prefix)
    before, keys = str(start or ""), selection.keys("" if start is None else start.key)
    items, buckets = list[tuple[str, str]](), dict[str, S3Uri]()
    for number, line in enumerate(_lines(path), 1):
        if not line:
            continue
        if len(line) > LONGEST_LINE:
            raise ConfigError(f"{path}: line {number}: a line of {len(line.encode())} bytes{_TOO_LONG}")
        try:
            uri, _ = parse_object_uri(before + line)
        except ConfigError as error:
            advice = "" if prefix else "; write an S3URI that all keys of the list follow"
            raise ConfigError(f"{path}: line {number}: {error}{advice}") from None
        if (size := len(uri.key.encode())) > LONGEST_KEY:
            raise ConfigError(f"{path}: line {number}: a key of {size} bytes{_TOO_LONG}")
        if keys(uri.key):
            items.append((before + line, uri.key))
            buckets[uri.bucket] = S3Uri(uri.bucket, "")
    if not items:
        no_object = f"{path} names no object; write one key on each line"
        raise ConfigError(f"{path}: {keys.nothing_left}" if keys.left_out else no_object)
    return Found(items, [*buckets.values()] if start is None else [start])


def _lines(path: str) -> list[str]:
    """Return the lines of a text file, without their ends. Raises SinkError, ConfigError."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            return [line.removesuffix("\r") for line in file.read().decode().split("\n")]
    except OSError as error:
        raise SinkError(f"cannot read the list of keys {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line} is no UTF-8 ({error.reason})") from None


def manifest_file(found: Found) -> tuple[bytearray, dict[str, Any]]:
    """Return a ManifestFile (contract §4.1) and its figures. Raises ConfigError for several buckets."""
    bucket, *others = dict.fromkeys(uri.bucket for uri in found.starts)
    if others:
        raise ConfigError(
            f"the buckets {bucket} and {others[0]} cannot be in one ManifestFile, which has objects of one "
            "bucket; make a manifest of each, or one with labels (--label)"
        )
    key = os.path.commonprefix([uri.key for uri in found.starts])  # noqa: RUF071 - keys, not paths
    prefix, objects = f"s3://{bucket}/{key[: key.rfind('/') + 1]}", 0
    data = bytearray(f"[\n{json.dumps({'prefix': prefix})}".encode())
    for uri, _ in found.items:
        data += f",\n{json.dumps(uri[len(prefix) :])}".encode()
        objects += 1
    return data + b"\n]\n", {"objects": objects, "s3_data_type": "ManifestFile"}


def augmented_manifest(
    found: Found, labels: Mapping[str, re.Pattern[str]], *, skip_unmatched: bool
) -> tuple[bytearray, dict[str, Any]]:
    """Return an augmented manifest (contract §4.2) and its figures. `labels`: expressions with one group.

    Raises ConfigError if a key lacks a label, unless `skip_unmatched` leaves it out, and if all keys do.
    """
    data, objects, skipped, first = bytearray(), 0, 0, ("", "")
    texts: dict[str, set[str]] = {name: set() for name in labels}
    for uri, key in found.items:
        matches = {name: pattern.search(key) for name, pattern in labels.items()}
        values = {name: match[1] for name, match in matches.items() if match and match[1]}
        if len(values) < len(labels):
            first = first if skipped else (uri, next(name for name in labels if name not in values))
            skipped += 1
            continue
        for name, text in values.items():
            texts[name].add(text)
        data += f"{json.dumps({SOURCE: uri} | values)}\n".encode()
        objects += 1
    if skipped and (not skip_unmatched or not data):
        left_out = ", or leave such objects out with --exclude or --skip-unmatched" if data else ""
        raise ConfigError(
            f"{skipped} of {counted(objects + skipped, 'object')} have no label: in the key of {first[0]} "
            f"nothing matches --label {first[1]}={labels[first[1]].pattern}; correct it{left_out}"
        )
    return data, {
        "objects": objects,
        "skipped": skipped,
        "s3_data_type": "AugmentedManifestFile",
        "attribute_names": [SOURCE, *labels],
        "labels": {name: len(each) for name, each in texts.items()},
    }


def write(data: bytearray, path: str | None) -> None:
    """Replace the file at `path`, or make it; None: standard output. Raises SinkError."""
    if path is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        target = os.path.realpath(path)
        if os.path.exists(target) and not os.path.isfile(target):
            raise SinkError(f"cannot write the manifest, {path}: it is no file; name another one")
        replace_file(target, data)
    except OSError as error:
        raise SinkError(f"cannot write the manifest, {path}: {error.strerror}") from error
