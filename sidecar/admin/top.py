"""`penstock top`: the status page in a terminal, from the same events.

A frame is a pure function of one event and the terminal's size, so that tests can compare frames. A thread
reads the events; the main thread waits for events, keys and changes of the size, and draws the alternate
screen. A frame is never taller than the terminal: channels become two lines each if their panels do not fit,
and the last line says how many are not shown.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import signal
import sys
import termios
import threading
import tty
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from streamer.units import MIB, counted, decimal_bytes, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

COLOURS = {
    "trainer": "green", "storage": "magenta", "faults": "red", "failed": "red", "limit": "yellow",
    "held_back": "cyan", "even": "blue", "mixed": "yellow", "idle": "bright_black",
}  # fmt: skip
STATES = (
    ("blocked", "waiting for the trainer", "green"),
    ("starved", "waiting for storage", "magenta"),
    ("held_back", "waiting for another FIFO", "cyan"),
    ("limited", "held by a limit", "yellow"),
    ("moving", "moving bytes", "blue"),
    ("idle", "no reader", "bright_black"),
)
SPARKS = " ▁▂▃▄▅▆▇█"
SHOWN_ERRORS = 2
LABELS = 10
"""Columns of the labels in a panel."""
BORDER = 4
"""Columns of a panel's border."""


def watch(events: Iterable[dict[str, Any]], *, once: bool) -> None:
    """Show events until they end or the user presses q or Ctrl-C.

    `once`: print the first event whole and return, as is done if standard output is no terminal.
    """
    console = Console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(frame(next(iter(events)), width=console.width))
        return
    event: dict[str, Any] | None = None
    with _Input(events) as news, Live(console=console, screen=True, auto_refresh=False) as live:
        for arrived in news:
            event = arrived or event
            if event is not None:
                live.update(frame(event, width=console.width, height=console.height), refresh=True)
    if event is not None and event.get("phase") == "ended":
        console.print("The sidecar has ended.")


class _Input:
    """Iterates over events, and None when the size has changed, until the user presses q."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self._events = events
        self._arrived: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()
        """Events, then None at their end, or the error that ended them."""
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            settings = termios.tcgetattr(0)
            self._exits.callback(termios.tcsetattr, 0, termios.TCSADRAIN, settings)
            tty.setcbreak(0)
        replaced = signal.signal(signal.SIGWINCH, lambda *_: self._wake())
        self._exits.callback(signal.signal, signal.SIGWINCH, replaced)
        # A daemon: it may wait for the next event when the user quits.
        threading.Thread(target=self._follow, name="events", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        sources = [self._read_end, *([0] if sys.stdin.isatty() else [])]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if 0 in ready and os.read(0, 64)[:1] in (b"q", b"Q", b""):
                return
            if self._read_end not in ready:
                continue
            os.read(self._read_end, 4096)
            latest: dict[str, Any] | None = None
            with contextlib.suppress(queue.Empty):
                while True:
                    arrived = self._arrived.get_nowait()
                    if isinstance(arrived, BaseException):
                        raise arrived
                    if arrived is None:
                        yield latest
                        return
                    latest = arrived
            yield latest

    def _follow(self) -> None:
        try:
            for event in self._events:
                self._arrived.put(event)
                self._wake()
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self._arrived.put(error)
        else:
            self._arrived.put(None)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the main thread wakes anyway
            os.write(self._write_end, b".")


def frame(event: dict[str, Any], *, width: int, height: int | None = None) -> Group:
    """Return the screen that shows one event; with `height`, no taller than so many lines."""
    above, below = [_header(event)], [_footer(event, width, keys=height is not None)]
    channels = event["channels"]
    whole = Group(*above, *(_panel(each, width) for each in channels), *below)
    if height is None or _height(whole, width) <= height:
        return whole
    whole = Group(*above, *(_summary(each, width) for each in channels), *below)
    if _height(whole, width) <= height:
        return whole
    room = height - _height(Group(*above, *below), width) - 1
    # A failed channel is the first to look at.
    channels = sorted(channels, key=lambda each: each["bottleneck"]["kind"] != "failed")
    shown: list[RenderableType] = []
    for each in channels:
        lines = _summary(each, width)
        room -= _height(lines, width)
        if room < 0:
            break
        shown.append(lines)
    more = Text(
        f"{counted(len(channels) - len(shown), 'more channel')}: enlarge the terminal", style="yellow"
    )
    return Group(*above, *shown, more, *below)


def _height(renderable: RenderableType, width: int) -> int:
    """Return how many lines a renderable has at this width."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    return len(console.render_lines(renderable, pad=False))


def _header(event: dict[str, Any]) -> Text:
    return Text.assemble(
        ("Penstock ", "bold"),
        ("ready", "bold green") if event["ready"] else ("not ready: " + event["why"], "bold red"),
        (f"  {event['host']['name']} · {event['transport']}", "bright_black"),
    )


