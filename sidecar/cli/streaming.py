"""The command `cat`, which streams objects without a job file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from sidecar.cli.help import Command
from sidecar.cli.options import (
    Size,
    closing_options,
    endpoint_options,
    give_up_option,
    selection_options,
    set_up_log,
    take_selection,
)
from streamer.errors import ConfigError
from streamer.units import KIB, MIB, counted, human_bytes

if TYPE_CHECKING:
    from streamer.plan import Join
    from streamer.relay.transport import Wish

FEW = 10 * MIB
"""Fewest bytes for which `cat` prints rates: those of fewer bytes are mostly the start."""


@click.command(
    cls=Command,
    examples=[
        "penstock cat s3://bucket/prefix/ --join tar | tar -t",
        "penstock cat s3://bucket/prefix/ --include '*.tar' --limit 10GB --sample 7 --join tar > sample.tar",
        "penstock cat s3://bucket/a s3://bucket/b --endpoint-url http://minio:9000 --path-style > both",
    ],
)
@click.argument("uris", nargs=-1, required=True, metavar="S3URI...")
@endpoint_options
@click.option(
    "--if-match",
    type=click.Choice(["send", "omit"]),
    default="send",
    show_default=True,
    help="Name the listed ETag in If-Match; omit: for servers that refuse the header.",
)
@click.option(
    "--sse-customer-key-file", metavar="FILE", help="A file with the key of objects encrypted with SSE-C."
)
@click.option(
    "--memory-budget",
    type=Size(),
    help="Memory for bytes in flight. Default: a quarter of the memory, 64 to 512 MiB.",
)
@click.option("--part-size", type=Size(), help="Bytes of one request. Default: adapts.")
@click.option(
    "--requests-in-flight", type=click.IntRange(1, 1024), help="Requests in flight. Default: adapts."
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "aiobotocore", "buffered", "splice"]),
    default="auto",
    show_default=True,
    help="How bodies travel: splice (to pipes only), buffered or aiobotocore.",
)
@give_up_option
@selection_options
@click.option(
    "--join",
    type=click.Choice(["tar", "lines"]),
    help="Join the objects into one of this format, because programs stop at the first one's end mark.",
)
@closing_options
def cat(
    uris: tuple[str, ...],
    *,
    closing: str | None,
    memory_budget: int | None,
    part_size: int | None,
    requests_in_flight: int | None,
    transport: Wish,
    give_up_after: float,
    join: Join | None,
    **endpoint: Any,
) -> None:
    """Stream objects to standard output: the URIs in the order given, a prefix in key order.

    An exact key is that object; anything else is a prefix. If standard output is a pipe, Penstock's readers
    raise an error at its end unless this command has succeeded.
    """
    from streamer.trailer import mark_pipe

    promised = True
    try:
        mark_pipe(1, "promised")  # first, so that readers do not take a failure from here on for the end
    except PermissionError:
        promised = False
        click.echo("standard output is a pipe of another user: its readers get no proof of its end", err=True)

    from sidecar.commands import cat as command
    from sidecar.config.endpoint import endpoint_of_options
    from sidecar.process.resources import default_budget, memory_limit
    from sidecar.process.runner import run as run_loop
    from streamer.plan import parse_s3_uri
    from streamer.schedule.concurrency import SMALLEST_PART

    set_up_log("warning")
    selection = take_selection(endpoint)
    endpoint["url"] = endpoint.pop("endpoint_url")
    checked = endpoint_of_options(endpoint)
    part = SMALLEST_PART if part_size is None else part_size
    budget = max(2 * part, default_budget(memory_limit())) if memory_budget is None else memory_budget
    if part < 64 * KIB or budget < 2 * part:
        raise ConfigError(
            f"--memory-budget {human_bytes(budget)} must hold two parts of --part-size {human_bytes(part)}, "
            f"and a part at least 64 KiB"
        )
    options = command.CatOptions(
        budget=budget,
        part_size=part_size,
        requests_in_flight=requests_in_flight,
        transport=transport,
        give_up_after=give_up_after,
        join=join,
        selection=selection,
        quiet=closing == "none",
    )
    code = run_loop(
        command.cat(
            [parse_s3_uri(uri) for uri in uris],
            endpoint=checked,
            options=options,
            promised=promised,
            report=lambda figures: _close(figures, closing),
        )
    )
    sys.exit(int(code))


def _close(figures: dict[str, Any], closing: str | None) -> None:
    """Print the closing line of `cat`, unless `closing` is "none"."""
    import json

    seconds, count, per_gb = figures["seconds"], figures["bytes"], figures["cpu_seconds_per_gb"]
    rate = f"{count / max(seconds, 1e-3) / 1e6:.0f} MB/s, {per_gb:.2f} CPU-s/GB"
    if count < FEW:
        rate = f"{per_gb * max(count, 1) / 1e9:.2f} CPU-s"
    line = (
        f"{counted(figures['objects'], 'object')}, {counted(count, 'byte')} in {seconds:.2f} s by "
        f"{figures['transport']}: {rate}, {counted(figures['requests_in_flight'], 'request')} in flight"
    )
    if closing != "none":
        click.echo(json.dumps(figures) if closing == "json" else line, err=True)
