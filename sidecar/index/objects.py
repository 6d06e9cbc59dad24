"""The objects of a channel whose records an index addresses, and the streams that read them.

    plan of the channel, all hosts' entries ─▶ ChannelObjects
    a plan of these, or of ranges of them ─▶ read_plan ─▶ relay ─▶ buffers ─▶ on_bytes (range, bytes)

The bytes go the way of a channel: window, requests, retries, hedges and memory budget are the relay's. They
are seen in the buffers that they arrived in, as delivery writes these to /dev/null, so they are not copied.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sidecar.config.transport import transport_spec
from streamer.errors import BadAnswer, ConfigError, ErrorContext
from streamer.formats.record_index import object_name, object_version
from streamer.plan import is_modified
from streamer.plan.record_table import only_object
from streamer.relay.once import stream_once
from streamer.relay.staging.taps import Tap
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import open_transport
from streamer.sink.outlet import FileOutlet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.config.job import Job
    from streamer.formats.record_index import RecordIndex
    from streamer.plan import ObjectRef, Plan, Segment
    from streamer.s3.client.session import Clients

WHY_READ = "record borders are found in memory"


@dataclass(frozen=True, slots=True)
class Access:
    """What reads the objects of a job."""

    job: Job
    clients: Clients
    counters: ChannelCounters = field(default_factory=ChannelCounters)


class ChannelObjects:
    """The objects of a channel, those of all hosts, in plan order and each once.

    Holds 24 bytes an object beside the plan. Raises ConfigError for an object in two versions, BadAnswer for
    one without an ETag.
    """

    def __init__(self, plan: Plan) -> None:
        """`plan`: of a channel whose records have offsets. Takes seconds for a million objects."""
        self.names, self._versions, self._numbers = array("Q"), array("Q"), array("Q")
        self._entries = plan.entries
        known: dict[int, int] = {}
        for number in range(len(plan.entries)):
            ref = only_object(plan.entries, number)
            check_etag(ref)
            name = object_name(ref.bucket, ref.key)
            version = object_version(ref.bucket, ref.key, size=ref.size, etag=ref.etag, version=ref.version)
            if known.setdefault(name, version) != version:
                raise ConfigError(
                    f"the channel has two versions of s3://{ref.bucket}/{ref.key}, or two keys with one "
                    "hash; a record index has one version of each object"
                )
            if len(known) > len(self.names):
                self.names.append(name)
                self._versions.append(version)
                self._numbers.append(number)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> ObjectRef:
        return only_object(self._entries, self._numbers[number])

    def __iter__(self) -> Iterator[ObjectRef]:
        return (only_object(self._entries, number) for number in self._numbers)

    def without_row(self, index: RecordIndex) -> array[int]:
        """Return the numbers, in this sequence, of the objects whose version has no row in the index."""
        both = zip(self.names, self._versions, strict=True)
        return array("Q", [number for number, each in enumerate(both) if not index.has(*each)])

    @property
    def bytes(self) -> int:
        """Sum of the objects' sizes."""
        return sum(self._entries.sizes[number] for number in self._numbers)


def check_etag(ref: ObjectRef) -> None:
    """Raise BadAnswer for an object that the server lists without an ETag."""
    if is_modified(ref.etag):
        raise BadAnswer(
            "the server has no ETag for this object, and a record index holds for one version alone; copy "
            "the data to a server that has ETags, or stream without an index",
            ErrorContext(ref.bucket, ref.key),
        )


class _Scan(Tap):
    """Passes all bytes to a function."""

    def __init__(self, on_bytes: Callable[[Segment, memoryview], None]) -> None:
        self._on_bytes = on_bytes

    def see(self, each: Segment, data: memoryview) -> None:
        self._on_bytes(each, data)


async def read_plan(plan: Plan, on_bytes: Callable[[Segment, memoryview], None], access: Access) -> None:
    """Fetch the plan's bytes once; `on_bytes` gets them in order. Raises SourceError, and what it raises.

    The memory is valid during the call alone. The transport is the job's; `splice`, which keeps bytes out of
    memory, is replaced by what suits.
    """
    if not plan.total_bytes(0):
        return
    spec = transport_spec(access.job, plan.entries.buckets, [WHY_READ])
    if spec.wish == "splice":
        spec = replace(spec, wish="auto")
    async with open_transport(access.clients, spec) as transport:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            await stream_once(
                plan,
                transport.source,
                transport.tapped(transport.stages(WHY_READ), _Scan(on_bytes)),
                policy=spec.retry,
                counters=access.counters,
                open_outlet=lambda _: FileOutlet(nowhere),
            )
        finally:
            os.close(nowhere)
