"""What several commands share: their options, the job file, the log, JSON as output."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from streamer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.config.job import Job
    from streamer.plan.selection import Selection

SHARED_KEYS = {"MemoryBudget", "PartSize", "RequestsInFlight", "GiveUpAfter", "Include", "Exclude"}
"""Keys of the job file, besides those of the endpoint, that are options of a command without one."""
DEFAULT_FILE = "penstock.yaml"
"""Job file, in the working directory, of a command that names none."""

job_file_option = click.option(
    "-c",
    "--config",
    "path",
    envvar="PENSTOCK_CONFIG",
    show_envvar=True,
    metavar="FILE",
    type=click.Path(),
    help=f"The job file, YAML or JSON. Default: {DEFAULT_FILE} in the working directory.",
)
log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least important events that are logged.",
)
log_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write the log as JSON, as is done unless it goes to a terminal."
)
host_index_option = click.option(
    "--host-index",
    type=click.IntRange(min=0),
    help="The index of this host, from 0. Default: that of the environment.",
)
host_count_option = click.option(
    "--host-count",
    type=click.IntRange(min=1),
    help="The number of hosts of the job. Default: that of the environment.",
)
url_option = click.option(
    "--url",
    default="http://127.0.0.1:9781",
    show_default=True,
    help="The admin address of the sidecar; its log event `ready` has it.",
)
give_up_option = click.option(
    "--give-up-after",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds without a byte of progress before it fails.",
)


def _all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds these options to a command, in this order."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


endpoint_options = _all_of(
    click.option("--endpoint-url", metavar="URL", help="The URL of an S3-compatible endpoint."),
    click.option("--region", help="The region of the bucket. Default: that of the environment."),
    click.option("--profile", help="A profile of the AWS config files."),
    click.option(
        "--path-style/--no-path-style",
        default=None,
        help="Put the bucket into the path, or into the host name. Default: the path with --endpoint-url.",
    ),
    click.option("--anonymous", is_flag=True, help="Do not sign requests."),
    click.option("--ca-bundle", metavar="FILE", help="Certificates to trust, PEM."),
    click.option("--requester-pays", is_flag=True, help="Agree to pay for reading a Requester Pays bucket."),
)
"""Options of the endpoint that every command without a job file has."""
closing_options = _all_of(
    click.option(
        "-q",
        "--quiet",
        "closing",
        flag_value="none",
        help="Write neither progress nor a closing line to standard error.",
    ),
    click.option("--json", "closing", flag_value="json", help="Write the closing line as JSON."),
)
"""Options of the line that ends a command; `closing` is "none", "json" or None."""


class LimitOption(click.ParamType[dict[str, int]]):
    """A limit as a channel has it: objects (1000), or bytes (10GB)."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        text = str(value)
        if text.isascii() and text.isdigit():
            limit = {"Objects": int(text)}
        elif (size := _size(value)) is not None:
            limit = {"Bytes": size}
        else:
            self.fail(f"{value!r} is no limit; write 1000 for objects, or a size, such as 10GB", param, ctx)
        if not any(limit.values()):
            self.fail("a limit of 0 selects nothing; write 1 or more", param, ctx)
        return limit


class SplitOption(click.ParamType[dict[str, Any]]):
    """A split as a channel has it, with the seed 0: folds, a slash, and the number of all folds."""

    name = "split"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        from streamer.plan.split import MOST_FOLDS, parse_folds

        match = re.fullmatch(r"([^/]+)/([0-9]{1,7})", str(value))
        if match is None or not 2 <= int(match[2]) <= MOST_FOLDS:
            self.fail(f"{value!r} is no split; write folds and their number, as in 0-98/100", param, ctx)
        take, of = match[1], int(match[2])
        try:
            parse_folds(take, of)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return {"Of": of, "Take": take}


key_options = _all_of(
    click.option(
        "--include",
        multiple=True,
        metavar="GLOB",
        help="Select only keys that match: '*.tar', '2024/*.tar', 'logs/'. May be given several times.",
    ),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out the keys that match."),
    click.option(
        "--split",
        type=SplitOption(),
        metavar="FOLDS/OF",
        help="Select some folds of the keys, as for a holdout set: 0-98/100, and 99/100 for the rest.",
    ),
)
"""Options that select objects by their keys."""
selection_options = _all_of(
    key_options,
    click.option(
        "--limit",
        type=LimitOption(),
        metavar="NUMBER|SIZE",
        help="Select the first objects: so many (1000), or whole ones of at most so many bytes (10GB).",
    ),
    click.option(
        "--sample",
        type=int,
        metavar="SEED",
        help="Select a random sample up to --limit instead of the first objects; equal for equal seeds.",
    ),
)
"""Options that select objects."""


