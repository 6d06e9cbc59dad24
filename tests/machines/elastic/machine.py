"""Jobs that are killed and go on at other numbers of ranks: each global batch once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.kit.stub import StubThread
from tests.machines.elastic.drawn import Job
from tests.machines.elastic.run import Data, run_job
from tests.machines.machine import Machine, Result


class Elastic(Machine[Job]):
    """A case takes some seconds, with several processes of its own."""

    limit = 300.0
    workers = 1

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Serve one store of objects and their record indexes to all cases."""
        os.environ |= {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "secret"}
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        stub = StubThread()
        with tempfile.TemporaryDirectory(prefix="elastic-") as directory:
            try:
                self._data = Data(stub.start(), Path(directory))
                yield
            finally:
                stub.stop()

    def draw(self, seed: int) -> Job:
        return Job.draw(seed)

    def run(self, case: Job) -> Result:
        return Result(run_job(case, self._data))


MACHINE = Elastic()
