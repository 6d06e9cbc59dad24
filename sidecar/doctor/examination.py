"""`penstock doctor`: checks everything that a job needs before it runs.

Checks of the machine run first, then those of the storage. Each returns a finding: one line, and what to do.
A check that depends on a failed one is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sidecar.doctor import machine
from sidecar.doctor.record_index import record_indexes
from sidecar.doctor.remedies import failed
from sidecar.doctor.storage import storage
from sidecar.job.channels import job_clients
from sidecar.job.layout import DEFAULT_BASE, Layout, resolve_host
from sidecar.job.listings import open_listings
from sidecar.job.planning import channel_source
from sidecar.process.exits import Exit
from sidecar.process.resources import memory_limit
from streamer.errors import PenstockError
from streamer.escaping import escape_control
from streamer.s3.pages.validation import PlanMemory
from streamer.secrets import redact

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.doctor.machine import Finding
    from sidecar.job.layout import Flags
    from streamer.plan import Plan
    from streamer.s3.client.session import Clients

MARKS = {"ok": "ok      ", "warning": "warning ", "failure": "FAILURE "}


async def examine(job: Job, flags: Flags) -> AsyncIterator[Finding]:
    """Run all checks; yield each finding at once."""
    layout = Layout(job.penstock.base_directory or DEFAULT_BASE)
    job, hosts = resolve_host(job, layout, flags)
    yield machine.memory(job)
    yield machine.pipes(job)
    yield machine.open_files(job)
    for channel in job.channels("Pipe"):
        if (unequal := machine.steps(channel, hosts)) is not None:
            yield unequal
    directory = machine.fifo_directory(job, layout)
    yield directory
    yield await machine.admin_port(job)
    try:
        async with job_clients(job) as clients:
            listed = set()
            async for finding in storage(job, clients):
                yield finding
                listed |= {finding.check} if finding.state == "ok" else set()
            async for finding in record_indexes(job, clients, hosts):
                yield finding
            files = [each for each in job.channels("File") if f"list {each.channel_name}" in listed]
            if files and directory.state != "failure":
                yield machine.disk(layout, await _plans(job, clients, hosts, files))
    except PenstockError as error:
        yield failed("endpoint", error)


async def _plans(job: Job, clients: Clients, hosts: Hosts, channels: list[ChannelConfig]) -> dict[str, Plan]:
    """Plan these channels completely, as `run` does. Raises PenstockError."""
    plans = {}
    memory = PlanMemory(memory_limit() // 2)
    async with open_listings(job, clients) as listings:
        for channel in channels:
            source = channel_source(
                clients, job, channel, hosts, listings=listings, progress=lambda _: None, memory=memory
            )
            plans[channel.channel_name] = await source.plan()
    return plans


def line(finding: Finding) -> str:
    """Return one finding as text for people."""
    text = f"{MARKS[finding.state]} {finding.check:<18} {escape_control(redact(finding.text))}"
    return f"{text}\n{'':9}{'':19}-> {finding.fix}" if finding.fix else text


def summary(findings: list[Finding]) -> str:
    """Return how many findings there are of each kind."""
    count = Counter(each.state for each in findings)
    return f"{len(findings)} checks: {count['failure']} failed, {count['warning']} with a warning"


def document(findings: list[Finding]) -> dict[str, Any]:
    """Return all findings as a document for programs."""
    return {"code": int(code(findings)), "findings": [asdict(finding) for finding in findings]}


def code(findings: list[Finding]) -> int:
    """Return the exit code: that of the first failure, 0 if there is none."""
    return next((each.code for each in findings if each.state == "failure"), Exit.OK)
