"""Commands that look before a job runs: `check`, `plan`, `doctor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import click

from sidecar.cli.help import Command
from sidecar.cli.options import (
    host_count_option,
    host_index_option,
    job_file_option,
    job_path,
    load_job_file,
    print_json,
    selection_options,
    selection_section,
    set_up_log,
)
from sidecar.process.exits import Exit
from streamer.errors import ConfigError
from streamer.escaping import escape_control
from streamer.secrets import redact
from streamer.units import counted, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failure": ("FAILURE", "red")}
"""By state of a finding of `doctor`, the word before it, and its colour."""


@click.command(
    cls=Command,
    examples=["penstock check", "penstock check -c job.yaml --json"],
    page="docs/reference/configuration.md",
)
@job_file_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: valid, mistakes, warnings.")
def check(path: str | None, *, as_json: bool) -> None:
    """Validate a job file without network access: every mistake with its line and its remedy."""
    from sidecar.config.document import FileMistakes, Mistake
    from sidecar.config.job import load_job, warnings

    path = job_path(path)
    set_up_log("error")
    document = {"file": path, "valid": False, "code": int(Exit.CONFIG)}
    try:
        job = load_job(path)
    except ConfigError as error:
        if not as_json:
            raise
        found, more = [Mistake(str(error))], 0
        if isinstance(error, FileMistakes):
            found, more = [*error.mistakes], error.more
        mistakes = [{"line": each.line, "key": each.key, "message": each.message} for each in found]
        print_json(document | {"mistakes": mistakes, "more": more})
        sys.exit(Exit.CONFIG)
    modes = {channel.channel_name: job.mode(channel) for channel in job.input_data_config}
    if as_json:
        valid = {"valid": True, "code": 0, "mistakes": [], "more": 0}
        print_json(document | valid | {"warnings": warnings(job), "channels": modes})
        return
    for warning in warnings(job):
        click.echo(f"{path}: warning: {warning}")
    channels = ", ".join(f"{name} ({mode})" for name, mode in modes.items())
    click.echo(f"{path}: no mistakes; channels: {channels}")


@click.command(
    cls=Command,
    examples=[
        "penstock plan -c job.yaml",
        "penstock plan -c job.yaml --json | jq .channels",
        "penstock plan --include '*.tar' --limit 1000",
        "penstock plan -c job.yaml --steps",
    ],
)
@job_file_option
@host_index_option
@host_count_option
@selection_options
@click.option(
    "--steps",
    is_flag=True,
    help="Print a table of each rank's records, steps, bytes, requests; --json always has them.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress in a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, with the key of every object.")
def plan(
    path: str | None,
    *,
    host_index: int | None,
    host_count: int | None,
    steps: bool,
    quiet: bool,
    as_json: bool,
    **selecting: Any,
) -> None:
    """List what each channel will stream: objects, bytes, parts, digest of the order.

    --include, --exclude, --split and --limit stand in the place of Include, Exclude, Split and Limit of every
    channel, to try them before they are written into the job file.
    """
    from sidecar.commands import plan as command
    from sidecar.config.job import with_extras
    from sidecar.process.runner import run as run_loop

    set_up_log("warning")
    job = with_extras(load_job_file(path), selection_section(selecting))
    document = run_loop(command.plan(job, (host_index, host_count), keys=as_json, quiet=quiet))
    if as_json:
        print_json(document)
        return
    click.echo(f"transport  {document['transport']}: {document['reason']}")
    click.echo(f"requests   {document['requests_in_flight']} in flight at first")
    budget = human_bytes(document["memory_budget"])
    click.echo(f"memory     up to {human_bytes(document['memory'])}, {budget} of it MemoryBudget")
    if document["open_files"]:
        click.echo(f"open files {document['open_files']}")
    for name, channel in document["channels"].items():
        click.echo(
            f"{name}\n  objects  {channel['objects']}\n  bytes    {channel['bytes']} ({channel['size']})\n"
            f"  parts    {channel['parts']} of up to {human_bytes(channel['part_size'])}\n"
            f"  digest   {channel['digest']}"
        )
        if "steps" in channel:
            all_steps = f"{counted(channel['steps'], 'step')} of {counted(channel['all_ranks'], 'rank')}"
            here = " of this host" if len(document["host"]["hosts"]) > 1 else ""
            click.echo(f"  records  {channel['records']}{here}, in {all_steps}")
        for line in (_steps if steps else _ranks)(name, channel):
            click.echo(line)
        if (wrong := channel.get("wrong_format")) is not None:
            click.echo(f"  format   wrong: {wrong['why']}; {wrong['do']}")
        if (unequal := channel.get("unequal_steps")) is not None:
            click.echo(f"  steps    unequal: {unequal['why']}; {unequal['do']}")
        if (small := channel.get("small_requests")) is not None:
            click.echo(f"  requests small: {small['why']}; {small['do']}")


def _ranks(_: str, channel: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each rank FIFO of a channel."""
    for rank, each in channel.get("ranks", {}).items():
        of = counted(each["objects"], "object")
        if "steps" in each:
            of = f"{counted(each['records'], 'record')}, {counted(each['steps'], 'step')}"
        yield f"  {rank}  {of}, {counted(each['bytes'], 'byte')}, digest {each['digest'][:16]}"


