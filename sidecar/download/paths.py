"""Maps the objects of a File channel to paths below the channel's directory. Pure.

A key whose path would be outside of the directory, or clash with another path, ends the job before a byte is
fetched. Folder markers are no files: S3 consoles and Hadoop write them where a file system has a directory.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from streamer.errors import ConfigError
from streamer.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import ObjectRef

LONGEST_NAME = 255
"""Most bytes of a path component on Linux file systems."""


def relative_path(key: str, prefix: str) -> str:
    """Return the path of an object in its channel's directory: the key after the last `/` of the prefix.

    With `s3://b/data/tr`, the key `data/train/x` becomes `train/x`. Raises ConfigError for a key that is not
    a safe path: outside of the directory, with control characters, or with a name that is too long.
    """
    above = prefix[: prefix.rfind("/") + 1]
    if not key.startswith(above):
        raise ConfigError(f"{key!r} is not below {above!r}, so it cannot be a file of the channel")
    path = key.removeprefix(above)
    for name in path.split("/"):
        if name in ("", ".", "..") or any(ord(char) < 0x20 or ord(char) == 0x7F for char in name):
            raise ConfigError(
                f"{key!r} cannot be a file below the channel's directory; leave it out by Exclude, or use "
                "InputMode: Pipe"
            )
        if len(name.encode()) > LONGEST_NAME:
            raise ConfigError(
                f"{key!r} has a name of over {LONGEST_NAME} bytes; leave it out by Exclude, or use "
                "InputMode: Pipe"
            )
    return path


def without_markers(plan: Plan) -> Plan:
    """Return the plan without folder markers; the same plan if it has none.

    A marker is an empty object whose key is the folder of another one, or an object of at most one byte whose
    key ends in `/`.
    """
    small = {ref.key for ref in plan.refs(0) if not ref.size or (ref.size == 1 and ref.key.endswith("/"))}
    if not small:
        return plan
    folders = {above for ref in plan.refs(0) for above in _folders(ref.key)}

    def is_marker(ref: ObjectRef) -> bool:
        return ref.key in small and (ref.key.endswith("/") or ref.key in folders)

    kept = [ref for ref in plan.refs(0) if not is_marker(ref)]
    if len(kept) == plan.objects(0):
        return plan
    files = Plan.of(kept)
    files.base = plan.base
    return files


def _folders(path: str) -> Iterator[str]:
    """Yield the folder of a path, and those above it."""
    while path := os.path.dirname(path):
        yield path
        if path == "/":
            return


def common_prefix(plan: Plan) -> str:
    """Return the prefix of the keys of a plan, for `relative_path`."""
    return plan.base.key if plan.base else ""


def file_paths(plan: Plan) -> list[str]:
    """Return the relative path of every object of the plan. Raises ConfigError, also for clashes."""
    prefix = common_prefix(plan)
    paths = [relative_path(ref.key, prefix) for ref in plan.refs(0)]
    files = set(paths)
    if len(files) < len(paths):
        twice, _ = Counter(paths).most_common(1)[0]
        raise ConfigError(f"two objects of the channel would be the file {twice!r}; use InputMode: Pipe")
    for path in paths:
        for above in _folders(path):
            if above in files:
                raise ConfigError(
                    f"{above!r} and {path!r} cannot both be files: one would be a directory; leave one out "
                    "by Exclude, or use InputMode: Pipe"
                )
    return paths
