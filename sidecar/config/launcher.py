"""The number of training processes on this host, as the launcher's environment has it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FROM_LAUNCHER = "from launcher"
"""Value of `Ranks.Count` that stands for this number."""
VARIABLES = ("LOCAL_WORLD_SIZE", "PET_NPROC_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables of torchrun's processes, of torchrun itself (as Kubeflow's Trainer sets it), and of Open MPI."""


def processes_here(environment: Mapping[str, str]) -> int:
    """Return the number of processes on this host. Raises ValueError unless the environment has one."""
    found = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if not found:
        raise ValueError(
            f"is from launcher, but none of {', '.join(VARIABLES)} is set here; set one to the number of "
            "training processes on this host, or write the number"
        )
    for name, text in found.items():
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise ValueError(f"is from launcher, but {name} is {text!r}, no number; set it to one")
    if len({int(text) for text in found.values()}) > 1:
        given = ", ".join(f"{name}={text}" for name, text in found.items())
        raise ValueError(f"is from launcher, but {given} differ; unset all but one")
    return int(next(iter(found.values())))


def count_of(value: Any) -> Any:
    """Return the number that a value of `Ranks.Count` stands for. Raises ValueError."""
    return processes_here(os.environ) if value == FROM_LAUNCHER else value
