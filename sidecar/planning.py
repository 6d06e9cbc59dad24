"""From a channel's configuration to its plan: which source, arranged how, for which host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from streamer.plan import Arrangement, Shard
from streamer.source.listing import plan_prefix
from streamer.source.manifests import plan_augmented, plan_manifest
from streamer.source.retry import Attempts, retry_while_unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.identity import Hosts
    from sidecar.request import ChannelConfig
    from streamer.errors import SourceError
    from streamer.plan import Plan
    from streamer.source.described import PlanMemory
    from streamer.source.heads import Heads
    from streamer.source.retry import RetryPolicy


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
    plan: Callable[[Callable[[], None]], Awaitable[Plan]],
    policy: RetryPolicy,
    *,
    on_wait: Callable[[SourceError], None] | None = None,
) -> Plan:
    """What `plan` makes, asked again while storage is away or this machine's clock is wrong.

    `plan` is given what to call for each further page, row or piece of a manifest: `give_up_after` is the
    time without any. `on_wait` is told why, at every attempt. Raises SourceError, the first one if the
    policy allows no time.
    """
    if policy.give_up_after <= 0:
        return await plan(lambda: None)
    attempts, furthest = Attempts(policy), 0

    async def anew() -> Plan:
        reached = 0

        def progressed() -> None:
            nonlocal reached, furthest
            reached += 1
            if reached > furthest:  # what an earlier attempt had too is no progress
                furthest = reached
                attempts.progressed()

        return await plan(progressed)

    return await retry_while_unavailable(anew, attempts, what="a listing", on_wait=on_wait)


async def plan_channel(
    client: Any,
    channel: ChannelConfig,
    hosts: Hosts,
    *,
    shard_by: Literal["objects", "bytes"],
    heads: Heads,
    progress: Callable[[int], None],
    memory: PlanMemory,
) -> Plan:
    """What the channel streams on this host, as S3 has it now. Raises SourceError, ConfigError.

    `progress` is told how many entries are known so far, often. `memory`: what all plans may take.
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
            return await plan_prefix(client, source.uri, arrangement, progress=progress, memory=memory)
        case "ManifestFile":
            return await plan_manifest(
                client, source.uri, arrangement, heads=heads, progress=progress, memory=memory
            )
        case "AugmentedManifestFile":
            return await plan_augmented(
                client,
                source.uri,
                source.attribute_names,
                arrangement,
                heads=heads,
                progress=progress,
                memory=memory,
            )
