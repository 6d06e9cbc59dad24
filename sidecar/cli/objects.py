"""Commands without a job file: `manifest` lists objects, `cat` streams them, `upload` writes them."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from sidecar.cli.help import Command
from sidecar.cli.options import (
    Size,
    closing_options,
    endpoint_options,
    give_up_option,
    key_options,
    note_options,
    print_closing,
    selection_options,
    set_up_log,
    take_selection,
)
from sidecar.process.exits import Exit
from streamer.errors import ConfigError
from streamer.units import KIB, MIB, counted, human_bytes

if TYPE_CHECKING:
    from sidecar.commands.manifest import Found
    from streamer.plan import Join
    from streamer.plan.selection import Selection
    from streamer.relay.transport import Wish

condition_option = click.option(
    "--if-match",
    type=click.Choice(["send", "omit"]),
    default="send",
    show_default=True,
    help="Send the condition (If-Match, If-None-Match) that an object is unchanged, or not there; omit: for "
    "servers that refuse the header.",
)
customer_key_option = click.option(
    "--sse-customer-key-file", metavar="FILE", help="A file with the key of objects encrypted with SSE-C."
)
FEW = 10 * MIB
"""Fewest bytes for which `cat` prints rates: those of fewer bytes are mostly the start."""
LONGEST_NAME = 256
"""Most characters of an attribute's name (contract §3.1)."""
Label = tuple[str, re.Pattern[str]]
"""Name of an attribute; and an expression with one group, whose text in a key is the attribute's value."""


