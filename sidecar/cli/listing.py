"""The command `manifest`, which lists objects into a manifest for a job file."""

from __future__ import annotations

import os
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
    from sidecar.commands.manifest_text import Label
    from streamer.plan.selection import Selection


class LabelType(click.ParamType["Label"]):
    """A label: NAME=REGEX."""

    name = "label"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Label:
        from sidecar.commands.manifest_text import Label

        if isinstance(value, Label):
            return value
        try:
            return Label.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    cls=Command,
    examples=[
        "penstock manifest s3://bucket/images/ --include '*.jpg' > train.manifest",
        "penstock manifest s3://bucket/images/ --label 'class=([^/]+)/[^/]+$' --to train.manifest",
        "penstock manifest s3://bucket/val/ --label 'class=val/([^/]+)/' --label-ids ids.json > val.manifest",
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
@click.option(
    "--label-ids",
    metavar="FILE",
    help="Write numbers for labels: those in this JSON file, or, if there is none, from 0 in sorted order, "
    "and write the file.",
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
    label_ids: str | None,
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
    _check(labels, label_ids, keys_file, skip_unmatched=skip_unmatched, target=target)
    selection = take_keys(source)
    if keys_file is None:
        found = _listed(uris, selection, source, quiet=closing == "none")
    else:
        found = _read(keys_file, uris, selection, source)
    options = command.ManifestOptions(labels=labels, skip_unmatched=skip_unmatched, ids=label_ids, to=target)
    _close(command.write(found, options), closing)


def _check(
    labels: tuple[Label, ...],
    label_ids: str | None,
    keys_file: str | None,
    *,
    skip_unmatched: bool,
    target: str | None,
) -> None:
    """Raise ConfigError for options that contradict each other."""
    names = [label.name for label in labels]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--label names {twice[0]!r} twice; give every attribute a name of its own")
    if not labels and (skip_unmatched or label_ids is not None):
        option = "--skip-unmatched" if skip_unmatched else "--label-ids"
        raise ConfigError(f"{option} needs --label NAME=REGEX")
    for option, path in (("--label-ids", label_ids), ("--keys", keys_file)):
        if None not in (target, path) and os.path.realpath(str(target)) == os.path.realpath(str(path)):
            raise ConfigError(f"--to and {option} name the same file, {target}; name two")


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
    """Read the list of keys. `source`: options of a listing, of which none may be given."""
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
