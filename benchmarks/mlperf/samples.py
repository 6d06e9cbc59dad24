"""The objects of a workload: few distinct ones, and links to them, so that a long run takes little memory."""

from __future__ import annotations

import math
import os

from benchmarks.dataset import MIB, DataSet, Shape, nginx_etag
from benchmarks.mlperf.loads import Load, sample_sizes

DISTINCT_BYTES = 2e9
"""Bytes of the distinct objects, about."""


class Samples(DataSet):
    """Objects for `accelerators` streams of a load, enough for `steps` steps of each."""

    def __init__(
        self, load: Load, root: str, *, accelerators: int, steps: int, distinct_bytes: float = DISTINCT_BYTES
    ) -> None:
        objects = math.ceil(steps * load.batch / load.samples_per_object) + 1
        size = load.samples_per_object * load.sample
        self.distinct = max(1, min(objects, int(distinct_bytes / size)))
        samples = sample_sizes(load, self.distinct)
        self.sizes = [load.samples_per_object * samples[index % self.distinct] for index in range(objects)]
        self.largest = max(samples)
        """Bytes of the largest sample."""
        super().__init__(Shape("samples", accelerators, objects, round(size)), root)

    @property
    def keys(self) -> list[str]:
        return [self.shape.key(index) for index in range(self.shape.objects)]

    def directory(self, accelerator: int) -> str:
        """Return the directory with the objects of one stream."""
        return os.path.join(self.root, "objects", self.shape.bucket(accelerator))

    def create(self) -> None:
        """Write the distinct objects, the links to them and the listings. Raises OSError."""
        os.makedirs(os.path.join(self.root, "lists"))
        first = self.directory(0)
        for accelerator in range(self.shape.buckets):
            os.makedirs(self.directory(accelerator))
            for index, key in enumerate(self.keys):
                path = os.path.join(self.directory(accelerator), key)
                if accelerator == 0 and index < self.distinct:
                    self._write(path, self.sizes[index])
                else:
                    os.link(os.path.join(first, self.keys[index % self.distinct]), path)
            self.write_listing(self.shape.bucket(accelerator), self._entries(first))

    def _write(self, path: str, size: int) -> None:
        view = memoryview(self._pool)
        with open(path, "wb", buffering=0) as file:
            while size > 0:
                size -= file.write(view[: min(size, 16 * MIB)])

    def _entries(self, directory: str) -> list[tuple[str, int, str]]:
        made = []
        for index, (key, size) in enumerate(zip(self.keys, self.sizes, strict=True)):
            status = os.stat(os.path.join(directory, self.keys[index % self.distinct]))
            made.append((key, size, nginx_etag(int(status.st_mtime), size)))
        return made
