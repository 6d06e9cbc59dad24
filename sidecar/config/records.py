"""The keys `Records` and `Ranks` of a channel's `Penstock` section.

`Ranks.Count` may be the number of training processes on this host, as the launcher's environment has it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, StrictStr, model_validator

from sidecar.config.index_place import index_uri
from sidecar.config.model import Model, Size, valid_for
from streamer.formats.record_format import RecordFormat
from streamer.launchers import SIZES
from streamer.plan.record_order import BLOCK, Remainder

if TYPE_CHECKING:
    from collections.abc import Mapping

FROM_LAUNCHER = "from launcher"
"""Value of `Ranks.Count` that stands for this number."""
MOST_RANKS = 64
"""Most rank FIFOs of a channel on one host."""
LARGEST_BATCH = 1 << 26
"""Most records of a global batch; a higher number is a mistake, and takes minutes to repeat records."""
LARGEST_BLOCK = 1 << 40
"""Most bytes of a block: 1 TiB."""


def _format(value: str) -> str:
    return str(RecordFormat.parse(value))


IndexPlace = Annotated[StrictStr, Field(min_length=1), valid_for(lambda place: index_uri(place, ""))]
"""Folder of record indexes, or a prefix of S3 URIs."""


class RecordsConfig(Model):
    """The records of a channel's objects: their format, and where the index of their offsets is."""

    format: Annotated[StrictStr, AfterValidator(_format)]
    """TFRecord, RecordIO, lines, tar, or fixed:BYTES for records of one size, which need no index.

    Readers without a `record_format` of their own read the channel by it.
    """
    index: IndexPlace | None = None
    """Folder of the record index, or a prefix of S3 URIs."""

    @model_validator(mode="after")
    def _indexed(self) -> Self:
        if self.record_format.size and self.index is not None:
            raise ValueError(f"Index has no meaning with Format: {self.format}, which needs none; remove it")
        return self

    @property
    def place(self) -> str:
        """The place of the index, which records have unless they are of one size."""
        if self.index is None:
            raise AssertionError
        return self.index

    @property
    def record_format(self) -> RecordFormat:
        """The format of the objects' records."""
        return RecordFormat.parse(self.format)


def processes_here(environment: Mapping[str, str]) -> int:
    """Return the number of processes on this host. Raises ValueError unless the environment has one."""
    found = {name: environment[name] for name in SIZES if environment.get(name)}
    if not found:
        raise ValueError(
            f"is from launcher, but none of {', '.join(SIZES)} is set here; set one to the number of "
            "training processes on this host, or write the number"
        )
    for name, text in found.items():
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise ValueError(f"is from launcher, but {name} is {text!r}, no number; set it to one")
    if len({int(text) for text in found.values()}) > 1:
        given = ", ".join(f"{name}={text}" for name, text in found.items())
        raise ValueError(f"is from launcher, but {given} differ; unset all but one")
    return int(next(iter(found.values())))


def count_of(value: Any) -> Any:
    """Return the number that a value of `Ranks.Count` stands for. Raises ValueError."""
    return processes_here(os.environ) if value == FROM_LAUNCHER else value


_Fifos = Annotated[StrictInt, Field(ge=1, le=MOST_RANKS)]
"""A number of rank FIFOs."""


class RanksConfig(Model):
    """Rank FIFOs of a channel. With a global batch they share it by record, else by object."""

    count: Annotated[
        _Fifos, BeforeValidator(count_of, json_schema_input_type=_Fifos | Literal["from launcher"])
    ]
    """Ranks on each host, one for each training process. `from launcher`: as many as the launcher starts."""
    global_batch: Annotated[StrictInt, Field(ge=1, le=LARGEST_BATCH)] | None = None
    """Records of a global batch, over all ranks of all hosts."""
    workers: Annotated[StrictInt, Field(ge=1, le=MOST_RANKS)] = 1
    """FIFOs of each rank, one for each worker of its DataLoader, which takes a slice of each in turn."""
    remainder: Remainder = "drop"
    """What becomes of the last records, which fill no global batch."""
    block: Annotated[Size, Field(gt=0, le=LARGEST_BLOCK)] | None = None
    """Bytes of a block, which the shuffle keeps together. Unset: 1 MiB."""
    copies: Annotated[StrictInt, Field(ge=1, le=MOST_RANKS)] = 1
    """FIFOs of each rank, which all get the same bytes, from one download."""
    fetch: Literal["auto", "separately", "together"] = "auto"
    """`together`: the ranks of a host are fetched as one stream, in large parts, and read at one pace.

    `auto`: likewise if their slices are small, else `separately`.
    """

    @model_validator(mode="after")
    def _by_record_or_not(self) -> Self:
        if self.global_batch is None:
            given = (name for name in self.model_fields_set if getattr(self, name) is not None)
            if idle := sorted({*given} - {"count"}):
                key = type(self).model_fields[idle[0]].alias
                raise ValueError(f"{key} has no meaning without GlobalBatch; add it")
            return self
        if self.global_batch % self.count:
            raise ValueError(
                f"GlobalBatch {self.global_batch} cannot be divided over {self.count} ranks in equal slices; "
                "make it a multiple of Count times the hosts"
            )
        if self.fifos > MOST_RANKS:
            raise ValueError(
                f"Count {self.count} times Workers {self.workers} times Copies {self.copies} are more than "
                f"{MOST_RANKS} FIFOs; lower one"
            )
        return self

    @property
    def fifos(self) -> int:
        """Number of FIFOs on each host."""
        return self.count * self.workers * self.copies

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return BLOCK if self.block is None else int(self.block)


def _counted(value: Any) -> Any:
    """Return the section that a number of rank FIFOs stands for."""
    if isinstance(value, int) or value == FROM_LAUNCHER:
        return {"Count": value}
    if isinstance(value, (dict, RanksConfig)):
        return value
    raise ValueError(
        f"must be a number of rank FIFOs, or a mapping such as {{Count: 4, GlobalBatch: 128}}, and not "
        f"{value!r}"
    )


Ranks = Annotated[
    RanksConfig,
    BeforeValidator(
        _counted,
        json_schema_input_type=_Fifos | Literal["from launcher"] | RanksConfig,
    ),
]
"""`Ranks: 4` is short for `Ranks: {Count: 4}`."""
