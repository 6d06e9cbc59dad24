"""Units of bytes: binary for memory, decimal for data.

Memory (budgets, quotas, parts, pipes) is counted as job files and Linux count it: `512 MiB`. Data (objects,
epochs, disks, bytes per second) is counted as S3, networks and disks count it: `1.21 GB`.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("kB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """Return `count` bytes of memory as a text of three significant digits, such as `1.21 GiB`."""
    return _in_units(count, KIB, _BINARY)


def decimal_bytes(count: float) -> str:
    """Return `count` bytes of data as a text of three significant digits, such as `1.21 GB`."""
    return _in_units(count, 1000, _DECIMAL)


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return a count with its noun in singular or plural, such as `1 object`. `several`: or `one` with s."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def _in_units(count: float, base: int, units: tuple[str, ...]) -> str:
    """Return a count in the largest unit that leaves at least 1; units are powers of `base`."""
    if abs(count) < base:
        return f"{count:.0f} B"
    power = 1
    while (
        power < len(units) and abs(count) / base**power >= base - 0.5
    ):  # it would be rounded to 1 of the next
        power += 1
    number = count / base**power
    digits = f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
    return f"{digits} {units[power - 1]}"
