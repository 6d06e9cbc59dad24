"""The command line: parses arguments, runs commands on uvloop, prints errors and returns exit codes.

Each command imports only the modules that it needs, because health checks run `penstock probe` every few
seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from sidecar.cli.help import Group, color
from sidecar.process.dumps import forbid_dumps
from sidecar.process.exits import Exit, exit_code
from sidecar.process.streams import guard
from streamer import __version__
from streamer.errors import ConfigError, PenstockError, ReaderGone
from streamer.secrets import escape_control, redact, remember_environment
from streamer.units import KIB, human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from sidecar.config.job import Job
    from streamer.plan import Join
    from streamer.relay.transport import Wish


class _Size(click.ParamType[int]):
    """A number of bytes: 8MiB, 64K, 1048576."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            return int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            self.fail(f"{value!r} is not a size; write 8MiB or a number of bytes", param, ctx)


_COLORS = {"ok": "green", "warning": "yellow", "failure": "red"}
"""Colours of the findings of `doctor`."""
DEFAULT_FILE = "penstock.yaml"
"""Job file, in the working directory, of a command that names none."""


_job_file = click.option(
    "-c",
    "--config",
    "path",
    envvar="PENSTOCK_CONFIG",
    show_envvar=True,
    metavar="FILE",
    type=click.Path(),
    help=f"The job file, YAML or JSON. Default: {DEFAULT_FILE} in the working directory.",
)
_log_level = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least important events that are logged.",
)
_log_json = click.option(
    "--json", "as_json", is_flag=True, help="Write the log as JSON, as is done unless it goes to a terminal."
)
_host_index = click.option(
    "--host-index",
    type=click.IntRange(min=0),
    help="The index of this host, from 0. Default: that of the environment.",
)
_host_count = click.option(
    "--host-count",
    type=click.IntRange(min=1),
    help="The number of hosts of the job. Default: that of the environment.",
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Stream S3 objects into FIFOs for training jobs: SageMaker Pipe mode, anywhere."""
    color(ctx)


@cli.command(
    examples=[
        "penstock run -c job.yaml",
        "penstock run -c job.yaml --keeper auto --host-index 0 --host-count 4",
    ],
    page="docs/reference/configuration.md#command-line",
)
@_job_file
@_host_index
@_host_count
@click.option(
    "--keeper",
    metavar="SOCKET|auto",
    help="The socket of the keeper that holds the FIFOs, so that the sidecar can restart; auto starts one.",
)
@click.option(
    "--resume", metavar="STATE", help="Begin at the position in a reader's state_dict(): a file, or JSON."
)
@click.option("--resume-anyway", is_flag=True, help="Resume even if the objects have changed.")
@_log_level
@_log_json
def run(
    path: str | None,
    *,
    host_index: int | None,
    host_count: int | None,
    keeper: str | None,
    resume: str | None,
    resume_anyway: bool,
    log_level: str,
    as_json: bool,
) -> None:
    """Serve the channels of a job until SIGTERM.

    The first SIGTERM or Ctrl-C lets running epochs finish, the second ends at once.
    """
    from sidecar.commands import run as command
    from sidecar.process.runner import run as run_loop

    with _end_logged(log_level, as_json=as_json) as end:
        job = _load(path)
        continuation = command.Continuation(keeper=keeper, resume=resume, resume_anyway=resume_anyway)
        code = run_loop(command.run(job, (host_index, host_count), continuation))
        if code != command.RESTART:
            end(code)
    if code == command.RESTART:
        # Ignored until the new program handles it: another SIGUSR2 would end the process.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        arguments = [*sys.orig_argv, *(["--keeper", "auto"] if keeper is None else [])]
        os.execv(sys.executable, arguments)  # noqa: S606 - the same command, with the code now installed
    sys.exit(int(code))


@cli.command(examples=["penstock restart", "penstock restart --base-directory /data/ml"])
@click.option(
    "--base-directory", default="/opt/ml", show_default=True, help="The directory that the sidecar serves."
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds to wait until the sidecar is ready again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: pid, seconds.")
def restart(base_directory: str, *, wait: float, as_json: bool) -> None:
    """Restart the sidecar that serves a base directory, while its trainer runs on.

    Returns when every FIFO is offered again.
    """
    from sidecar.commands.restart import restart as restart_sidecar
    from sidecar.job.layout import Layout

    pid, seconds = restart_sidecar(Layout(base_directory), within=wait)
    if as_json:
        _print_json({"pid": pid, "seconds": round(seconds, 3)})
    else:
        click.echo(f"the sidecar, process {pid}, is ready again after {seconds:.1f} s")


@cli.command(
    examples=["penstock keeper /run/penstock/keeper"], page="docs/explanation/architecture.md#the-keeper"
)
@click.argument("path", metavar="SOCKET")
def keeper(path: str) -> None:
    """Hold the FIFOs of sidecars, so that a sidecar may be killed or restarted under its trainer."""
    from streamer.helpers.keeper_client import command
    from streamer.helpers.spawn import environment

    arguments = command(os.path.abspath(path))
    os.execve(arguments[0], arguments, environment())  # noqa: S606 - a process without this one's modules


@cli.command(
    "exec",
    context_settings={"allow_interspersed_args": False},
    examples=["penstock exec -c job.yaml python train.py --epochs 3"],
    page="docs/reference/configuration.md#command-line",
)
@_job_file
@_host_index
@_host_count
@_log_level
@_log_json
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(
    path: str | None,
    *,
    host_index: int | None,
    host_count: int | None,
    log_level: str,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as the trainer beside the channels, and exit with its code.

    Options of penstock come first. COMMAND starts when every FIFO is offered; signals are forwarded to it.
    """
    from sidecar.commands import execute as command_module
    from sidecar.process.runner import run as run_loop

    with _end_logged(log_level, as_json=as_json) as end:
        code = run_loop(command_module.execute(_load(path), (host_index, host_count), command))
        end(code)
    sys.exit(int(code))


@cli.command(
    examples=[
        "penstock cat s3://bucket/prefix/ | tar -t",
        "penstock cat s3://bucket/a s3://bucket/b --endpoint-url http://minio:9000 --path-style > both",
    ]
)
@click.argument("uris", nargs=-1, required=True, metavar="S3URI...")
@click.option("--endpoint-url", metavar="URL", help="The URL of an S3-compatible endpoint.")
@click.option("--region", help="The region of the bucket. Default: that of the environment.")
@click.option("--profile", help="A profile of the AWS configuration files.")
@click.option("--path-style", is_flag=True, help="Put the bucket into the path, not into the host name.")
@click.option("--anonymous", is_flag=True, help="Do not sign requests.")
@click.option("--ca-bundle", metavar="FILE", help="Certificates to trust, PEM.")
@click.option("--requester-pays", is_flag=True, help="Agree to pay for reading a Requester Pays bucket.")
@click.option(
    "--sse-customer-key-file", metavar="FILE", help="A file with the key of objects encrypted with SSE-C."
)
@click.option(
    "--budget",
    type=_Size(),
    help="Memory for bytes in flight. Default: a quarter of the memory, 64 to 512 MiB.",
)
@click.option("--part-size", type=_Size(), help="Bytes of one request. Default: adapts.")
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
@click.option(
    "--give-up-after",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds without a byte of progress before it fails.",
)
@click.option("--join", type=click.Choice(["tar", "arrow"]), help="Join the objects into one of this format.")
@click.option("-q", "--quiet", "closing", flag_value="none", help="Write no closing line to standard error.")
@click.option("--json", "closing", flag_value="json", help="Write the closing line as JSON.")
def cat(
    uris: tuple[str, ...],
    *,
    closing: str | None,
    budget: int | None,
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

    from pydantic import ValidationError

    from sidecar.commands import cat as command
    from sidecar.config.mistakes import explain
    from sidecar.config.settings import EndpointConfig
    from sidecar.process.memory import default_budget, memory_limit
    from streamer.plan import parse_s3_uri
    from streamer.schedule.concurrency import SMALLEST_PART

    _configure("warning")
    endpoint["url"] = endpoint.pop("endpoint_url")
    try:
        checked = EndpointConfig(**{_pascal(name): value for name, value in endpoint.items()})
    except ValidationError as error:
        raise ConfigError(f"endpoint options: {explain(error, EndpointConfig)}") from None
    part = SMALLEST_PART if part_size is None else part_size
    budget = max(2 * part, default_budget(memory_limit())) if budget is None else budget
    if part < 64 * KIB or budget < 2 * part:
        raise ConfigError(
            f"--budget {human_bytes(budget)} must hold two parts of --part-size {human_bytes(part)}, "
            f"and a part at least 64 KiB"
        )
    options = command.CatOptions(
        budget=budget,
        part_size=part_size,
        requests_in_flight=requests_in_flight,
        transport=transport,
        give_up_after=give_up_after,
        join=join,
    )
    _finish(
        command.cat(
            [parse_s3_uri(uri) for uri in uris],
            endpoint=checked.resolved(),
            options=options,
            promised=promised,
            report=lambda figures: _close(figures, closing),
        )
    )


@cli.command(
    examples=["penstock check", "penstock check -c job.yaml --json"], page="docs/reference/job-file.md"
)
@_job_file
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: valid, mistakes, warnings.")
def check(path: str | None, *, as_json: bool) -> None:
    """Validate a job file without network access: every mistake with its line and its remedy."""
    from sidecar.commands import check as command

    path = _job_path(path)
    if not as_json:
        click.echo(command.summary(path, _load(path, "error")))
        return
    _configure("error")
    document = command.check(path)
    _print_json(document)
    sys.exit(document["code"])


@cli.command(examples=["penstock plan -c job.yaml", "penstock plan -c job.yaml --json | jq .channels"])
@_job_file
@_host_index
@_host_count
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, with the key of every object.")
def plan(path: str | None, host_index: int | None, host_count: int | None, *, as_json: bool) -> None:
    """List what each channel will stream: objects, bytes, parts, digest of the order."""
    from sidecar.commands import plan as command
    from sidecar.process.runner import run as run_loop

    document = run_loop(command.plan(_load(path, "warning"), (host_index, host_count)))
    if as_json:
        _print_json(document)
        return
    click.echo(f"transport  {document['transport']}: {document['reason']}")
    click.echo(
        f"budget     {human_bytes(document['budget'])}, "
        f"{document['requests_in_flight']} requests at once at first"
    )
    if document["open_files"]:
        click.echo(f"open files {document['open_files']}")
    for name, channel in document["channels"].items():
        click.echo(
            f"{name}\n  objects  {channel['objects']}\n  bytes    {channel['bytes']} ({channel['size']})\n"
            f"  parts    {channel['parts']} of up to {human_bytes(channel['part_size'])}\n"
            f"  digest   {channel['digest']}"
        )
        for rank, each in channel.get("ranks", {}).items():
            click.echo(
                f"  {rank}  {each['objects']} objects, {each['bytes']} bytes, digest {each['digest'][:16]}"
            )


@cli.command(examples=["penstock doctor -c job.yaml"], page="docs/how-to/doctor.md")
@_job_file
@_host_index
@_host_count
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON at the end.")
def doctor(path: str | None, host_index: int | None, host_count: int | None, *, as_json: bool) -> None:
    """Try all that a job needs: credentials, permissions, endpoint, limits of this machine, speed."""
    from sidecar.doctor import examination
    from sidecar.process.runner import run as run_loop

    job = _load(path, "warning")
    findings = []

    async def examine() -> None:
        async for finding in examination.examine(job, (host_index, host_count)):
            findings.append(finding)
            if not as_json:
                mark = examination.MARKS[finding.state]
                line = examination.line(finding).removeprefix(mark)
                click.echo(click.style(mark, fg=_COLORS[finding.state], bold=True) + line)

    run_loop(examine())
    if as_json:
        _print_json(examination.document(findings))
    else:
        click.echo(examination.summary(findings))
    sys.exit(examination.code(findings))


_url = click.option(
    "--url",
    default="http://127.0.0.1:9781",
    show_default=True,
    help="The admin address of the sidecar; its log event `ready` has it.",
)


@cli.command(
    examples=["penstock top", "penstock top --once --url http://127.0.0.1:9782"],
    page="docs/reference/metrics.md#the-status-page",
)
@_url
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures of one frame as JSON and exit.")
@click.option(
    "--token-file", metavar="FILE", help="The file that Penstock.Admin.TokenFile names, if Protect is all."
)
def top(url: str, *, once: bool, as_json: bool, token_file: str | None) -> None:
    """Show a running sidecar live: bottleneck, speed and progress of each channel. Press q to quit."""
    from sidecar.admin.remote import events
    from sidecar.admin.top import watch
    from sidecar.config.settings import read_token

    shown = events(url, None if token_file is None else read_token(token_file))
    if as_json:
        _print_json(next(shown))
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch(shown, once=once)


def _print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2))


