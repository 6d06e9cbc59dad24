"""Draws the diagrams of the pages as SVG, for light and dark: `python -m scripts.diagrams`. Tests compare.

    data-flow        S3, sidecar, FIFO, trainer          README.md, explanation/architecture.md
    epoch            the life of an epoch                explanation/architecture.md
    back-pressure    who blocks whom                     explanation/architecture.md
    keeper           a sidecar that may be killed        explanation/architecture.md
    rooms            packages and what they import       explanation/architecture.md
    pod              the containers of a pod             how-to/kubernetes.md
    performance      throughput and CPU beside peers     README.md; from the tables of performance.md

Each diagram is docs/pictures/NAME-light.svg and NAME-dark.svg, without links and with the reader's own fonts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs/pictures"
RESULTS = ROOT / "docs/explanation/performance.md"

PALETTES = {
    "light": {
        "text": "#1f2328", "muted": "#59636e", "line": "#6e7781", "fill": "#f6f8fa", "edge": "#d1d9e0",
        "ours": "#0969da", "ours-fill": "#ddf4ff", "good": "#1a7f37", "good-fill": "#dafbe1",
        "warn": "#9a6700", "warn-fill": "#fff8c5", "bar": "#b6bfc8",
    },
    "dark": {
        "text": "#e6edf3", "muted": "#9198a1", "line": "#8b949e", "fill": "#161b22", "edge": "#3d444d",
        "ours": "#58a6ff", "ours-fill": "#12233a", "good": "#3fb950", "good-fill": "#12261e",
        "warn": "#d29922", "warn-fill": "#2b2413", "bar": "#4b535d",
    },
}  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


@dataclass
class Canvas:
    """An SVG document that grows by shapes. Lengths are pixels; colours are names of the palette."""

    width: int
    height: int
    title: str
    colours: dict[str, str]
    shapes: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, *, style: str = "", dashed: bool = False
    ) -> None:
        """Draw a rounded rectangle; `style` is "", "ours", "good" or "warn"."""
        fill, edge = (f"{style}-fill", style) if style else ("fill", "edge")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" '
            f'fill="{self.colours[fill]}" stroke="{self.colours[edge]}" stroke-width="1.5"{dash}/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: float = 13, bold: bool = False, colour: str = "text",
        anchor: str = "start", mono: bool = False,
    ) -> None:  # fmt: skip
        """Write one line; `y` is its base line."""
        weight = ' font-weight="600"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{weight}{family} text-anchor="{anchor}" '
            f'fill="{self.colours[colour]}">{escape(words, quote=False)}</text>'
        )

    def lines(self, x: float, y: float, rows: list[str], *, size: float = 12, colour: str = "muted") -> None:
        """Write several lines below each other."""
        for number, row in enumerate(rows):
            self.text(x, y + number * (size + 5), row, size=size, colour=colour)

    def titled(  # noqa: PLR0917  # a rectangle and its text
        self, x: float, y: float, width: float, height: float, title: str, rows: list[str], *,
        style: str = "", dashed: bool = False,
    ) -> None:  # fmt: skip
        """Draw a box with a bold title and lines."""
        self.box(x, y, width, height, style=style, dashed=dashed)
        self.text(x + 14, y + 24, title, size=14, bold=True)
        self.lines(x + 14, y + 45, rows)

    def arrow(
        self, points: list[tuple[float, float]], *, colour: str = "line", dashed: bool = False,
        label: str = "", at: tuple[float, float] | None = None, head: bool = True,
    ) -> None:  # fmt: skip
        """Draw a line with a head at its last point, and a label centred at `at`."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        tip = f' marker-end="url(#head-{colour})"' if head else ""
        self.shapes.append(
            f'<polyline points="{way}" fill="none" stroke="{self.colours[colour]}" '
            f'stroke-width="1.8"{dash}{tip}/>'
        )
        if label and at:
            self.text(*at, label, size=12, colour="muted", anchor="middle")

    def pipe(self, x: float, y: float, width: float, label: str, *, style: str = "ours") -> None:
        """Draw a FIFO: a lying cylinder, open to the right."""
        edge, fill = self.colours[style], self.colours[f"{style}-fill"]
        self.shapes.append(
            f'<path d="M{x + 8:g},{y:g} h{width - 16:g} a8,14 0 0 1 0,28 '
            f'h-{width - 16:g} a8,14 0 0 1 0,-28 z" '
            f'fill="{fill}" stroke="{edge}" stroke-width="1.5"/>'
            f'<ellipse cx="{x + width - 8:g}" cy="{y + 14:g}" rx="8" ry="14" fill="{fill}" stroke="{edge}" '
            f'stroke-width="1.5"/>'
        )
        self.text(x + width / 2 - 4, y + 18, label, size=12, anchor="middle", mono=True)

    def render(self) -> str:
        """Return the SVG document."""
        heads = "".join(
            f'<marker id="head-{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" '
            f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{self.colours[name]}"/></marker>'
            for name in ("line", "ours", "good", "warn")
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" font-family="{FONT}">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )


def data_flow(colours: dict[str, str]) -> Canvas:
    """Draw S3, sidecar, FIFO and trainer."""
    c = Canvas(
        900, 270, "S3 objects go through the sidecar and one FIFO for each epoch to the trainer", colours
    )
    c.titled(10, 40, 170, 130, "S3", ["train/part-00000", "train/part-00001", "train/part-00002", "…"])
    for y in (85, 105, 125):
        c.arrow([(180, y), (268, y)])
    c.text(224, 70, "ranged GETs", size=12, colour="muted", anchor="middle")
    c.text(224, 148, "If-Match", size=12, colour="muted", anchor="middle")
    c.titled(
        270, 40, 210, 130, "Sidecar: penstock",
        ["lists once, fetches ahead,", "puts bytes in order, retries", "holds credentials, network",
         "and a fixed memory budget"],
        style="ours",
    )  # fmt: skip
    c.pipe(522, 74, 116, "train_0")
    c.pipe(522, 112, 116, "train_1")
    c.arrow([(480, 88), (520, 88)], colour="ours")
    c.arrow([(480, 126), (520, 126)], colour="ours", dashed=True)
    c.text(580, 60, "one FIFO an epoch", size=12, colour="muted", anchor="middle")
    c.arrow([(640, 88), (686, 88)], colour="ours")
    c.titled(
        690, 40, 200, 130, "Trainer",
        ["PyTorch, TensorFlow, JAX,", "pandas, cat, any program", "no credentials,", "no storage client"],
    )  # fmt: skip
    c.box(500, 205, 160, 40, style="good")
    c.text(580, 222, "trailer: complete", size=12, bold=True, anchor="middle")
    c.text(580, 237, "bytes, objects, digest", size=11, colour="muted", anchor="middle")
    c.arrow([(420, 170), (420, 225), (498, 225)], colour="good", dashed=True)
    c.arrow([(660, 225), (790, 225), (790, 172)], colour="good", dashed=True)
    c.text(726, 217, "proof of the end", size=12, colour="muted", anchor="middle")
    c.arrow([(320, 170), (320, 205)])
    c.text(320, 224, "/metrics  /status  /readyz", size=12, anchor="middle", mono=True, colour="muted")
    return c


def epoch(colours: dict[str, str]) -> Canvas:
    """Draw the steps of sidecar and reader in epoch n, downwards in time."""
    c = Canvas(900, 500, "The life of an epoch: the steps of sidecar and reader in time", colours)
    left, right = 170, 660
    for x, name, style in ((left, "Sidecar", "ours"), (right, "Reader", "")):
        c.box(x - 70, 10, 140, 34, style=style)
        c.text(x, 32, name, bold=True, anchor="middle")
        c.arrow([(x, 44), (x, 490)], dashed=True, head=False)
    steps = [
        (76, "trailer n: open;  mkfifo n"),
        (104, "a thread waits in open(n) for a reader"),
        (132, "requests parts of n, as far as the quota goes"),
        (210, "trailer n+1: open;  mkfifo n+1"),
        (250, "writes the parts of n, in order"),
        (290, "requests parts of n+1 after the last part of n"),
        (330, "the FIFO has accepted the last byte"),
        (356, "trailer n: complete;  unlink n"),
        (390, "closes n"),
        (450, "waits in open(n+1) for a reader"),
    ]
    for y, words in steps:
        c.shapes.append(f'<circle cx="{left}" cy="{y - 4}" r="4" fill="{colours["ours"]}"/>')
        c.text(left + 14, y, words, size=12.5)
    for y, words in [
        (172, "opens n"),
        (250, "reads"),
        (410, "end of file; trailer n says"),
        (426, "complete, bytes agree"),
        (460, "opens n+1"),
    ]:
        c.text(right + 14, y, words, size=12.5)
    c.arrow([(right, 168), (left + 4, 168)], label="state: streaming", at=((left + right) / 2, 163))
    c.arrow([(left + 215, 246), (right - 4, 246)], colour="ours")
    c.arrow(
        [(left + 70, 386), (right, 404)],
        colour="good",
        label="end of file",
        at=((left + right) / 2 + 50, 388),
    )
    c.arrow([(right, 456), (left + 222, 446)])
    c.text(20, 76, "prepared", size=12, colour="muted")
    c.text(20, 172, "streaming", size=12, colour="muted")
    c.text(20, 330, "proven", size=12, colour="muted")
    c.text(20, 450, "next epoch", size=12, colour="muted")
    return c


def _chain(c: Canvas, y: float, title: str, words: list[tuple[str, str]], *, style: str) -> None:
    """Draw one row of causes and effects, from left to right."""
    c.text(10, y - 12, title, size=14, bold=True)
    width, gap = 152, 22
    for number, (first, second) in enumerate(words):
        x = 10 + number * (width + gap)
        c.box(x, y, width, 48, style=style if number == 0 else "")
        c.text(x + width / 2, y + 21, first, size=12.5, anchor="middle")
        c.text(x + width / 2, y + 37, second, size=11.5, colour="muted", anchor="middle")
        if number:
            c.arrow([(x - gap, y + 24), (x - 2, y + 24)])


def back_pressure(colours: dict[str, str]) -> Canvas:
    """Draw which process waits for which, in three cases."""
    c = Canvas(
        880, 300, "Who blocks whom: a slow reader, slow storage, a part whose turn has not come", colours
    )
    _chain(c, 36, "The reader is slow", [
        ("reader", "does not read"), ("FIFO", "is full"), ("delivery", "waits: blocked"),
        ("quota", "stays reserved"), ("no further request", "S3 is left alone"),
    ], style="warn")  # fmt: skip
    _chain(c, 136, "Storage is slow", [
        ("S3", "sends late"), ("head of line", "has no byte"), ("delivery", "waits: starved"),
        ("FIFO", "runs empty"), ("reader", "waits in read(2)"),
    ], style="warn")  # fmt: skip
    _chain(c, 236, "A part comes before its turn", [
        ("part", "is early"), ("its socket", "and pipe fill up"), ("TCP window", "closes"),
        ("S3", "pauses this body"), ("other parts", "go on"),
    ], style="ours")  # fmt: skip
    return c


def keeper(colours: dict[str, str]) -> Canvas:
    """Draw the keeper, which holds the FIFO while sidecars start and end."""
    c = Canvas(
        880, 260, "With a keeper, the next sidecar goes on at the exact byte in the same FIFO", colours
    )
    c.titled(
        10, 20, 190, 76, "Sidecar", ["is killed", "its bytes stay in the pipe"], style="warn", dashed=True
    )
    c.titled(
        10, 160, 190, 76, "Next sidecar", ["asks: how many bytes?", "goes on at that byte"], style="ours"
    )
    c.titled(
        410,
        84,
        190,
        92,
        "Keeper",
        ["holds the write end,", "counts bytes,", "needs no credentials"],
        style="good",
    )
    c.pipe(248, 44, 116, "1 MiB pipe", style="warn")
    c.arrow([(200, 58), (246, 58)], colour="warn", dashed=True)
    c.arrow([(364, 58), (386, 58), (386, 110), (408, 110)])
    c.pipe(248, 164, 116, "1 MiB pipe")
    c.arrow([(200, 178), (246, 178)], colour="ours")
    c.arrow([(364, 178), (386, 178), (386, 150), (408, 150)])
    c.arrow([(200, 214), (505, 214), (505, 178)], dashed=True)
    c.text(350, 232, "Unix socket: epoch, digest, bytes accepted", size=12, colour="muted", anchor="middle")
    c.pipe(636, 116, 104, "train_0")
    c.arrow([(600, 130), (634, 130)], colour="good")
    c.arrow([(742, 130), (768, 130)], colour="good")
    c.titled(770, 92, 104, 76, "Reader", ["notices", "a pause"])
    return c


def pod(colours: dict[str, str]) -> Canvas:
    """Draw the containers of a pod and the volumes that they share."""
    c = Canvas(
        880,
        250,
        "A pod: the sidecar is an init container that stays, and shares a volume with the trainer",
        colours,
    )
    c.box(10, 10, 560, 230)
    c.text(24, 34, "Pod", size=14, bold=True)
    c.titled(
        28, 50, 245, 172, "initContainers: penstock",
        ["restartPolicy: Always", "startupProbe: /readyz", "has credentials and network",
         "starts first, is stopped last", "reads the job file"],
        style="ours",
    )  # fmt: skip
    c.titled(
        308, 50, 245, 172, "containers: trainer",
        ["starts when every FIFO is there", "opens FIFOs as files", "no credentials, no network",
         "its exit code is the pod's"],
    )  # fmt: skip
    c.arrow([(273, 190), (306, 190)], colour="ours")
    c.titled(
        600, 10, 270, 150, "emptyDir ml = /opt/ml",
        ["input/data/train_0, train_1: FIFOs", "input/data/.*.json: trailers",
         "input/config: job, hosts, penstock.env", "model, output: the trainer's"],
        style="good",
    )  # fmt: skip
    c.titled(600, 180, 270, 60, "ConfigMap", ["/etc/penstock/job.yaml"])
    c.arrow([(570, 100), (598, 100)], colour="good")
    c.arrow([(598, 210), (572, 210)])
    return c


ROOMS = {
    "sidecar.__main__": (-2, 0, "the command"),
    "sidecar.cli": (-2, 1, "options, help texts"),
    "sidecar.commands": (-2, 2, "run, exec, cat"),
    "sidecar.doctor": (-1, 2, "checks"),
    "sidecar.job": (-2, 3, "one job on this host"),
    "sidecar.download": (-1, 3, "File channels"),
    "sidecar.upload": (-1, 4, "files to S3"),
    "sidecar.records": (-1, 5, "ranks, advice"),
    "sidecar.index": (-1, 6, "record indexes"),
    "sidecar.admin": (-2, 4, "HTTP server"),
    "sidecar.observe": (-2, 5, "state, bottleneck"),
    "sidecar.config": (-2, 6, "job file"),
    "sidecar.process": (-2, 7, "loop, signals, logs"),
    "streamer.relay": (0, 0, "channels"),
    "streamer.relay.deliver": (0, 1, "parts in order"),
    "streamer.relay.fetch": (0, 2, "requests, hedges"),
    "streamer.relay.staging": (0, 3, "where bytes wait"),
    "streamer.relay.statistics": (0, 4, "counters"),
    "streamer.s3": (0, 5, "ranged GETs"),
    "streamer.s3.http": (0, 6, "connections, TLS"),
    "streamer.s3.signing": (0, 7, "SigV4"),
    "streamer.s3.client": (0, 8, "credentials"),
    "streamer.s3.manifests": (1, 4, "named objects"),
    "streamer.s3.pages": (1, 5, "listings"),
    "streamer.schedule": (2, 4, "window, budget"),
    "streamer.plan": (2, 8, "order, parts"),
    "streamer.formats": (2, 9, "records"),
    "streamer.sink": (3, 2, "FIFOs, trailers"),
    "streamer.helpers": (3, 3, "keeper's client"),
    "streamer.helpers.keeper": (3, 4, "the keeper"),
    "streamer.readers": (3, 6, "plain Python"),
    "streamer.readers.torch": (3, 7, "PyTorch"),
    "streamer.readers.samples": (3, 8, "samples"),
    "streamer.readers.tensorflow": (4, 7, "TensorFlow"),
    "streamer.readers.core": (4, 8, "proof, positions"),
}
"""Rooms of the diagram: column, row, and what is in them. Columns below 0 are half as far apart."""
FOUNDATION = {
    "streamer", "streamer.errors", "streamer.units", "streamer.trailer", "streamer.secrets", "streamer.aio",
    "streamer.key_list", "streamer.launchers", "streamer.linux", "streamer.inflate", "streamer.retry",
    "streamer.escaping",
    "streamer.step_state", "streamer.cancellation", "streamer.directory",
    "streamer.file_reads", "streamer.finish", "sidecar",
}  # fmt: skip
"""Rooms that import no other room; the diagram has them as a list, without arrows."""
SHARED = {
    "streamer.formats", "streamer.helpers", "streamer.plan", "streamer.relay",
    "streamer.relay.deliver", "streamer.relay.fetch", "streamer.relay.staging",
    "streamer.relay.statistics", "streamer.s3", "streamer.s3.client", "streamer.s3.manifests",
    "streamer.s3.pages", "streamer.schedule", "streamer.sink",
}  # fmt: skip
"""Rooms of `streamer` that every room of `sidecar` may import."""
ROOM_ARROWS = [
    "sidecar.__main__ sidecar.cli", "sidecar.cli sidecar.commands", "sidecar.cli sidecar.doctor",
    "sidecar.commands sidecar.job", "sidecar.doctor sidecar.job", "sidecar.job sidecar.admin",
    "sidecar.job sidecar.download", "sidecar.job sidecar.records", "sidecar.records sidecar.index",
    "sidecar.index sidecar.config", "sidecar.download sidecar.upload", "sidecar.upload sidecar.observe",
    "sidecar.admin sidecar.observe", "sidecar.observe sidecar.config", "sidecar.config sidecar.process",
    "streamer.relay streamer.relay.deliver", "streamer.relay.deliver streamer.relay.fetch",
    "streamer.relay.deliver streamer.sink", "streamer.relay.fetch streamer.relay.staging",
    "streamer.relay.staging streamer.relay.statistics", "streamer.relay.staging streamer.schedule",
    "streamer.relay.statistics streamer.s3", "streamer.s3.manifests streamer.s3.pages",
    "streamer.s3.pages streamer.s3",
    "streamer.s3 streamer.s3.http", "streamer.s3.http streamer.s3.signing",
    "streamer.s3.signing streamer.s3.client", "streamer.s3.signing streamer.plan",
    "streamer.schedule streamer.plan", "streamer.plan streamer.formats", "streamer.sink streamer.helpers",
    "streamer.helpers streamer.helpers.keeper", "streamer.helpers streamer.plan",
    "streamer.readers streamer.readers.torch", "streamer.readers.torch streamer.readers.samples",
    "streamer.readers.torch streamer.readers.core", "streamer.readers.tensorflow streamer.readers.core",
    "streamer.readers.samples streamer.formats", "streamer.readers.core streamer.formats",
]  # fmt: skip
"""`A B`: A imports B. An import that is a chain of these arrows has no arrow of its own."""
ROOM_WIDTH, ROOM_HEIGHT, ROW = 128, 40, 58


def _room_at(name: str) -> tuple[float, float]:
    """Return the upper left corner of a room's box."""
    column, row, _ = ROOMS[name]
    left = 24 + (column + 2) * 136 if column < 0 else 318 + column * 146
    return left, 48 + row * ROW


def _room_arrow(source: str, target: str) -> list[tuple[float, float]]:
    """Return the way of an arrow: straight down, or by one side, with bends."""
    (left, top), (to_left, to_top) = _room_at(source), _room_at(target)
    middle, to_middle = left + ROOM_WIDTH / 2, to_left + ROOM_WIDTH / 2
    side, to_side = top + ROOM_HEIGHT / 2, to_top + ROOM_HEIGHT / 2
    bottom = top + ROOM_HEIGHT
    match f"{source} {target}":
        case "streamer.relay.deliver streamer.sink" | "streamer.relay.staging streamer.schedule":
            return [(left + ROOM_WIDTH, side), (to_middle, side), (to_middle, to_top - 2)]
        case "sidecar.job sidecar.records":
            bend = to_left + ROOM_WIDTH + 10
            high = top + ROOM_HEIGHT + 6
            return [
                (middle + 30, bottom),
                (middle + 30, high),
                (bend, high),
                (bend, to_side),
                (to_left + ROOM_WIDTH + 2, to_side),
            ]
        case "streamer.s3.signing streamer.plan":
            bend = to_left - 14
            return [(left + ROOM_WIDTH, side), (bend, side), (bend, to_side), (to_left - 2, to_side)]
        case "streamer.helpers streamer.plan":
            bend, edge = left - 12, to_left + ROOM_WIDTH
            return [(left, side), (bend, side), (bend, to_side), (edge + 1, to_side)]
        case "streamer.readers.samples streamer.formats" | "streamer.readers.core streamer.formats":
            lower = to_side + (8 if source.endswith("core") else -8)
            return [(middle, bottom), (middle, lower), (to_left + ROOM_WIDTH + 2, lower)]
    if left == to_left:
        return [(middle, bottom), (middle, to_top - 2)]
    if top == to_top:
        edges = (left + ROOM_WIDTH, to_left - 2) if left < to_left else (left, to_left + ROOM_WIDTH + 2)
        return [(edge, side) for edge in edges]
    # to the next row, one column aside
    start = middle + (20 if to_left > left else -20)
    end = to_middle - (20 if to_left > left else -20)
    bend = (bottom + to_top) / 2
    return [(start, bottom), (start, bend), (end, bend), (end, to_top - 2)]


def rooms(colours: dict[str, str]) -> Canvas:
    """Draw the packages and their imports."""
    c = Canvas(
        1050,
        736,
        "The packages of sidecar and streamer; an arrow from A to B means that A imports B",
        colours,
    )
    c.box(8, 8, 295, 634)
    c.text(24, 32, "sidecar", size=14, bold=True, mono=True)
    c.box(306, 8, 736, 634)
    c.text(318, 32, "streamer", size=14, bold=True, mono=True)
    c.box(749, 366, 287, 210, dashed=True)
    c.text(904, 388, "in the trainer", size=11, colour="muted", anchor="middle")
    for name, (_, _, words) in ROOMS.items():
        left, top = _room_at(name)
        c.shapes.append(
            f'<rect x="{left:g}" y="{top:g}" width="{ROOM_WIDTH}" height="{ROOM_HEIGHT}" rx="6" '
            f'fill="{colours["ours-fill" if name in SHARED else "fill"]}" '
            f'stroke="{colours["ours" if name in SHARED else "line"]}" stroke-width="1.5"/>'
        )
        middle = left + ROOM_WIDTH / 2
        title = name.partition(".")[2]
        c.text(middle, top + 17, title, size=12 if len(title) < 17 else 11, bold=True, anchor="middle")
        c.text(middle, top + 32, words, size=11, colour="muted", anchor="middle")
    for arrow in ROOM_ARROWS:
        c.arrow(_room_arrow(*arrow.split()))
    c.lines(24, 536, ["Every room of sidecar may also", "import the blue rooms of streamer."])
    c.box(8, 656, 1034, 72)
    c.text(24, 680, "Rooms that import no other room", size=13, bold=True)
    small = ", ".join(name.removeprefix("streamer.") for name in sorted(FOUNDATION))
    c.text(24, 702, f"{small}.", size=12)
    c.text(
        24,
        719,
        "Every room may import errors, units, cancellation, escaping, launchers and step_state; "
        "the table below names who imports the others.",
        size=11,
        colour="muted",
    )
    return c


SCENARIOS = {
    "fast": "plain HTTP, no limits",
    "s3like": "25 ms, 90 MiB/s a connection",
    "tls": "TLS, no limits",
    "small": "100 kB objects, 25 ms",
    "channels": "20 streams at once",
    "nic-9000": "network card, MTU 9000",
}
"""Scenarios of the chart, with a description for readers who do not know the page."""


def results() -> dict[str, list[tuple[str, str, str]]]:
    """Return by scenario the rows (client, GB/s, CPU-seconds per GB) of the page's tables, fastest first."""
    rates, cpus = _figures("Throughput, GB/s"), _figures("CPU-seconds per GB")
    return {
        name: sorted(
            ((client, rate, cpus[name][client]) for client, rate in rates[name].items()),
            key=lambda row: -float(row[1]),
        )
        for name in SCENARIOS
    }


def _figures(title: str) -> dict[str, dict[str, str]]:
    """Return by scenario and client the medians of the page's table of that title."""
    text = RESULTS.read_text(encoding="utf-8")
    (table,) = re.findall(rf"^### {re.escape(title)}\n\n(.*?)(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    return {
        row[0].strip("`"): {
            client: cell.split()[0]
            for client, cell in zip(head[1:], row[1:], strict=True)
            if cell not in ("", "-")
        }
        for row in rows
    }


def performance(colours: dict[str, str]) -> Canvas:
    """Draw the throughput of every client in each scenario, with CPU as text beside the bars."""
    c = Canvas(
        900, 470, "Throughput and CPU of Penstock beside five other ways to fill a FIFO from S3", colours
    )
    for number, (name, rows) in enumerate(results().items()):
        left, top = 10 + 300 * (number % 3), 24 + 220 * (number // 3)
        c.text(left, top, SCENARIOS[name], size=14, bold=True)
        c.text(left, top + 18, "GB/s", size=11, colour="muted")
        c.text(left + 280, top + 18, "CPU-s/GB", size=11, colour="muted", anchor="end")
        most = float(rows[0][1])
        for row, (client, rate, cpu) in enumerate(rows):
            y, ours = top + 28 + row * 27, client == "penstock"
            width = max(2.0, 100 * float(rate) / most)
            c.text(left, y + 14, client, size=12.5, bold=ours)
            c.shapes.append(
                f'<rect x="{left + 84}" y="{y + 1}" width="{width:.1f}" height="18" rx="3" '
                f'fill="{colours["ours" if ours else "bar"]}"/>'
            )
            c.text(left + 90 + width, y + 14, rate, size=12, bold=ours)
            c.text(
                left + 280,
                y + 14,
                cpu,
                size=12,
                bold=ours,
                anchor="end",
                colour="text" if ours else "muted",
            )
    return c


DIAGRAMS = {
    "data-flow": data_flow,
    "epoch": epoch,
    "back-pressure": back_pressure,
    "keeper": keeper,
    "pod": pod,
    "rooms": rooms,
    "performance": performance,
}


def pictures() -> dict[str, str]:
    """Return the content of every file, by name."""
    return {
        f"{name}-{scheme}.svg": draw(colours).render()
        for name, draw in DIAGRAMS.items()
        for scheme, colours in PALETTES.items()
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        (TARGET / name).write_text(text, encoding="utf-8")
