"""The variables by which launchers tell a process its rank on its host, and how many ranks the host has.

A rank without a number of ranks is an error where the number matters: torchrun sets both; Lightning's own
launcher sets LOCAL_RANK alone, and prterun the rank among all hosts alone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Launcher(NamedTuple):
    """Variables of one launcher."""

    rank: str
    """Rank of the process on its host."""
    sizes: tuple[str, ...]
    """Number of ranks on the host, in the first of these that is set."""
    world: str
    """Number of ranks on all hosts."""


LAUNCHERS = (
    Launcher("LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), "WORLD_SIZE"),
    Launcher("OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",), "OMPI_COMM_WORLD_SIZE"),
    Launcher("MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",), "MV2_COMM_WORLD_SIZE"),
    Launcher("MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), "PMI_SIZE"),
    Launcher("HOROVOD_LOCAL_RANK", ("HOROVOD_LOCAL_SIZE",), "HOROVOD_SIZE"),
    Launcher("SLURM_LOCALID", ("SLURM_STEP_TASKS_PER_NODE",), "SLURM_NTASKS"),
)
"""torchrun, DeepSpeed (LOCAL_SIZE) and Lightning; Open MPI; MVAPICH; MPICH and Intel MPI; Horovod; Slurm's
srun (sbatch sets its rank too). A process may have the variables of several, of which the first counts:
torchrun runs within srun and mpirun.
"""
SIZES = (*(size for each in LAUNCHERS[:-1] for size in each.sizes), "PET_NPROC_PER_NODE")
"""Numbers of ranks on a host that a sidecar may find: not that of srun, which may start torchrun once. The
last is an option of torchrun, as Kubeflow's Trainer sets it.
"""
RANKS = (*(each.rank for each in LAUNCHERS), "PMIX_RANK", "RANK", "TF_CONFIG")
"""Variables that differ between the ranks of a host, the first that is set counts: also prterun's, and that
of TensorFlow's strategies.
"""
MOST = 1 << 20
"""Ranks are below this number."""


def local_share(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank on its host and the number of ranks there; None without a launcher.

    Raises ValueError if a launcher gives the one and not the other.
    """
    for launcher in LAUNCHERS:
        if (text := environment.get(launcher.rank, "")) in {"", "-1"}:  # -1: of no job
            continue
        size = next((name for name in launcher.sizes if environment.get(name)), "")
        given = re.sub(r"\(x\d+\)$", "", environment.get(size, ""))  # Slurm's 2(x3): 2 on each of 3 hosts
        if not size and (world := environment.get(launcher.world, "1" if text == "0" else "")) == "1":
            return 0, 1
        if not size:
            sizes = " and ".join(launcher.sizes)
            world = f" of {launcher.world} {world}" if world else ""
            raise ValueError(
                f"{launcher.rank} is {text}{world}, and {sizes}, the number of ranks on this host, not set"
            )
        if not all(each.isascii() and each.isdigit() for each in (text, given)):
            raise ValueError(f"{launcher.rank} is {text!r} and {size} {given!r}, which are no numbers")
        return int(text), int(given)
    if rank := environment.get("PMIX_RANK"):
        raise ValueError(f"PMIX_RANK is {rank}, and neither LOCAL_RANK nor LOCAL_WORLD_SIZE is set")
    return None