@cli.command(
    "set",
    examples=["penstock set --token-file token bandwidth=200MB train.bandwidth=none requests_in_flight=auto"],
    page="docs/reference/metrics.md#limits-that-may-change",
)
@_url
@click.option(
    "--token-file", required=True, metavar="FILE", help="The file that Penstock.Admin.TokenFile names."
)
@click.option("--json", "as_json", is_flag=True, help="Print all limits as JSON.")
@click.argument("limits", nargs=-1, required=True, metavar="LIMIT=VALUE...")
def change(url: str, *, token_file: str, as_json: bool, limits: tuple[str, ...]) -> None:
    """Change limits of a running sidecar.

    A LIMIT is bandwidth, CHANNEL.bandwidth, requests_in_flight or memory_budget; the VALUE none or auto lifts
    a limit.
    """
    from sidecar.admin import remote
    from sidecar.config.settings import read_token

    changed = remote.change(url, remote.parse_limits(limits), read_token(token_file))
    if as_json:
        _print_json(changed)
    else:
        click.echo("\n".join(remote.describe_limits(changed)))


@cli.command(
    examples=["penstock probe", "until penstock probe --quiet; do sleep 0.2; done"],
    page="docs/reference/metrics.md",
)
@_url
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: ready, why.")
def probe(url: str, *, quiet: bool, as_json: bool) -> None:
    """Ask a running sidecar whether it is ready: exit code 0 if it is, 1 if not, with the reason."""
    from sidecar.admin.probe import why_not_ready

    why = why_not_ready(url)
    if as_json:
        _print_json({"ready": not why, "why": why})
    elif not quiet:
        click.echo(f"not ready: {why}" if why else "ready", err=bool(why))
    sys.exit(1 if why else 0)


