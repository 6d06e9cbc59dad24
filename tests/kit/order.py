"""The order in which the processes of `make test` take the files of tests.

Groups of files come first: each is most of a process's work. The others are of two kinds, which are mixed
evenly, so that at each time some processes wait and others compute. One kind after the other would leave
processors idle in the first part, and end with more tests under way than there are processors.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.kit.late import group_of

_WAITING = {"crash", "e2e", "elastic", "hostile", "operate", "servers", "sidecar"}
"""Directories whose tests wait for other processes in most of their time."""


def order_of(paths: Iterable[Path]) -> dict[Path, float]:
    """Return numbers by which to sort the files. Files of one number stay as they are."""
    found = sorted(set(paths))
    order = {path: -1.0 for path in found if group_of(path)}
    for waiting in (True, False):
        kind = [path for path in found if path not in order and (path.parent.name in _WAITING) is waiting]
        order |= {path: number / len(kind) for number, path in enumerate(kind)}
    return order