class LabelType(click.ParamType[Label]):
    """A label: NAME=REGEX."""

    name = "label"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Label:
        if isinstance(value, tuple):
            return value
        try:
            return _label(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _label(text: str) -> Label:
    """Return the label of `NAME=REGEX`. Raises ValueError."""
    name, equals, expression = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is no label: write NAME=REGEX, such as 'class=([^/]+)/[^/]+$'")
    if name.endswith("-ref"):
        raise ValueError(f"the name {name!r} ends in -ref, so its value would be read as an object's URI")
    if name.startswith("$") or len(name) > LONGEST_NAME or not name.isprintable():
        raise ValueError(
            f"{name!r} cannot be the name of an attribute: use at most {LONGEST_NAME} printable characters, "
            "and no $ in front"
        )
    try:
        pattern = re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{expression!r} is no regular expression of Python: {error}") from None
    if pattern.groups != 1:
        raise ValueError(
            f"{expression!r} has {pattern.groups} groups; put one pair of parentheses around the label, and "
            "write (?:...) for others"
        )
    return name, pattern


@click.command(
    cls=Command,
    examples=[
        "penstock manifest s3://bucket/images/ --include '*.jpg' > train.manifest",
        "penstock manifest s3://bucket/images/ --label 'class=([^/]+)/[^/]+$' --to train.manifest",
        "penstock manifest s3://bucket/images/ --keys keys.txt --to train.manifest",
    ],
    page="docs/how-to/manifests.md",
)
@click.argument("uris", nargs=-1, metavar="[S3URI]...")
@click.option(
    "--keys",
    "keys_file",
    metavar="FILE",
    help="A list in place of a listing: on each line what follows S3URI, or without one a whole URI. "
    "-: standard input.",
)
@key_options
@click.option(
    "--label",
    "labels",
    type=LabelType(),
    multiple=True,
    metavar="NAME=REGEX",
    help="Add an attribute: the text of the one group of the expression, found in the key. May be given "
    "several times.",
)
@click.option("--skip-unmatched", is_flag=True, help="Leave out objects whose keys lack a label.")
@click.option("--to", "target", metavar="FILE", help="The file of the manifest. Default: standard output.")
@endpoint_options
@give_up_option
@closing_options
def manifest(
    uris: tuple[str, ...],
    *,
    keys_file: str | None,
    labels: tuple[Label, ...],
    skip_unmatched: bool,
    target: str | None,
    closing: str | None,
    **source: Any,
) -> None:
    """Make a ManifestFile of the objects below S3URIs; with labels from their keys, an augmented manifest.

    An exact key is that object; anything else is a prefix. The objects are in the order of the S3URIs and of
    their keys, or of the list.
    """
    from sidecar.commands import manifest as command
    from sidecar.config.endpoint import endpoint_of_options
    from sidecar.process.runner import run as run_loop
    from streamer.plan import parse_address

    set_up_log("warning")
    note_options()
    patterns = dict(labels)
    if len(patterns) < len(labels):
        raise ConfigError("--label names an attribute twice; give every attribute a name of its own")
    if skip_unmatched and not labels:
        raise ConfigError("--skip-unmatched needs --label NAME=REGEX")
    if None not in (target, keys_file) and os.path.realpath(str(target)) == os.path.realpath(str(keys_file)):
        raise ConfigError(f"--to and --keys name the same file, {target}; name two")
    selection = take_selection(source)
    if keys_file is not None:
        found = _read(keys_file, uris, selection, source)
    elif not uris:
        raise ConfigError("no objects are named: write an S3URI, or --keys FILE")
    else:
        give_up_after = source.pop("give_up_after")
        listing = command.list_objects(
            [parse_address(uri) for uri in uris],
            endpoint=endpoint_of_options(source),
            selection=selection,
            give_up_after=give_up_after,
            quiet=closing == "none",
        )
        found = run_loop(listing)
    if labels:
        data, figures = command.augmented_manifest(found, patterns, skip_unmatched=skip_unmatched)
    else:
        data, figures = command.manifest_file(found)
    command.write(data, target)
    line = f"{counted(figures['objects'], 'object')}; S3DataType: {figures['s3_data_type']}"
    if labels:
        line += f", AttributeNames: [{', '.join(figures['attribute_names'])}]"
        numbers = figures["labels"].items()
        line += "".join(f"; {counted(number, 'label')} of {name}" for name, number in numbers)
        if figures["skipped"]:
            line += f"; {counted(figures['skipped'], 'object')} without a label left out"
    print_closing(figures, line, closing)


def _read(path: str, uris: tuple[str, ...], selection: Selection, source: dict[str, Any]) -> Found:
    """Read the list of keys. `source`: options of a listing, which may not be given."""
    from sidecar.commands import manifest as command

    if len(uris) > 1:
        raise ConfigError("--keys takes one S3URI, which each line follows, or none")
    context = click.get_current_context()
    for name in source:
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE":
            raise ConfigError(f"--keys sends no request: leave out --{name.replace('_', '-')}")
    return command.read_keys(path, uris[0] if uris else None, selection)


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
@condition_option
@customer_key_option
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
    from streamer.plan import parse_address
    from streamer.relay.transport import TransportSpec
    from streamer.retry import RetryPolicy
    from streamer.schedule.concurrency import SMALLEST_PART

    set_up_log("warning")
    note_options()
    selection = take_selection(endpoint)
    checked = endpoint_of_options(endpoint)
    part = SMALLEST_PART if part_size is None else part_size
    budget = max(2 * part, default_budget(memory_limit())) if memory_budget is None else memory_budget
    if part < 64 * KIB or budget < 2 * part:
        raise ConfigError(
            f"--memory-budget {human_bytes(budget)} must hold two parts of --part-size {human_bytes(part)}, "
            f"and a part at least 64 KiB"
        )
    parsed = [parse_address(uri) for uri in uris]
    spec = TransportSpec(
        buckets={uri.bucket for uri in parsed},
        channels=[],
        budget=budget,
        wish=transport,
        requests_in_flight=requests_in_flight,
        part_size=part_size,
        retry=RetryPolicy(give_up_after=give_up_after),
    )
    quiet = closing == "none"
    figures = run_loop(
        command.cat(parsed, endpoint=checked, spec=spec, join=join, selection=selection, quiet=quiet)
    )
    if figures is None:
        sys.exit(int(Exit.READER_GONE))
    if promised:
        mark_pipe(1, "complete")
    seconds, count, per_gb = figures["seconds"], figures["bytes"], figures["cpu_seconds_per_gb"]
    rate = f"{count / max(seconds, 1e-3) / 1e6:.0f} MB/s, {per_gb:.2f} CPU-s/GB"
    if count < FEW:
        rate = f"{per_gb * max(count, 1) / 1e9:.2f} CPU-s"
    line = (
        f"{counted(figures['objects'], 'object')}, {counted(count, 'byte')} in {seconds:.2f} s by "
        f"{figures['transport']}: {rate}, {counted(figures['requests_in_flight'], 'request')} in flight"
    )
    print_closing(figures, line, closing)


@click.command(
    cls=Command,
    examples=[
        "penstock upload /opt/ml/model s3://bucket/models/run-7/",
        "penstock upload checkpoints s3://bucket/run-7/checkpoints --replace",
    ],
    page="docs/how-to/uploading.md",
)
@click.argument("directory", metavar="DIRECTORY")
@click.argument("uri", metavar="S3URI")
@click.option("--replace", is_flag=True, help="Replace objects of other bytes. Default: leave and name them.")
@endpoint_options
@condition_option
@customer_key_option
@give_up_option
@closing_options
def upload(
    directory: str, uri: str, *, replace: bool, closing: str | None, give_up_after: float, **endpoint: Any
) -> None:
    """Upload the files below DIRECTORY to S3URI, each whole or not at all.

    A file's key is S3URI, a slash and its path in DIRECTORY. A file whose object has the same bytes counts as
    uploaded, so a command that was interrupted can be repeated.
    """
    from sidecar.commands import upload as command
    from sidecar.config.endpoint import endpoint_of_options
    from sidecar.process.runner import run as run_loop
    from streamer.plan import parse_address
    from streamer.retry import RetryPolicy

    set_up_log("warning")
    note_options()
    figures = run_loop(
        command.upload(
            directory,
            parse_address(uri),
            endpoint=endpoint_of_options(endpoint),
            policy=RetryPolicy(give_up_after=give_up_after),
            replace=replace,
            quiet=closing == "none",
        )
    )
    left_out = figures["left_out"]
    line = (
        f"{counted(figures['objects'], 'object')}, {counted(figures['bytes'], 'byte')} in "
        f"{figures['seconds']:.2f} s" + (f"; {counted(left_out, 'file')} not uploaded" if left_out else "")
    )
    print_closing(figures, line, closing)
    if left_out:
        sys.exit(int(Exit.NOT_UPLOADED))
