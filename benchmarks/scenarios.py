"""The scenarios: the origin's server, the objects, the reader, and the time limit of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.dataset import MIB, Shape

_BIG = Shape("big", 1, 8, 256 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    text: str
    """Heading of the scenario, one line."""
    server: str
    """Name of the origin's server (`origin.SERVERS`)."""
    shape: Shape
    limit: float = 20.0
    """Seconds after which a reader leaves; a slower client's figures are of the bytes until then."""
    reader_rate: int | None = None
    """Bytes per second that the reader reads; None for as many as it can."""
    mtu: int | None = None
    """MTU of a veth pair to the origin; None for loopback."""
    settings_from: str | None = None
    """Scenario from which every client's setting is taken; None to try each and keep the fastest."""
    single_setting: bool = False
    """Whether to use every client's first setting, its default."""


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="fast", text="no limits, plain HTTP", server="fast", shape=_BIG),
        Scenario(
            name="s3like",
            text="25 ms to the first byte, 90 MiB/s per connection, plain HTTP",
            server="paced",
            shape=_BIG,
            limit=10,
        ),
        Scenario(
            name="nic-9000",
            text="as s3like, but over veth with MTU 9000 and segmentation offloads off",
            server="paced",
            shape=replace(_BIG, objects=4),
            limit=10,
            mtu=9000,
            settings_from="s3like",
        ),
        Scenario(
            name="nic-1500",
            text="as s3like, but over veth with MTU 1500 and segmentation offloads off",
            server="paced",
            shape=replace(_BIG, objects=4),
            limit=10,
            mtu=1500,
            settings_from="s3like",
        ),
        Scenario(name="tls", text="no limits, TLS", server="tls", shape=_BIG),
        Scenario(
            name="tls-8",
            text="8 streams at once into 8 FIFOs, no limits, TLS",
            server="tls",
            shape=Shape("eight", 8, 1, 256 * MIB),
            settings_from="tls",
        ),
        Scenario(
            name="gzip",
            text="compressed objects, inflated into the FIFO; no limits, plain HTTP",
            server="fast",
            shape=Shape("gzip", 1, 8, 256 * MIB, gzip=True),
            settings_from="fast",
        ),
        Scenario(
            name="small",
            text="small objects at 25 ms to the first byte, plain HTTP",
            server="paced",
            shape=Shape("small", 1, 5000, 100_000),
            limit=6,
        ),
        Scenario(
            name="channels",
            text="20 streams at once into 20 FIFOs, 25 ms and 90 MiB/s per connection",
            server="paced",
            shape=Shape("channel", 20, 1, 100 * MIB),
            single_setting=True,
        ),
        Scenario(
            name="slow-reader",
            text="a reader that takes 100 MB/s, no other limit",
            server="fast",
            shape=replace(_BIG, objects=2),
            reader_rate=100_000_000,
            single_setting=True,
        ),
    )
}