def _close(figures: dict[str, Any], closing: str | None) -> None:
    """Print the closing line of `cat`, unless `closing` is "none"."""
    seconds, count = figures["seconds"], figures["bytes"]
    line = (
        f"{figures['objects']} objects, {count} bytes in {seconds:.2f} s by {figures['transport']}: "
        f"{count / max(seconds, 1e-3) / 1e6:.0f} MB/s, {figures['cpu_seconds_per_gb']:.2f} CPU-s/GB, "
        f"{figures['requests_in_flight']} requests in flight"
    )
    if closing != "none":
        click.echo(json.dumps(figures) if closing == "json" else line, err=True)


def _pascal(name: str) -> str:
    return "".join(word.title() for word in name.split("_"))


def _job_path(path: str | None) -> str:
    """Return `path`, that of `-c` or PENSTOCK_CONFIG, or else the default. Raises ConfigError."""
    if path:
        return path
    if os.path.exists(DEFAULT_FILE):
        return DEFAULT_FILE
    raise ConfigError(
        f"no job file is given: write -c FILE, set PENSTOCK_CONFIG, or name the file {DEFAULT_FILE} and "
        f"start in its directory; this directory is {os.getcwd()}"
    )


def _load(path: str | None, log_level: str | None = None) -> Job:
    """Set up logging unless it is, then read the job file. Raises ConfigError."""
    from sidecar.config.job import load_job

    if log_level is not None:
        _configure(log_level)
    return load_job(_job_path(path))


