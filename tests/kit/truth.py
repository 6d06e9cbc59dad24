"""What a trial's objects hold, what S3 has of them, and what every epoch of its channels must therefore be.

    contents ─ compressed, cut off ─▶ what is stored      contents ─ arranged, wrapped ─▶ the truth

Which entry comes when is the plan's own word (its rules have tests and test vectors of their own); every
byte of the stream is put together here, from the contents.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from dataclasses import dataclass

from streamer.formats.recordio import encode
from streamer.plan import ObjectRef, Plan
from tests.kit.trials import Compression, Trial

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BUCKET = "b"
TEXT = "label"
"""The attribute of an augmented manifest that is no object."""
REF = "source-ref"


def compress(data: bytes, how: Compression) -> bytes:
    """What is stored of `data`; nothing of nothing."""
    if not data or how == "none":
        return data
    return gzip.compress(data, 1, mtime=0) if how == "gzip" else zstd.compress(data, 1)


@dataclass(frozen=True)
class Piece:
    """Bytes of a stream that belong together: an object, a record of one, or a text."""

    name: str
    """`bucket/key` of the object; empty for a text."""
    data: bytes


class Contents:
    """A trial's objects by `bucket/key`."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.channels: list[dict[str, bytes]] = []
        for number, sizes in enumerate(trial.sizes):
            content = random.Random(f"{trial.seed} {number}")
            self.channels.append(
                {f"{BUCKET}/{self._key(number, i)}": content.randbytes(size) for i, size in enumerate(sizes)}
            )
        self.channels[0][f"{BUCKET}/{self._key(0, len(trial.sizes[0]))}"] = b"end"
        self.all = {name: data for objects in self.channels for name, data in objects.items()}
        self.stored = {name: compress(data, trial.compression) for name, data in self.all.items()}
        dice = random.Random(f"{trial.seed} change")
        self.changed: str | None = None
        """The object that is not, or not for long, what the channel was told."""
        self.now: bytes | None = None
        """What it holds after it was overwritten."""
        if trial.change != "nothing":
            names = sorted(name for name, data in self.channels[0].items() if data)
            self.changed = dice.choice(names)
        if trial.change == "overwritten":
            self.now = dice.randbytes(dice.randrange(400_000))
        if trial.change == "cut off" and self.changed is not None:
            whole = self.stored[self.changed]
            self.stored[self.changed] = whole[: -dice.randrange(1, len(whole))]

    def _key(self, channel: int, index: int) -> str:
        return (
            f"c{channel}/{index // 4:02d}/{index:03d}" if self._trial.folders else f"c{channel}/{index:03d}"
        )

    def manifest(self, channel: int) -> bytes:
        """The text that names the channel's objects one by one, not in the order of keys."""
        names = sorted(self.channels[channel])
        random.Random(f"{self._trial.seed} manifest {channel}").shuffle(names)
        prefix = f"s3://{BUCKET}/c{channel}/"
        if self._trial.naming == "manifest":
            keys = [name.removeprefix(f"{BUCKET}/c{channel}/") for name in names]
            return json.dumps([{"prefix": prefix}, *keys]).encode()
        lines = ({REF: f"s3://{name}", TEXT: {"place": i}} for i, name in enumerate(names))
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def pieces(self, plan: Plan, epoch: int) -> list[Piece]:
        """An epoch of `plan`, as it was listed."""
        found = []
        for index in plan.order(epoch):
            for item in plan.entries.items(index):
                name = f"{item.bucket}/{item.key}" if isinstance(item, ObjectRef) else ""
                data = self.all[name] if isinstance(item, ObjectRef) else item
                found.append(Piece(name, encode(data) if self._trial.wrap else data))
        return found
