"""Some jobs of `python -m tests.machines elastic`, in the suite."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.kit.stub import S3Stub
from tests.machines.elastic.drawn import Job
from tests.machines.elastic.run import Data, run_job


@pytest.mark.timeout(240)
def test_a_job_that_is_killed_and_resized_takes_each_global_batch_once(stub: S3Stub, tmp_path: Path) -> None:
    """Tar joined and not, over two hosts with copies, and of a mix; padding; three workers on two hosts."""
    data = Data(stub, tmp_path)
    found = sum((run_job(Job.draw(seed), data) for seed in (1439, 183, 3143)), Counter[str]())
    assert (found["kills"], found["workers"] >= 2) == (4, True)
