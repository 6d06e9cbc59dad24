"""Some jobs of `python -m tests.machines results`, in the suite."""

from __future__ import annotations

import pytest

from tests.machines.results.machine import MACHINE


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("credentials")
def test_a_job_that_is_killed_while_it_uploads_ends_with_everything_in_s3() -> None:
    """The uploader is killed during its proof of permission, and in the next run all processes."""
    assert MACHINE.run(MACHINE.named("stub-255")).counts["runs"] == 3
