"""Some jobs of `python -m tests.machines elastic`, in the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.stub import S3Stub
from tests.machines.elastic.drawn import Job
from tests.machines.elastic.run import Data, run_job


@pytest.mark.timeout(240)
def test_a_job_that_is_killed_and_resized_takes_each_global_batch_once(stub: S3Stub, tmp_path: Path) -> None:
    """Tar joined and not, over two hosts with copies, and of a mix; TFRecord with padding."""
    data = Data(stub, tmp_path)
    assert sum(run_job(Job.draw(seed), data)["kills"] for seed in (1439, 183)) == 2
