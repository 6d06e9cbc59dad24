"""Retired words do not come back: each thing has one name, from job key to metric.

The glossary is docs/explanation/concepts.md. A word is retired as an identifier of Python, as a key
of a document that Penstock reads or writes, or as a public name in the documentation.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

IDENTIFIERS = {
    "Lane": "Connection", "LanePool": "ConnectionPool", "lane": "connection, request or rank",
    "lanes": "connections, requests or ranks", "lanes_of": "rank_channels", "lane_of": "rank_channel",
    "Pace": "ConcurrencyController", "pace": "concurrency", "Allotment": "MemoryBudget",
    "Share": "ChannelQuota", "allotment": "memory_budget", "Stragglers": "Hedger", "Takeover": "Hedge",
    "Race": "Hedge", "Look": "HeadSample", "Tally": "ChannelCounters", "tally": "counters",
    "Stopwatch": "StateTimer", "OwnSource": "HttpSource", "OwnHeads": "ObjectInspector",
    "OwnEnds": "LocalWriteEnds", "KeptEnds": "KeeperWriteEnds", "PortableSource": "AiobotocoreSource",
    "PortableHeads": "ObjectInspector", "Heads": "ObjectInspector", "Watcher": "FairPoller",
    "watcher": "poller", "Trust": "TlsContext", "Reading": "RequestOptions", "Where": "ErrorContext",
    "Skewed": "ClockSkew", "Gone": "ObjectMissing", "Refusal": "ErrorResponse",
    "Unusual": "UnsupportedResponse", "Pulse": "ChannelHistory", "pulse": "history", "Moment": "Sample",
    "Door": "ConnectionLimiter", "Guard": "AccessPolicy", "objection": "check",
    "patiently": "retry_while_unavailable", "keep_loaded": "freeze_gc", "Unpacker": "TransformRunner",
    "unpacker": "runner", "Sums": "StoredChecksums", "heir": "successor_keeper",
    "outlives": "fifo_survives_exit", "Course": "ReadLoop", "Begin": "StartPosition",
    "Book": "SharedCursorFile", "Team": "WorkerGroup", "Units": "RecordGrouper", "verdict": "state",
    "Verdict": "TrailerState", "inflight": "requests_in_flight", "portable": "by_aiobotocore",
    "straggler": "late part", "stragglers": "late parts", "takeover": "hedge",
    "in_flight": "requests_in_flight",
    "CheckedSource": "ChecksumTap", "told": "the thing itself: reply, report, line",
    "said": "the thing itself: output, text", "heard": "the thing itself: reply, message",
    "LastingCredentials": "RenewableCredentials", "OfSession": "FixedProvider",
    "PORTABLE_HEADS": "AIOBOTOCORE_HEADS", "HEEDED": "KEPT_FIELDS", "shake_hands": "handshake",
}  # fmt: skip
"""By retired identifier, the word to use."""

PUBLIC = {
    r"(?:`|Transport: )(?:kernel|copying|portable)\b|\b(?:kernel|copying|portable) transport":
        "transport splice, buffered or aiobotocore",
    r"`(?:Lanes|Connections)`|\bLanes: |--connections\b": "Ranks, RequestsInFlight, --requests-in-flight",
    r"penstock_(?:lanes_limit|requests_limit|staged_bytes|budget_bytes)":
        "the metrics of docs/reference/metrics.md",
    r"penstock_epochs_total\{verdict|\"verdict\":": "trailer_state, state or bottleneck",
    r"\b[Ll]anes?\b|\blanes?_of\b": "rank FIFO, rank_channels, connection or request",
    r"kernel splice\b": "splice",
}  # fmt: skip
"""By pattern of a retired public name, the name to use."""

MODULES = {
    "kept": "keeper_client", "ends": "write_ends", "bare": "spawn", "race": "aio", "shortage": "retry",
    "lanes": "requests", "pace": "concurrency", "stragglers": "hedger", "unpack": "transform",
}  # fmt: skip
"""By retired name of a module, the name to use."""

EXEMPT = {"tests/test_names.py"}
"""It names what was renamed."""


def tracked(*patterns: str) -> list[Path]:
    """The project's files of these names, from git, or from the tree of an unpacked source distribution."""
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = done.stdout.splitlines() or [
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.rglob(pattern)
    ]
    return [ROOT / name for name in names if name not in EXEMPT and (ROOT / name).is_file()]


def test_no_identifier_is_a_retired_word() -> None:
    retired = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string} is retired; use {word}"
        for path in tracked("*.py")
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.NAME and (word := IDENTIFIERS.get(token.string.strip("_"))) is not None
    ]
    assert retired == []


def test_no_module_has_a_retired_name() -> None:
    assert [path for path in tracked("*.py") if path.stem in MODULES] == []


@pytest.mark.parametrize("pattern", PUBLIC)
def test_no_public_name_is_a_retired_one(pattern: str) -> None:
    retired = re.compile(pattern)
    for path in tracked("*.py", "*.md", "*.yaml", "*.yml", "*.json", "*.html", "*.toml"):
        if found := retired.search(path.read_text(encoding="utf-8")):
            pytest.fail(f"{path.relative_to(ROOT)}: {found[0]!r} is retired; use {PUBLIC[pattern]}")
