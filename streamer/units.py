"""Binary units of bytes, as numbers and in texts."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def human_bytes(count: float) -> str:
    """Return `count` bytes as a text of three significant digits and a binary unit, such as `1.21 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < KIB:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= KIB
    return f"{count:.3g} TiB"


def decimal_bytes(count: float) -> str:
    """Return `count` bytes of data for people: three significant digits and a decimal unit: `1.21 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
