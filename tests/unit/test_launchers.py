"""Which rank of a host a process is, by the variables of each launcher."""

from __future__ import annotations

import pytest

from streamer.launchers import local_share

SHARES: list[tuple[dict[str, str], tuple[int, int] | None]] = [
    ({}, None),
    ({"RANK": "3", "WORLD_SIZE": "4"}, None),
    ({"LOCAL_RANK": "-1"}, None),
    ({"LOCAL_RANK": "0"}, (0, 1)),
    ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "8"}, (1, 2)),
    ({"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}, (1, 2)),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1"}, (1, 2)),
    ({"MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, (0, 2)),
    ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_RANK": "3"}, (1, 2)),
    ({"HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}, (1, 2)),
    ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS": "6"}, (1, 2)),
    ({"SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
    ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}, (3, 4)),
]
UNKNOWN = [
    (
        {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"},
        "LOCAL_RANK is 1 of WORLD_SIZE 2, and LOCAL_W",
    ),
    ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE and LOCAL_SIZE, the number of ranks on this"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1, and LOCAL_WORLD_SIZE"),
    ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"}, "PMIX_RANK is 0, and neither LOCAL_RANK nor"),
    ({"SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}, "SLURM_STEP_TASKS_PER_NODE, the number"),
    ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, "which are no numbers"),
    (
        {"LOCAL_RANK": "a", "LOCAL_WORLD_SIZE": "2"},
        "LOCAL_RANK is 'a' and LOCAL_WORLD_SIZE '2', which are no",
    ),
]


@pytest.mark.parametrize(("environment", "share"), SHARES)
def test_the_share_of_a_process(environment: dict[str, str], share: tuple[int, int] | None) -> None:
    assert local_share(environment) == share


@pytest.mark.parametrize(("environment", "error"), UNKNOWN)
def test_a_share_that_is_not_known_is_an_error(environment: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        local_share(environment)