def _footer(event: dict[str, Any], width: int, *, keys: bool) -> Text:
    process, requests, limits = event["process"], event["requests"], event["limits"]
    items = []
    if limits:  # none while the job starts
        adapt = (
            "requests in flight adapt, now" if limits["requests_in_flight_adapt"] else "requests in flight"
        )
        items = [
            f"{adapt} {limits['requests_in_flight']}",
            f"memory budget {human_bytes(limits['memory_budget'])}",
            f"at most {_rate(limits['bandwidth'])}" if limits["bandwidth"] else "no bandwidth limit",
        ]
    items += [
        f"process {process['rss_bytes'] // MIB} MiB, {process['cpu_seconds']:.1f} CPU-s",
        f"{counted(requests['parts'] + requests['planning'], 'request')}, {_dollars(requests['dollars'])}",
        *(["q quits"] if keys else []),
    ]
    return _flow([(item, "bright_black") for item in items], width, separator=" · ")


def _panel(channel: dict[str, Any], width: int) -> Panel:
    bottleneck, rates = channel["bottleneck"], channel["rates"]
    colour = COLOURS.get(bottleneck["kind"], "blue")
    inner = width - BORDER - LABELS - 1
    lines = Table.grid(padding=(0, 1), expand=True)
    lines.add_column(width=LABELS, style="bright_black")
    lines.add_column(ratio=1, overflow="fold")
    objects = f"{channel['objects']} object{'' if channel['objects'] == 1 else 's'}"
    listing = " · listing" if channel["listing"] else ""
    lines.add_row("source", f"{channel['source']} · {objects}{listing}")
    lines.add_row("bottleneck", Text(bottleneck["text"], style=f"bold {colour}"))
    if bottleneck["remedy"]:
        lines.add_row("", Text(bottleneck["remedy"], style="bright_black", overflow="fold"))
    lines.add_row(f"epoch {channel['epoch']}", _progress(channel, colour, inner))
    recent = f" {_rate(_recent(rates))}"
    minute = _sparkline(rates)[-max(0, inner - len(recent)) :]
    lines.add_row("minute", Text.assemble((minute, colour), recent))
    shares = [
        (f"{text} {channel['shares'][state]:.0%}", style)
        for state, text, style in STATES
        if channel["shares"].get(state, 0) >= 0.005
    ]
    lines.add_row("time", _flow(shares, inner))
    used = [f"FIFO {human_bytes(channel['fifo'])} unread"]
    if channel["requests_in_flight_limit"]:  # else the first FIFO of its stream has those of all
        used = [
            f"requests {channel['requests_in_flight']}/{channel['requests_in_flight_limit']}",
            f"memory {human_bytes(channel['reserved'])} of {human_bytes(channel['quota'])}",
            *used,
        ]
    lines.add_row("in use", _flow([(text, "") for text in used], inner))
    for error in channel["errors"][:SHOWN_ERRORS]:
        lines.add_row("error", Text(error["text"], style="red", overflow="fold"))
    title = Text(channel["name"], style="bold")
    return Panel(lines, title=title, title_align="left", border_style="bright_black")


def _summary(channel: dict[str, Any], width: int) -> Group:
    """Return a channel in two lines: its bottleneck, and its progress."""
    colour = COLOURS.get(channel["bottleneck"]["kind"], "blue")
    first = Text.assemble(
        (channel["name"], "bold"), "  ", (channel["bottleneck"]["text"], colour), no_wrap=True
    )
    first.truncate(width, overflow="ellipsis")
    rate = f" · {_rate(_recent(channel['rates']))}"
    begin = Text(f"  epoch {channel['epoch']} ", style="bright_black")
    second = begin + _progress(channel, colour, width - len(begin) - len(rate)) + Text(rate)
    second.truncate(width, overflow="ellipsis")
    return Group(first, second)


def _progress(channel: dict[str, Any], colour: str, width: int) -> Text:
    """Return percent, size and time left of the epoch, after a bar that takes the rest of the line."""
    done = min(1.0, channel["consumed"] / channel["bytes"]) if channel["bytes"] else 0.0
    left = "" if channel["eta"] is None else f" · {_duration(channel['eta'])} left"
    words = f"{done:.0%} of {decimal_bytes(channel['bytes'])}{left}"
    if channel["listing"]:
        words = f"{decimal_bytes(channel['consumed'])} of unknown"
    cells = max(0, width - len(words) - 1)
    filled = int(done * cells)
    bar = Text.assemble(
        ("━" * filled, colour), ("─" * (cells - filled), "bright_black"), " " if cells else ""
    )
    return bar + Text(words)


def _flow(items: list[tuple[str, str]], width: int, *, separator: str = "   ") -> Text:
    """Return items in as many lines as they need; no item is broken if it fits into one."""
    text, column = Text(overflow="fold"), 0
    for words, style in items:
        if column and column + len(separator) + len(words) > width:
            text.append("\n")
            column = 0
        elif column:
            text.append(separator, style=style)
            column += len(separator)
        text.append(words, style=style)
        column += len(words)
    return text


def _dollars(dollars: float) -> str:
    return f"about ${dollars:.2f}" if dollars >= 0.01 else "less than $0.01"


def _duration(seconds: float) -> str:
    """Return seconds as the two largest units: `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


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
