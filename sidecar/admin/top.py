"""`penstock top`: the figures of the status page in a terminal, as a live table with a row for each channel.

A frame is a pure function of one event of the sidecar and the terminal's size. `watch` draws one for each
event, which comes once a second, so a terminal of a new size has its frame within a second.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamer.units import MIB, counted, decimal_bytes, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

COLOURS = {
    "trainer": "green", "storage": "magenta", "faults": "red", "failed": "red", "machine": "red",
    "stuck": "yellow",
    "limit": "yellow", "held_back": "cyan", "even": "blue", "mixed": "yellow", "idle": "bright_black",
}  # fmt: skip
STATES = {
    "blocked": "waiting for the trainer", "starved": "waiting for storage",
    "held_back": "waiting for another FIFO", "limited": "held by a limit", "moving": "moving bytes",
    "idle": "no reader", "refused": "waiting for this machine",
}  # fmt: skip
URGENT = ("failed", "machine", "stuck")
"""Kinds of bottlenecks whose channels come first."""
SHOWN_ERRORS = 2
WIDE = 110
"""Columns of a terminal from which on a row has the channel's last minute and what it uses of the limits."""


def watch(events: Iterator[dict[str, Any]], *, once: bool) -> None:
    """Show events until they end; Ctrl-C raises KeyboardInterrupt.

    `once`: print the first event whole and return, as is done if standard output is no terminal.
    """
    console = Console()
    # Before the screen is cleared: that no sidecar responds is an error on the user's own screen.
    event = first = next(events)
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(frame(first, console, fit=False))
        return
    # Nothing is drawn before the block begins: Ctrl-C in that drawing would leave the screen as it is.
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for event in chain([first], events):
            live.update(frame(event, console), refresh=True)
    if event["phase"] == "ended":
        console.print("The sidecar has ended.")


def frame(event: dict[str, Any], console: Console, *, fit: bool = True) -> Group:
    """Return what the console shows of one event.

    `fit`: in its height. If channels do not fit with all their lines, each has one; those that do not fit
    even so are counted.
    """
    channels = sorted(event["channels"], key=_urgency)
    whole = _frame(event, channels, console)
    if not fit or _height(whole, console) <= console.height:
        return whole
    around = _height(_frame(event, [], console, one_line=True), console)
    return _frame(event, channels[: max(0, console.height - around)], console, one_line=True)


def _urgency(channel: dict[str, Any]) -> int:
    """Return the place of a channel among all: those of `URGENT` first."""
    kind = channel["bottleneck"]["kind"]
    return URGENT.index(kind) if kind in URGENT else len(URGENT)


def _height(renderable: Group, console: Console) -> int:
    return len(console.render_lines(renderable, pad=False))


def _frame(
    event: dict[str, Any], channels: list[dict[str, Any]], console: Console, *, one_line: bool = False
) -> Group:
    header = Text.assemble(
        ("Penstock ", "bold"),
        ("ready", "bold green") if event["ready"] else ("not ready: " + event["why"], "bold red"),
        (f"  {event['host']['name']} · {event['transport']}", "bright_black"),
    )
    wide = ["last minute", "in use"] if console.width >= WIDE and not one_line else []
    headings = ["channel", "progress", "speed", *wide, "bottleneck"]
    table = Table(box=box.SIMPLE_HEAD, expand=True, header_style="bright_black")
    for heading in headings:
        # The room that is left. In a narrow terminal that is little, so there all columns give way alike.
        takes_rest = heading == "bottleneck" or (heading == "channel" and not one_line)
        ratio = 1 if takes_rest and (one_line or console.width >= WIDE) else None
        table.add_column(heading, ratio=ratio, no_wrap=one_line)
        table.columns[-1].overflow = "ellipsis" if one_line else "fold"
    for channel in channels:
        cells = _cells(channel)
        table.add_row(*(cells[each].split()[0] if one_line else cells[each] for each in headings))
    hidden = len(event["channels"]) - len(channels)
    more = [Text(f"{counted(hidden, 'more channel')}: enlarge the terminal", "yellow")] if hidden else []
    return Group(header, table, *more, _footer(event))


def _footer(event: dict[str, Any]) -> Text:
    process, requests, limits = event["process"], event["requests"], event["limits"]
    items = [
        f"process {process['rss_bytes'] // MIB} MiB, {process['cpu_seconds']:.1f} CPU-s",
        f"{counted(requests['parts'] + requests['planning'], 'request')}, "
        + (f"about ${requests['dollars']:.2f}" if requests["dollars"] >= 0.01 else "less than $0.01"),
    ]
    if limits:  # no snapshot while the job starts
        adapt = " adapt, now" if limits["requests_in_flight_adapt"] else ""
        bandwidth = (
            f"at most {decimal_bytes(limits['bandwidth'])}/s" if limits["bandwidth"] else "no bandwidth limit"
        )
        items += [
            f"requests in flight{adapt} {limits['requests_in_flight']}",
            f"memory budget {human_bytes(limits['memory_budget'])}",
            bandwidth,
        ]
    return Text(" · ".join(items), "bright_black")


def _cells(channel: dict[str, Any]) -> dict[str, Text]:
    """Return a channel's cell below each heading. The first line of a cell is the one that is shown alone."""
    bottleneck, total = channel["bottleneck"], channel["bytes"]
    source = f"{channel['source']}\n{counted(channel['objects'], 'object')}"
    source += " · listing" * channel["listing"]
    done = f"{min(1.0, channel['consumed'] / (total or 1)):.0%} of {decimal_bytes(total or 0)}"
    if channel["listing"]:
        done = f"{decimal_bytes(channel['consumed'])} of unknown"
    left = "" if channel["eta"] is None else f", {timedelta(seconds=round(channel['eta']))} left"
    recent = channel["rates"][-5:] or [0]
    shares = sorted(((channel["shares"].get(state, 0), text) for state, text in STATES.items()), reverse=True)
    used = [f"FIFO {human_bytes(channel['fifo'])} unread"]
    if channel["requests_in_flight_limit"]:  # else the first FIFO of its stream has those of all
        used = [
            f"requests {channel['requests_in_flight']}/{channel['requests_in_flight_limit']}",
            f"memory {human_bytes(channel['reserved'])} of {human_bytes(channel['quota'])}",
            *used,
        ]
    words = [(bottleneck["text"], f"bold {COLOURS.get(bottleneck['kind'], 'blue')}")]
    words += [(bottleneck["remedy"], "bright_black")] if bottleneck["remedy"] else []
    words += [(error["text"], "red") for error in channel["errors"][:SHOWN_ERRORS]]
    return {
        "channel": Text.assemble((channel["name"], "bold"), (f"\n{source}", "bright_black")),
        "progress": Text(f"{done}\nepoch {channel['epoch']}{left}"),
        "speed": Text(f"{decimal_bytes(sum(recent) / len(recent))}/s"),
        "last minute": Text("\n".join(f"{share:.0%} {text}" for share, text in shares if share >= 0.005)),
        "in use": Text("\n".join(used)),
        "bottleneck": Text("\n").join(Text(*each) for each in words),
    }
