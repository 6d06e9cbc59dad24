"""The patches of the catalogue still apply; the machine `plants` says at night who finds the bugs."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.machines.plants.catalogue import PLANTS, Plant

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_every_patch_applies(plant: Plant) -> None:
    """To what is there once, into another program; the tests that it names exist."""
    text = (ROOT / plant.path).read_text()
    planted = plant.planted(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert plant.tests
    for name in plant.tests:
        path, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / path).read_text()


def test_there_are_enough_of_them() -> None:
    assert len(PLANTS) >= 40
    assert max(Counter(plant.name for plant in PLANTS).values()) == 1
