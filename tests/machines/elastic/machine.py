"""Jobs that are killed and go on at other numbers of ranks: each global batch once."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.kit.credentials import set_credentials
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
        set_credentials()
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
