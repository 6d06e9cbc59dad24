"""The jobs that are run under faults: small, of two channels, so that one can show that it does not suffer.

Channel `a` has what the shape is about, channel `c` is plain. Two epochs of each are read. One of the two is
read by Penstock's own reader, the other as any program reads a FIFO.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamer.formats.recordio import encode
from tests.kit.processes import job
from tests.kit.stub import Answer, Fault, S3Stub, fails

EPOCHS = 2
_A = [1_400_000, 0, 1, 300_007, 65_536, 700_000]
_C = [500_000, 200_000, 3]
_GONE = 4
"""Which object of the failing channel is gone after it was listed."""
RECORD, BATCH = 4096, 8
"""Bytes of a record that ranks share, and records of a rank in a step."""
RESUMED_AT = 1_000_003
"""Byte of epoch 0 that a resumed job begins with."""


def _contents(sizes: list[int], seed: int) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(size) for size in sizes]


A, C = _contents(_A, 1), _contents(_C, 2)
RECORDS = [data[: len(data) // RECORD * RECORD] for data in A]
"""Objects of whole records."""


def fill(stub: S3Stub) -> None:
    """Put the objects of all shapes."""
    for index, data in enumerate(A):
        stub.objects[f"b/a/{index}"] = stub.objects[f"b/gone/a/{index}"] = data
        stub.objects[f"b/gzip/a/{index}"] = gzip.compress(data, 1)
        stub.objects[f"b/records/a/{index}"] = RECORDS[index]
    stub.objects |= {f"b/c/{index}": data for index, data in enumerate(C)}

    def weather(name: str, start: int, size: int) -> Fault | None:
        return _gone if name == f"b/gone/a/{_GONE}" else None

    stub.weather = weather


async def _gone(answer: Answer) -> Any:
    return await fails(404, "NoSuchKey")(answer)


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the stub is."""

    plain: str
    secure: str
    """Over TLS."""
    ca: str
    """The file of its authority."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A job, and how it is run."""

    name: str
    transport: str = "splice"
    keeper: bool = True
    tls: bool = False
    prefix: str = "b/a/"
    wrapped: bool = False
    ranks: int = 1
    by_record: bool = False
    """Whether the ranks share records, and not objects: one stream is dealt to their FIFOs."""
    resumed: bool = False
    channel: dict[str, Any] = field(default_factory=dict)
    """Further keys of channel `a`."""
    failing: bool = False
    """Whether channel `a` fails for good in each epoch."""

    @property
    def fifos(self) -> list[str]:
        """Names that FIFOs begin with."""
        return ["c", *(["a"] if self.ranks == 1 else [f"a-{rank}" for rank in range(self.ranks)])]

    def truth(self, fifo: str, epoch: int) -> bytes:
        """The bytes that the FIFO of an epoch must bring."""
        if fifo == "c":
            objects = C
        elif self.by_record:
            data, size = b"".join(RECORDS), RECORD * BATCH
            steps = len(data) // (size * self.ranks)
            return b"".join(data[at : at + size] for at in range(
                int(fifo[2:]) * size, steps * size * self.ranks, size * self.ranks
            ))  # fmt: skip
        elif self.ranks > 1:
            objects = A[int(fifo[2:]) :: self.ranks]
        else:
            objects = A
        whole = b"".join(encode(data) if self.wrapped and fifo == "a" else data for data in objects)
        return whole[RESUMED_AT:] if self.resumed and epoch == 0 and fifo == "a" else whole

    def document(self, servers: Servers, base: Path) -> dict[str, Any]:
        """The job file."""
        url = servers.secure if self.tls else servers.plain
        endpoint = {"Url": url, "PathStyle": True} | ({"CaBundle": servers.ca} if self.tls else {})
        document = job(
            url,
            base,
            self.prefix,
            "b/c/",
            Endpoint=endpoint,
            Transport=self.transport,
            PartSize="512KiB",
            MemoryBudget="8MiB",
            RequestsInFlight=4,
            StallTimeout=2,
            GiveUpAfter=8,
        )
        of_a = document["InputDataConfig"][0]
        of_a |= self.channel
        if self.wrapped:
            of_a["RecordWrapperType"] = "RecordIO"
        if self.by_record:
            ranks = {"Count": self.ranks, "GlobalBatch": BATCH * self.ranks}
            of_a["Penstock"] = {"Ranks": ranks, "Records": {"Format": f"fixed:{RECORD}"}}
        elif self.ranks > 1:
            of_a["Penstock"] = {"Ranks": self.ranks}
        return document

    def arguments(self, path: str, keeper: str) -> list[str]:
        """The command's arguments."""
        state = {"format": 1, "channel": "a", "epoch": 0, "offset": RESUMED_AT, "skip": 0, "records": 0}
        resume = ["--resume", str(state | {"digest": "0" * 64}).replace("'", '"'), "--resume-anyway"]
        return ["run", "-c", path, *(["--keeper", keeper] if self.keeper else []), *(resume * self.resumed)]


_GZIP = {"CompressionType": "Gzip"}
CLOSE = {"Penstock": {"WhenFailed": "close"}}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("splice", keeper=False),
        Shape("buffered", "buffered", keeper=False),
        Shape("aiobotocore", "aiobotocore", keeper=False),
        Shape("kept-splice"),
        Shape("kept-buffered", "buffered"),
        Shape("kept-aiobotocore", "aiobotocore"),
        Shape("tls", "buffered", keeper=False, tls=True),
        Shape("kept-tls", "buffered", tls=True),
        Shape("kept-tls-aiobotocore", "aiobotocore", tls=True),
        Shape("gzip", "buffered", keeper=False, prefix="b/gzip/a/", channel=_GZIP),
        Shape("kept-gzip", "aiobotocore", prefix="b/gzip/a/", channel=_GZIP),
        Shape("kept-gzip-wrapped", "buffered", prefix="b/gzip/a/", channel=_GZIP, wrapped=True),
        Shape("kept-wrapped", wrapped=True),
        Shape("ranks", keeper=False, ranks=2),
        Shape("kept-ranks", "buffered", ranks=2),
        Shape("records", "buffered", keeper=False, prefix="b/records/a/", ranks=2, by_record=True),
        Shape("kept-records", prefix="b/records/a/", ranks=2, by_record=True),
        Shape(
            "closed",
            "buffered",
            keeper=False,
            prefix="b/gone/a/",
            wrapped=True,
            channel=CLOSE,
            failing=True,
        ),
        Shape("kept-closed", "buffered", prefix="b/gone/a/", wrapped=True, channel=CLOSE, failing=True),
        Shape("kept-failing", prefix="b/gone/a/", failing=True),
        Shape("resumed", keeper=False, resumed=True),
        Shape("kept-resumed", "buffered", resumed=True),
    )
}
"""By name."""
