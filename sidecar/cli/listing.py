"""The command `manifest`, which lists objects into a manifest for a job file."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from sidecar.cli.help import Command
from sidecar.cli.options import (
    closing_options,
    endpoint_options,
    give_up_option,
    key_options,
    set_up_log,
    take_keys,
)
from streamer.errors import ConfigError
from streamer.units import counted

if TYPE_CHECKING:
    from sidecar.commands.manifest import Found
    from streamer.plan.selection import Selection


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

    set_up_log("warning")
    patterns = dict(labels)
    if len(patterns) < len(labels):
        raise ConfigError("--label names an attribute twice; give every attribute a name of its own")
    if skip_unmatched and not labels:
        raise ConfigError("--skip-unmatched needs --label NAME=REGEX")
    if None not in (target, keys_file) and os.path.realpath(str(target)) == os.path.realpath(str(keys_file)):
        raise ConfigError(f"--to and --keys name the same file, {target}; name two")
    selection = take_keys(source)
    if keys_file is None:
        found = _listed(uris, selection, source, quiet=closing == "none")
    else:
        found = _read(keys_file, uris, selection, source)
    if labels:
        data, figures = command.augmented_manifest(found, patterns, skip_unmatched=skip_unmatched)
    else:
        data, figures = command.manifest_file(found)
    command.write(data, target)
    _close(figures, closing)


def _listed(uris: tuple[str, ...], selection: Selection, source: dict[str, Any], *, quiet: bool) -> Found:
    """List the objects. `source`: the options of the endpoint, and --give-up-after."""
    from sidecar.commands import manifest as command
    from sidecar.config.endpoint import endpoint_of_options
    from sidecar.process.runner import run as run_loop
    from streamer.plan import parse_s3_uri

    if not uris:
        raise ConfigError("no objects are named: write an S3URI, or --keys FILE")
    parsed = [parse_s3_uri(uri) for uri in uris]
    give_up_after, url = source.pop("give_up_after"), source.pop("endpoint_url")
    endpoint = source | {"url": url, "if_match": "send", "sse_customer_key_file": None}
    listing = command.list_objects(
        parsed,
        endpoint=endpoint_of_options(endpoint),
        selection=selection,
        give_up_after=give_up_after,
        quiet=quiet,
    )
    found: Found = run_loop(listing)
    return found


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


def _close(figures: dict[str, Any], closing: str | None) -> None:
    """Print the closing line, unless `closing` is "none"."""
    import json

    line = f"{counted(figures['objects'], 'object')}; S3DataType: {figures['s3_data_type']}"
    if "labels" in figures:
        line += f", AttributeNames: [{', '.join(figures['attribute_names'])}]"
        labels = figures["labels"].items()
        line += "".join(f"; {counted(number, 'label')} of {name}" for name, number in labels)
        if figures["skipped"]:
            line += f"; {counted(figures['skipped'], 'object')} without a label left out"
    if closing != "none":
        click.echo(json.dumps(figures) if closing == "json" else line, err=True)
