"""Sizes as texts: binary units for memory, decimal units for data."""

from __future__ import annotations

import pytest

from streamer.units import GIB, KIB, MIB, counted, decimal_bytes, human_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (1010 * KIB, "1010 KiB"),
        (MIB - 1, "1 MiB"),
        (1.5 * MIB, "1.5 MiB"),
        (512 * MIB, "512 MiB"),
        (1.21 * GIB, "1.21 GiB"),
        (4096 * GIB, "4 TiB"),
        (5000 * 1024 * GIB, "5000 TiB"),
    ],
)
def test_memory(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999 B"),
        (1000, "1 kB"),
        (99_970, "100 kB"),
        (999_600, "1 MB"),
        (20_002_370, "20 MB"),
        (1.21e9, "1.21 GB"),
        (10e12, "10 TB"),
    ],
)
def test_data(count: float, text: str) -> None:
    assert decimal_bytes(count) == text


def test_a_count_of_one_is_singular() -> None:
    assert [counted(count, "object") for count in (0, 1, 2)] == ["0 objects", "1 object", "2 objects"]
    assert counted(2, "entry", "entries") == "2 entries"
