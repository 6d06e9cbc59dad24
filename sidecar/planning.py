"""From a channel's configuration to its plan: which source, arranged how, for which host."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from streamer.errors import GaveUp, Skewed, SourceError, Transient
from streamer.plan import Arrangement, Shard
from streamer.source.listing import plan_prefix
from streamer.source.manifests import plan_augmented, plan_manifest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.identity import Hosts
    from sidecar.request import ChannelConfig
    from streamer.plan import Plan
    from streamer.relay.retry import RetryPolicy
    from streamer.source.heads import Heads


@dataclass(frozen=True, slots=True)
class Planned:
    """What a channel streams on this host, and how it is dealt over its FIFOs."""

    whole: Plan
    fifos: dict[str, Plan]
    """By the names that the trainer knows; `whole` alone, unless the channel has several lanes."""

    @classmethod
    def dealt(cls, whole: Plan, names: tuple[str, ...]) -> Planned:
        """`whole` over the FIFOs of these names."""
        plans = (whole,) if len(names) == 1 else whole.lanes(len(names))
        return cls(whole, dict(zip(names, plans, strict=True)))


async def patiently(
    plan: Callable[[], Awaitable[Plan]], policy: RetryPolicy, *, on_wait: Callable[[SourceError], None]
) -> Plan:
    """What `plan` makes, asked again while storage is away or this machine's clock is wrong.

    `on_wait` is told why, at every attempt. Raises SourceError: what came first if the policy allows no time.
    """
    failures, since, first = 0, time.monotonic(), None
    while True:
        try:
            return await plan()
        except (Transient, Skewed) as error:
            if policy.give_up_after <= 0:
                raise
            first = first or error
            spent = time.monotonic() - since
            if spent >= policy.give_up_after:
                raise GaveUp(
                    f"gave up after {spent:.0f} s without a listing; first error: {first.message}; "
                    f"last error: {error.message}",
                    error.where,
                ) from error
            on_wait(error)
            await asyncio.sleep(policy.wait(failures, error.retry_after))
            failures += 1


async def plan_channel(
    client: Any,
    channel: ChannelConfig,
    hosts: Hosts,
    *,
    shard_by: Literal["objects", "bytes"],
    heads: Heads,
    progress: Callable[[int], None],
) -> Plan:
    """What the channel streams on this host, as S3 has it now. Raises SourceError, ConfigError.

    `progress` is told how many entries are known so far, often.
    """
    source = channel.source
    arrangement = Arrangement(
        wrap=channel.record_wrapper_type == "RecordIO",
        inflate=channel.compression_type == "Gzip",
        join=channel.penstock.join,
        seed=None if channel.shuffle_config is None else channel.shuffle_config.seed,
        shard=replace(hosts.shard(source) or Shard(), by="bytes" if shard_by == "bytes" else "count"),
    )
    match source.s3_data_type:
        case "S3Prefix":
            return await plan_prefix(client, source.uri, arrangement, progress=progress)
        case "ManifestFile":
            return await plan_manifest(client, source.uri, arrangement, heads=heads, progress=progress)
        case "AugmentedManifestFile":
            return await plan_augmented(
                client, source.uri, source.attribute_names, arrangement, heads=heads, progress=progress
            )
