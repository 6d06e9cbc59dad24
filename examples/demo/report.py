"""The report of the demo: the conditions that must hold, and the closing table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import JustifyMethod

    from examples.demo.dataset import Channel
    from streamer.trailer import Trailer

ACCURACY = 0.95
"""Accuracy that the classifier must exceed."""
COLUMNS = ("channel", "epoch", "records", "bytes", "GB/s", "waits:\nstorage", "waits:\ntrainer", "trailer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of the job after its end."""

    channels: Sequence[Channel]
    """The channels that were uploaded."""
    epochs: Mapping[str, int]
    """Number of times that the trainer read each channel."""
    plan: dict[str, Any]
    """Output of `penstock plan --json` before the sidecar started."""
    ready: dict[str, Any]
    """`/status` when the FIFOs were offered."""
    done: dict[str, Any]
    """`/status` after the trainer ended."""
    training: dict[str, Any]
    """The trainer's result."""
    trailers: Mapping[tuple[str, int], Trailer | None]
    exit_code: int
    """The sidecar's exit code after SIGTERM."""
    left_over: Sequence[str]
    """FIFOs that the sidecar did not remove."""

    def states(self) -> list[tuple[str, bool]]:
        """Return the text of every condition, and whether it held."""
        accuracy = self.training["accuracy"]
        found = [(f"accuracy on eval is {accuracy:.4f}, and must beat {ACCURACY}", accuracy > ACCURACY)]
        for channel in self.channels:
            found += self._outcomes_on(channel)
        return [
            *found,
            ("the trainer held no credentials and loaded no storage client", not self.training["storage"]),
            (f"the sidecar ended with exit code {self.exit_code} after SIGTERM", self.exit_code == 0),
            (f"FIFOs left behind: {len(self.left_over)}", not self.left_over),
        ]

    def _outcomes_on(self, channel: Channel) -> list[tuple[str, bool]]:
        planned = self.plan["channels"][channel.name]
        counted = self.training["records"][channel.name]
        due = [channel.records] * self.epochs[channel.name]
        size = f"{channel.total_bytes:,} bytes in {channel.objects} object(s)"
        digest = planned["digest"][:12]
        return [
            (
                f"{channel.name}: the plan is what was uploaded, {size}",
                (planned["objects"], planned["bytes"]) == (channel.objects, channel.total_bytes),
            ),
            (f"{channel.name}: records by epoch {counted}, due {due}", counted == due),
            *(
                (
                    f"{channel.name}: the trailer of epoch {epoch} is complete, plan {digest}",
                    self._proven(channel.name, epoch),
                )
                for epoch in range(len(due))
            ),
        ]

    def _proven(self, channel: str, epoch: int) -> bool:
        trailer, planned = self.trailers[channel, epoch], self.plan["channels"][channel]
        return trailer is not None and (
            (trailer.state, trailer.error) == ("complete", None)
            and trailer.bytes_delivered == trailer.bytes_total == planned["bytes"]
            and trailer.digest == planned["digest"]
        )

    def show(self) -> bool:
        """Print the tables, the conditions and the outcome; return whether every condition held."""
        Console().print(self._streams(), self._job())
        states = self.states()
        failed = sum(not held for _, held in states)
        for what, held in states:
            print(f"{'ok' if held else 'FAILED':6}  {what}")
        state = "FAILED" if failed else "passed"
        print(f"demo: {state}, {len(states) - failed} of {len(states)} conditions hold")
        return not failed

    def _streams(self) -> Table:
        table = Table(title="What was streamed", title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
        for name in COLUMNS:
            justify: JustifyMethod = "left" if name in ("channel", "trailer") else "right"
            table.add_column(name, justify=justify, no_wrap=True)
        for channel in self.channels:
            counted = self.training["records"][channel.name]
            for epoch in range(self.epochs[channel.name]):
                trailer = self.trailers[channel.name, epoch]
                table.add_row(
                    channel.name,
                    str(epoch),
                    f"{counted[epoch]:,}" if epoch < len(counted) else "-",
                    "-" if trailer is None else f"{trailer.bytes_delivered:,}",
                    *[""] * 3,
                    "none" if trailer is None else trailer.state,
                )
            status = self.done["channels"][channel.name]
            rate, on_storage, on_trainer = shares(status)
            proven = sum(self._proven(channel.name, epoch) for epoch in range(self.epochs[channel.name]))
            table.add_row(
                channel.name,
                "all",
                f"{sum(counted):,}",
                f"{status['written_bytes']:,}",
                f"{rate:.2f}",
                f"{on_storage:.0%}",
                f"{on_trainer:.0%}",
                f"{proven} proven",
                style="bold",
                end_section=True,
            )
        return table

    def _job(self) -> Table:
        table = Table(title="What it took", title_justify="left", show_header=False, box=SIMPLE_HEAD)
        written = sum(status["written_bytes"] for status in self.done["channels"].values())
        start = self.ready["process"]["cpu_seconds"]
        streaming = self.done["process"]["cpu_seconds"] - start
        seconds = self.training["seconds"]
        devices = "GPU" if "GPU" in self.training["devices"] else "CPU"
        table.add_row("accuracy on eval", f"{self.training['accuracy']:.4f} (must beat {ACCURACY})")
        table.add_row(
            "sidecar, CPU", f"{streaming / written * 1e9:.2f} CPU-s/GB streaming, and {start:.2f} s to start"
        )
        table.add_row("sidecar, memory", f"{self.done['process']['max_rss_bytes'] / 2**20:.0f} MiB at most")
        table.add_row("sidecar, transport", self.done["transport"])
        table.add_row(
            "trainer",
            f"{seconds['import']:.1f} s import, {seconds['train']:.1f} s training, "
            f"{seconds['evaluate']:.1f} s evaluation",
        )
        table.add_row("framework", f"{self.training['framework']} on {devices}")
        return table


def shares(status: dict[str, Any]) -> tuple[float, float, float]:
    """Return GB/s while a reader had the FIFO open, and the shares of waits for storage and for the trainer.

    GB is 1e9 bytes.
    """
    seconds = status["seconds"]
    busy = seconds["starved"] + seconds["blocked"] + seconds["moving"]
    if not busy:
        return 0.0, 0.0, 0.0
    return status["written_bytes"] / busy / 1e9, seconds["starved"] / busy, seconds["blocked"] / busy