def selection_section(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `selection_options` as keys of a channel, without those not given.

    Raises ConfigError.
    """
    limit, sample = options["limit"], options["sample"]
    if sample is not None:
        if limit is None:
            raise ConfigError("--sample needs --limit: write how many objects or bytes, as in --limit 1000")
        if not -(2**63) <= sample < 2**63:
            raise ConfigError(f"--sample {sample} is no 64-bit integer: write a small number, such as 7")
        limit |= {"Seed": sample}
    section = {
        "Include": options["include"],
        "Exclude": options["exclude"],
        "Split": options["split"],
        "Limit": limit,
    }
    return {key: value for key, value in section.items() if value}


def take_selection(options: dict[str, Any]) -> Selection:
    """Remove the options of `selection_options`, or of `key_options`; return what they select.

    Raises ConfigError.
    """
    from streamer.plan.selection import Limit, Selection
    from streamer.plan.split import Split, parse_folds

    names = ("include", "exclude", "split", "limit", "sample")
    section = selection_section({name: options.pop(name, None) for name in names})
    limit, split = section.get("Limit"), section.get("Split")
    return Selection(
        section.get("Include", ()),
        section.get("Exclude", ()),
        None if limit is None else Limit(limit.get("Objects"), limit.get("Bytes"), limit.get("Seed")),
        None if split is None else Split(split["Of"], parse_folds(split["Take"], split["Of"])),
    )


class Size(click.ParamType[int]):
    """A number of bytes: 8MiB, 64K, 1048576."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if (size := _size(value)) is None:
            self.fail(f"{value!r} is not a size; write 8MiB or a number of bytes", param, ctx)
        return size


def _size(value: Any) -> int | None:
    """Return a number of bytes; None if the value is no size."""
    from sidecar.config.model import parse_size

    try:
        return parse_size(value)
    except ValueError:
        return None


def job_path(path: str | None) -> str:
    """Return `path`, that of `-c` or PENSTOCK_CONFIG, or else the default. Raises ConfigError."""
    if path:
        return path
    if os.path.exists(DEFAULT_FILE):
        return DEFAULT_FILE
    raise ConfigError(
        f"no job file is given: write -c FILE, set PENSTOCK_CONFIG, or name the file {DEFAULT_FILE} and "
        f"start in its directory; this directory is {os.getcwd()}"
    )


def load_job_file(path: str | None) -> Job:
    """Read the job file at `job_path(path)`. Raises ConfigError."""
    from pydantic.alias_generators import to_pascal

    from sidecar.config.job import load_job
    from sidecar.process.wording import settings_came_from

    job = load_job(job_path(path))
    settings_came_from({f"Endpoint.{to_pascal(name)}" for name in job.penstock.endpoint.model_fields_set})
    return job


def note_options() -> None:
    """Let texts name the options of this command, which has no job file, and not the keys of one."""
    from sidecar.process.wording import settings_came_from

    context, keys = click.get_current_context(), {"S3Uri": "S3URI"}
    given = set()
    for name, option in ((each.name or "", each.opts[0]) for each in context.command.params):
        key = "".join(map(str.capitalize, name.removeprefix("endpoint_").split("_")))
        keys |= dict.fromkeys((f"Endpoint.{key}", *({key} & SHARED_KEYS)), option)
        source = context.get_parameter_source(name)
        given |= {f"Endpoint.{key}"} if source is not None and source.name == "COMMANDLINE" else set()
    settings_came_from(given, keys)


def set_up_log(level: str, *, as_json: bool = False) -> None:
    """Log events of this level and above, as JSON unless standard error is a terminal."""
    from sidecar.process.logs import configure

    configure(level=level, json_lines=as_json or None)


def print_json(document: object) -> None:
    """Print a document to standard output."""
    import json

    click.echo(json.dumps(document, indent=2))


def print_closing(figures: dict[str, Any], line: str, closing: str | None) -> None:
    """Write `line`, or the figures as JSON, to standard error; nothing if `closing` is "none"."""
    import json

    if closing != "none":
        click.echo(json.dumps(figures) if closing == "json" else line, err=True)