def _configure(log_level: str, *, as_json: bool = False) -> None:
    from sidecar.process.logs import configure

    configure(level=log_level, json_lines=as_json or None)


@contextlib.contextmanager
def _end_logged(log_level: str, *, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Set up logging; yield a function that logs the end and its exit code. Log an error that ends the block.

    So every line of a JSON log is JSON, the last one too. In a terminal `main` prints the error.
    """
    from sidecar.config.document import FileMistakes
    from sidecar.process.logs import log

    _configure(log_level, as_json=as_json)
    try:
        yield lambda code: log.info("ended", code=int(code))
    except PenstockError as error:
        if not as_json and sys.stderr.isatty():
            raise
        if isinstance(error, FileMistakes):
            for mistake in error.mistakes:
                place = {"file": error.path, "line": mistake.line, "key": mistake.key}
                log.error("mistake in the job file", **place, error=mistake.message)
        code = exit_code(error)
        log.error("ended", code=int(code), error=str(error))
        sys.exit(int(code))


def _finish(work: Coroutine[Any, Any, int]) -> None:
    """Run a command to its end and exit with its code."""
    from sidecar.process.runner import run as run_loop

    sys.exit(int(run_loop(work)))


def main() -> None:
    """Entry point of the `penstock` command."""
    guard()
    try:
        forbid_dumps()
        remember_environment()
        # click returns an exit code only where it ends a command early, as after --help.
        code = cli.main(prog_name="penstock", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else Exit.OK)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(int(Exit.INTERRUPTED))
    except ReaderGone:
        sys.exit(int(Exit.READER_GONE))
    except PenstockError as error:
        code = exit_code(error)
        # A ConfigError of a job file has one line for each mistake. Any other text may contain an object's
        # key, whose line ends must be escaped.
        lines = str(error).split("\n") if isinstance(error, ConfigError) else [str(error)]
        click.echo("penstock: " + "\n".join(escape_control(redact(line)) for line in lines), err=True)
        sys.exit(int(code))
    except Exception:  # noqa: BLE001 - a bug: log the traceback and exit with its own code
        from sidecar.process.logs import log

        log.exception("unexpected error; please report it")
        sys.exit(int(Exit.BUG))
