"""The memory that is there, and what of it is for bytes in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.process.resources import LEAST, MOST, default_budget, memory_limit
from streamer.units import MIB

GIB = 1024 * MIB


def tree(root: Path, cgroup: str, **files: str) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("limit", "budget"),
    [(64 * MIB, LEAST), (512 * MIB, 128 * MIB), (GIB + 3, 256 * MIB), (64 * GIB, MOST)],
)
def test_a_quarter_within_bounds(limit: int, budget: int) -> None:
    assert default_budget(limit) == budget


def test_v2_the_least_of_all_levels_counts(tmp_path: Path) -> None:
    files = {"pods/one/memory.max": "max", "pods/memory.max": str(300 * MIB), "memory.max": str(GIB)}
    assert memory_limit(tree(tmp_path, "0::/pods/one\n", **files)) == 300 * MIB


def test_v2_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    assert memory_limit(tree(tmp_path, "0::/\n", **{"memory.max": str(200 * MIB)})) == 200 * MIB


def test_v1_beside_v2(tmp_path: Path) -> None:
    files = {
        "memory/docker/a/memory.limit_in_bytes": str(100 * MIB),
        "memory/memory.limit_in_bytes": str(1 << 62),
    }
    cgroup = "5:devices:/docker/a\n4:cpu,memory:/docker/a\n0::/\n"
    assert memory_limit(tree(tmp_path, cgroup, **files)) == 100 * MIB


def test_without_any_limit_it_is_the_machine(tmp_path: Path) -> None:
    unlimited = memory_limit(tree(tmp_path, "0::/\n", **{"memory.max": "max"}))
    assert unlimited == memory_limit(str(tmp_path / "nothing"))
    assert unlimited > 256 * MIB
