"""`penstock doctor`: everything that a job needs, tried before it runs.

Checks of the machine come first, then those of the storage; each answers one line and what to do. A check
that cannot be made because an earlier one failed is left out.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sidecar import checks
from sidecar.exits import Exit, exit_code
from sidecar.identity import identify, local_job
from sidecar.runtime import DEFAULT_BASE, Layout, platform_resource_config
from sidecar.storage import storage
from streamer.errors import PenstockError
from streamer.relay.pace import MOST_LANES
from streamer.secrets import redact, visible
from streamer.source.session import open_clients

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.checks import Finding
    from sidecar.commands import Flags
    from sidecar.config import Job

MARKS = {"ok": "ok      ", "warning": "warning ", "failure": "FAILURE "}


async def examine(job: Job, flags: Flags) -> AsyncIterator[Finding]:
    """Every finding, as it is made."""
    layout = Layout(job.penstock.base_directory or DEFAULT_BASE)
    document = platform_resource_config(layout)
    job = local_job(job, identify(job, flags=flags, environment=os.environ, document=document))
    yield checks.memory(job)
    yield checks.pipes(job)
    yield checks.open_files()
    yield checks.fifo_directory(layout)
    penstock = job.penstock
    try:
        connections = penstock.connections or MOST_LANES
        async with open_clients(
            penstock.endpoint.resolved(), connections=connections, stall_timeout=penstock.longest_silence
        ) as clients:
            async for finding in storage(job, clients):
                yield finding
    except PenstockError as error:
        yield checks.Finding("endpoint", "failure", str(error), code=exit_code(error))


def line(finding: Finding) -> str:
    """One finding for people."""
    said = f"{MARKS[finding.state]} {finding.check:<18} {visible(redact(finding.text))}"
    return f"{said}\n{'':9}{'':19}-> {finding.fix}" if finding.fix else said


def document(findings: list[Finding]) -> dict[str, Any]:
    """All findings for programs."""
    return {"code": int(code(findings)), "findings": [asdict(finding) for finding in findings]}


def code(findings: list[Finding]) -> int:
    """What to exit with: the first failure's code."""
    return next((each.code for each in findings if each.state == "failure"), Exit.OK)
