"""The command `index` and its parts: `build`, `verify`, `show`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sidecar.cli.help import Command, CommandGroup
from sidecar.cli.options import job_file_option, load_job_file, print_json, set_up_log
from streamer.errors import ConfigError

if TYPE_CHECKING:
    from streamer.formats.record_format import RecordFormat

_PAGE = "docs/how-to/record-index.md"
channel_option = click.option(
    "--channel", "channels", multiple=True, metavar="NAME", help="This channel alone; may be given again."
)
place_option = partial(
    click.option,
    metavar="PLACE",
    help="The directory of the indexes, or their prefix in S3: s3://BUCKET/PREFIX. Default: Records.Index.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress in a terminal.")


@click.group(cls=CommandGroup, page=_PAGE)
def index() -> None:
    """Build, verify and show record indexes: where the records of every object begin."""


def _format(context: click.Context, option: click.Parameter, value: str | None) -> RecordFormat | None:
    """Return the record format of an option's value."""
    from streamer.formats.record_format import RecordFormat

    try:
        return None if value is None else RecordFormat.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


@index.command(
    cls=Command,
    examples=[
        "penstock index build -c job.yaml",
        "penstock index build -c job.yaml --channel images",
        "penstock index build -c job.yaml --to s3://my-bucket/index/ --format TFRecord",
    ],
    page=_PAGE,
)
@job_file_option
@channel_option
@place_option("--to", "place")
@click.option(
    "--format",
    "record_format",
    callback=_format,
    metavar="FORMAT",
    help="TFRecord, RecordIO, lines or tar. Default: Records.Format, or that of the index.",
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def build(
    path: str | None,
    *,
    channels: tuple[str, ...],
    place: str | None,
    record_format: RecordFormat | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Scan the objects of the channels that the index does not have, and add them to it.

    A build that was interrupted goes on where it ended. Objects that were replaced are scanned again.
    """
    from sidecar.commands import index as command
    from sidecar.process.runner import run as run_loop

    set_up_log("warning")
    job = load_job_file(path)
    building = command.build(job, place, channels=channels, record_format=record_format, quiet=quiet)
    _print(run_loop(building), as_json=as_json)


@index.command(
    cls=Command,
    examples=[
        "penstock index verify -c job.yaml",
        "penstock index verify -c job.yaml --all",
    ],
    page=_PAGE,
)
@job_file_option
@channel_option
@place_option("--from", "place")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="The most indexed records of a channel to look at, drawn at random.",
)
@click.option("--all", "everything", is_flag=True, help="Read all bytes, and find every record again.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def verify(
    path: str | None,
    *,
    channels: tuple[str, ...],
    place: str | None,
    samples: int,
    everything: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare the index with the objects: their sizes and ETags, and record headers in their bytes."""
    from sidecar.commands import index as command
    from sidecar.process.runner import run as run_loop

    set_up_log("warning")
    job = load_job_file(path)
    verifying = command.verify(
        job, place, channels=channels, samples=samples, everything=everything, quiet=quiet
    )
    _print(run_loop(verifying), as_json=as_json)


@index.command(
    cls=Command,
    examples=[
        "penstock index show --from index",
        "penstock index show --from index --json",
        "penstock index show -c job.yaml",
    ],
    page=_PAGE,
)
@job_file_option
@place_option("--from", "place")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def show(path: str | None, place: str | None, *, as_json: bool) -> None:
    """Show objects, records, bytes and size of each index.

    With `--from FOLDER` all indexes in it, without a job file; else those of the job file's channels.
    """
    if place is not None and "://" not in place:
        given = click.get_current_context().get_parameter_source("path")
        if given is not None and given.name == "COMMANDLINE":
            raise ConfigError(
                "-c goes with indexes in S3: leave out -c to show all indexes of the directory of --from, or "
                "write --from s3://BUCKET/PREFIX"
            )
        from sidecar.commands.index_figures import show as figures

        _print(figures(place), as_json=as_json)
        return
    from sidecar.commands import index as command
    from sidecar.process.runner import run as run_loop

    set_up_log("warning")
    _print(run_loop(command.show(load_job_file(path), place)), as_json=as_json)


def _print(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    from sidecar.commands.index_figures import lines

    click.echo("\n".join(lines(document)))
