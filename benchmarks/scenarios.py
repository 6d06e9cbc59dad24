"""What is measured: an origin's server, the objects, the reader, and how long a run may take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.dataset import MIB, Shape

_BIG = Shape("big", 1, 8, 256 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    text: str
    """One line for a heading."""
    server: str
    """Which of the origin's servers (`origin.SERVERS`)."""
    shape: Shape
    limit: float = 20.0
    """Seconds after which a reader leaves; a slower client is measured on what it delivered by then."""
    reader_rate: int | None = None
    """Bytes per second that the reader takes; None for as fast as it can."""
    mtu: int | None = None
    """Put the origin behind a veth pair of this MTU."""
    settings_from: str | None = None
    """Take every client's setting from this scenario; else each is tried and the fastest is kept."""
    single_setting: bool = False
    """Use every client's first setting, its default."""

    def scaled(self, factor: float) -> Scenario:
        """The same with about `factor` times the bytes."""
        return replace(self, shape=self.shape.scaled(factor))


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
            text="a reader that takes 100 MB/s, no other limit: what does it cost to wait?",
            server="fast",
            shape=replace(_BIG, objects=2),
            reader_rate=100_000_000,
            single_setting=True,
        ),
    )
}
GROUPS = {"nic": ("nic-9000", "nic-1500")}
"""Names that stand for several scenarios."""


def choose(names: str) -> list[Scenario]:
    """The scenarios of a comma-separated list, in the order of `SCENARIOS`. Raises ValueError."""
    wanted: set[str] = set()
    for name in filter(None, (name.strip() for name in names.split(","))):
        if name == "all":
            wanted.update(SCENARIOS)
        elif name in GROUPS:
            wanted.update(GROUPS[name])
        elif name in SCENARIOS:
            wanted.add(name)
        else:
            raise ValueError(f"no scenario {name!r}; there are {', '.join((*SCENARIOS, *GROUPS, 'all'))}")
    return [scenario for name, scenario in SCENARIOS.items() if name in wanted]