def _steps(name: str, channel: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of --steps: a row for each rank FIFO, or for the channel without any."""
    ranks = channel.get("ranks", {name: channel})
    keys = ["records", "padding", "steps"]
    if not any(each.get("padding") for each in ranks.values()):
        keys.remove("padding")
    rows = [("", *keys, "bytes", "requests", "bytes a request")]
    for rank, each in ranks.items():
        counts = (each.get(key, "-") for key in keys)
        figures = (*counts, each["bytes"], each["parts"])
        rows.append((rank, *map(str, figures), str(each["requested"] // max(each["parts"], 1))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        numbers = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        yield f"  {first:<{widths[0]}}  {'  '.join(numbers)}"


@click.command(cls=Command, examples=["penstock doctor -c job.yaml"], page="docs/how-to/doctor.md")
@job_file_option
@host_index_option
@host_count_option
@click.option(
    "--for",
    "command",
    type=click.Choice(["run", "exec"]),
    help="The command that will run the job. Default: either; what only run lacks is a warning.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON at the end.")
def doctor(
    path: str | None,
    host_index: int | None,
    host_count: int | None,
    *,
    command: Literal["run", "exec"] | None,
    as_json: bool,
) -> None:
    """Try all that a job needs: credentials, permissions, endpoint, limits of this machine, speed."""
    from collections import Counter
    from dataclasses import asdict

    from sidecar.doctor.examination import examine
    from sidecar.process.runner import run as run_loop
    from sidecar.process.wording import spelled

    set_up_log("warning")
    job = load_job_file(path)
    findings = []
    begun = ""

    def begin(check: str) -> None:
        nonlocal begun
        if not as_json and check != begun:
            if begun:  # a check that has found nothing
                click.echo(click.style("ok", fg="green", bold=True))
            click.echo(f"{check:<18} ", nl=False)  # before its result: one that hangs is named
            begun = check

    async def show() -> None:
        nonlocal begun
        async for finding in examine(job, (host_index, host_count), command=command, begin=begin):
            findings.append(finding)
            begin(finding.check)
            begun = ""
            if not as_json:
                mark, color = _MARKS[finding.state]
                text = spelled(escape_control(redact(finding.text)))
                fix = f"\n{'':28}-> {spelled(finding.fix)}" if finding.fix else ""
                click.echo(f"{click.style(f'{mark:<8}', fg=color, bold=True)} {text}{fix}")

    run_loop(show())
    code = int(next((each.code for each in findings if each.state == "failure"), Exit.OK))
    if as_json:
        print_json({"code": code, "findings": [asdict(finding) for finding in findings]})
    else:
        count = Counter(each.state for each in findings)
        click.echo(f"{len(findings)} checks: {count['failure']} failed, {count['warning']} with a warning")
    sys.exit(code)
