"""The workloads of MLPerf Storage, their batches and the formula of accelerator utilisation. Pure.

The figures are those of the files `configs/dlio/workload/<model>_<accelerator>.yaml` of
github.com/mlcommons/storage, version 3.0, at the commits

    unet3d_a100     be18c3e5b1744142c23edb05c5b7b78fc806cdc0
    unet3d_h100     7e73663b64a7b49ad542527bc3b2040c7e7a446e
    unet3d_b200     0d75b41708cf30b991186aa58c53890cb3b7956e
    retinanet_b200  11460d004cc3127ba943a79cdc6fa0d9339eb7f8
    retinanet_mi355 76f45459b8a0ea67cffff896ae82af96cfcdab6c
    resnet50_a100   be18c3e5b1744142c23edb05c5b7b78fc806cdc0
    resnet50_h100   ac0424faa81f14d1a542264f0316357e2f70f41f
    cosmoflow_a100  e3ffed051b176a5acc82196127d11d4bab69664c
    cosmoflow_h100  c25079c2400ca62c360cbf1e970295d0e2250029

Version 3.0 accepts submissions of unet3d and retinanet on b200 and mi355; the other files are those of
earlier versions, which version 3.0 still has. A100 and H100 of UNet3D are comparable since version 1.0.

Accelerator utilisation is `total_compute_time / total_benchmark_running_time`, without the first step
(training/README.md, "Performance Metrics", at 3a1e063d6f6ea2f7f69136606841d81b7a6de43a).

The containers of samples (npz, JPEG, TFRecord) are left out: a sample is `record_length_bytes` bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

Piece = tuple[int, int, int]
"""Index of an object, and the first byte and the length of a range of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One model on one accelerator. The comments name the key of the configuration file."""

    sample: float
    """Mean bytes of a sample; record_length_bytes."""
    deviation: float = 0.0
    """Standard deviation of the bytes of a sample; record_length_bytes_stdev."""
    samples_per_object: int = 1
    """num_samples_per_file."""
    batch: int
    """Samples of a batch; batch_size."""
    computation: float
    """Seconds that the accelerator computes on a batch; computation_time."""
    loaders: int
    """Processes that read, one batch each at a time; read_threads."""
    least: float
    """Least utilisation that MLPerf accepts; metric.au."""

    @property
    def rate(self) -> float:
        """Bytes per second that keep one accelerator busy."""
        return self.batch * self.sample / self.computation


def _unet3d(computation: float) -> Load:
    return Load(
        sample=146_600_628, deviation=68_341_808, batch=7, computation=computation, loaders=4, least=0.90
    )


def _retinanet(batch: int, computation: float) -> Load:
    return Load(sample=322_957, batch=batch, computation=computation, loaders=8, least=0.85)


def _resnet50(computation: float) -> Load:
    return Load(
        sample=114_660.07,
        samples_per_object=1251,
        batch=400,
        computation=computation,
        loaders=8,
        least=0.90,
    )


def _cosmoflow(computation: float) -> Load:
    return Load(sample=2_828_486, deviation=71_311, batch=1, computation=computation, loaders=4, least=0.70)


LOADS = {
    "unet3d-a100": _unet3d(0.636),
    "unet3d-h100": _unet3d(0.323),
    "unet3d-b200": _unet3d(0.162),
    "retinanet-b200": _retinanet(24, 0.04755),
    "retinanet-mi355": _retinanet(32, 0.0634),
    "resnet50-a100": _resnet50(0.435),
    "resnet50-h100": _resnet50(0.224),
    "cosmoflow-a100": _cosmoflow(0.00551),
    "cosmoflow-h100": _cosmoflow(0.00350),
}


def sample_sizes(load: Load, count: int) -> list[int]:
    """Return the sizes of `count` different samples: quantiles of the normal distribution, shuffled.

    Their mean is that of the load. Sizes that the distribution has below 1 are 1.
    """
    if not load.deviation:
        return [round(load.sample)] * count
    normal = NormalDist(load.sample, load.deviation)
    sizes = [max(1, round(normal.inv_cdf((index + 0.5) / count))) for index in range(count)]
    random.Random(0).shuffle(sizes)  # noqa: S311 - the same order in every run
    return sizes


def batches(load: Load, objects: Sequence[int]) -> Iterator[list[Piece]]:
    """Yield the pieces of each whole batch of a stream over objects of these sizes, in order."""
    batch: list[Piece] = []
    wanted = load.batch
    for index, size in enumerate(objects):
        sample, done = size // load.samples_per_object, 0
        while done < load.samples_per_object:
            taken = min(wanted, load.samples_per_object - done)
            batch.append((index, done * sample, taken * sample))
            done += taken
            wanted -= taken
            if not wanted:
                yield batch
                batch, wanted = [], load.batch


def utilisation(load: Load, steps: int, seconds: float) -> float:
    """Return the accelerator utilisation of `steps` steps that took `seconds`, the first step left out."""
    return steps * load.computation / seconds
