"""`penstock top`: the status page in a terminal, from the same events.

A frame is a pure function of one event, so that tests can compare frames. The terminal's alternate screen is
redrawn with every event, once a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamer.units import MIB, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

COLOURS = {
    "trainer": "green", "storage": "magenta", "faults": "red", "failed": "red", "mixed": "yellow",
    "limit": "yellow", "even": "blue", "idle": "bright_black",
}  # fmt: skip
STATES = (
    ("blocked", "waiting for the trainer", "green"),
    ("starved", "waiting for storage", "magenta"),
    ("limited", "held by a limit", "yellow"),
    ("moving", "moving bytes", "blue"),
    ("idle", "no reader", "bright_black"),
)
SPARKS = " ▁▂▃▄▅▆▇█"
SHOWN_ERRORS = 2


def watch(events: Iterable[dict[str, Any]], *, once: bool) -> None:
    """Show events until they end or the user interrupts. `once`: print the first event and return."""
    console = Console()
    if once:
        console.print(frame(next(iter(events))))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for event in events:
            live.update(frame(event), refresh=True)


def frame(event: dict[str, Any]) -> Group:
    """Return the screen that shows one event."""
    header = Text.assemble(
        ("Penstock ", "bold"),
        ("ready", "bold green") if event["ready"] else ("not ready: " + event["why"], "bold red"),
        (f"  {event['host']['name']} · {event['transport']}", "bright_black"),
    )
    process = event["process"]
    footer = Text(
        f"{_limits(event['limits'])}"
        f"process {process['rss_bytes'] // MIB} MiB, {process['cpu_seconds']:.1f} CPU-s · "
        f"{event['requests']['parts'] + event['requests']['planning']} requests, "
        f"about ${event['requests']['dollars']:.2g}",
        style="bright_black",
    )
    return Group(header, *(_channel(each) for each in event["channels"]), footer)


def _limits(limits: dict[str, Any]) -> str:
    """Return the limits as the beginning of a line; empty while the job starts."""
    if not limits:
        return ""
    adapt = "requests in flight adapt, now" if limits["requests_in_flight_adapt"] else "requests in flight"
    limit = f"at most {_rate(limits['bandwidth'])}" if limits["bandwidth"] else "no bandwidth limit"
    budget = human_bytes(limits["memory_budget"])
    return f"{adapt} {limits['requests_in_flight']} · memory budget {budget} · {limit} · "


def _channel(channel: dict[str, Any]) -> Panel:
    bottleneck, rates = channel["bottleneck"], channel["rates"]
    colour = COLOURS[bottleneck["kind"]]
    done = channel["consumed"] / channel["bytes"] if channel["bytes"] else 0.0
    left = "" if channel["eta"] is None else f" · {channel['eta']:.0f} s left"
    lines = Table.grid(padding=(0, 1), expand=True)
    lines.add_column(width=10, style="bright_black")
    lines.add_column(ratio=1)
    lines.add_row("bottleneck", Text(bottleneck["text"], style=f"bold {colour}"))
    if bottleneck["remedy"]:
        lines.add_row("", Text(bottleneck["remedy"], style="bright_black"))
    lines.add_row(
        f"epoch {channel['epoch']}",
        Group(
            ProgressBar(total=1, completed=done, complete_style=colour, finished_style=colour),
            Text(f"{done:.0%} of {human_bytes(channel['bytes'])}, {channel['objects']} objects{left}"),
        ),
    )
    lines.add_row("minute", Text.assemble((_sparkline(rates), colour), f" {_rate(_recent(rates))}"))
    shares = channel["shares"]
    texts = [
        (f"{text} {shares[state]:.0%}   ", style)
        for state, text, style in STATES
        if shares.get(state, 0) >= 0.005
    ]
    lines.add_row("time", Text.assemble(*texts))
    lines.add_row(
        "in use",
        f"requests {channel['requests_in_flight']}/{channel['requests_in_flight_limit']}   "
        f"memory {human_bytes(channel['reserved'])} of {human_bytes(channel['quota'])}   "
        f"FIFO {human_bytes(channel['fifo'])} unread",
    )
    for error in channel["errors"][:SHOWN_ERRORS]:
        lines.add_row("error", Text(error["text"], style="red", overflow="ellipsis", no_wrap=True))
    title = Text.assemble((channel["name"], "bold"), ("  " + channel["source"], "bright_black"))
    return Panel(lines, title=title, title_align="left", border_style="bright_black")


def _recent(rates: list[float]) -> float:
    """Return the mean of the last five rates."""
    recent = rates[-5:]
    return sum(recent) / len(recent) if recent else 0.0


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def _sparkline(rates: list[float]) -> str:
    """Return a bar chart of the rates, one character for each."""
    highest = max(rates, default=0.0) or 1.0
    return "".join(SPARKS[round(rate / highest * (len(SPARKS) - 1))] for rate in rates)
