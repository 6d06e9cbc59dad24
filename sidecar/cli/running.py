"""Commands that run a job (`run`, `exec`, `restart`, `keeper`) or ask its sidecar (`probe`, `top`, `set`)."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import click

from sidecar.cli.help import Command
from sidecar.cli.options import (
    host_count_option,
    host_index_option,
    job_file_option,
    load_job_file,
    log_json_option,
    log_level_option,
    print_json,
    set_up_log,
    url_option,
)
from sidecar.process.exits import exit_code, local_error
from streamer.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_resume_option = click.option(
    "--resume",
    metavar="STATE",
    help="Begin at the position in a reader's state_dict(): a file, a directory, s3://BUCKET/KEY, or JSON. "
    "Without a file there, at the beginning.",
)
_resume_anyway_option = click.option(
    "--resume-anyway", is_flag=True, help="Resume even if the objects or their order have changed."
)


@contextlib.contextmanager
def _end_logged(log_level: str, *, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Set up logging; yield a function that logs the end and its exit code. Log an error that ends the block.

    So every line of a JSON log is JSON, the last one too. In a terminal `main` prints the error.
    """
    from sidecar.config.document import FileMistakes
    from sidecar.process.logs import log

    set_up_log(log_level, as_json=as_json)
    try:
        yield lambda code: log.info("ended", code=int(code))
    except (PenstockError, OSError, ImportError, MemoryError) as cause:
        error = cause if isinstance(cause, PenstockError) else local_error(cause)
        if error is None or (not as_json and sys.stderr.isatty()):
            raise
        if isinstance(error, FileMistakes):
            for mistake in error.mistakes:
                place = {"file": error.path, "line": mistake.line, "key": mistake.key}
                log.error("mistake in the job file", **place, error=mistake.message)
        code = exit_code(error)
        log.error("ended", code=int(code), error=str(error))
        sys.exit(int(code))


@click.command(
    cls=Command,
    examples=[
        "penstock run -c job.yaml",
        "penstock run -c job.yaml --keeper auto --host-index 0 --host-count 4",
    ],
    page="docs/reference/configuration.md#command-line",
)
@job_file_option
@host_index_option
@host_count_option
@click.option(
    "--keeper",
    metavar="SOCKET|auto",
    help="The socket of the keeper that holds the FIFOs, so that the sidecar can restart; auto starts one.",
)
@_resume_option
@_resume_anyway_option
@log_level_option
@log_json_option
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
    with _end_logged(log_level, as_json=as_json) as end:
        from sidecar.commands import run as command
        from sidecar.process.runner import run as run_loop

        job = load_job_file(path)
        running = command.run(
            job,
            (host_index, host_count),
            keeper=keeper,
            resume=resume,
            resume_anyway=resume_anyway,
            reload=lambda: load_job_file(path),
        )
        code = run_loop(running)
        if code != command.RESTART:
            end(code)
    if code == command.RESTART:
        from sidecar.process.early_signals import pass_on

        pass_on()
        arguments = [*sys.orig_argv, *(["--keeper", "auto"] if keeper is None else [])]
        os.execv(sys.executable, arguments)  # noqa: S606 - the same command, with the code now installed
    sys.exit(int(code))


@click.command(
    "exec",
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    examples=[
        "penstock exec -c job.yaml python train.py --epochs 3",
        "penstock exec -c job.yaml --resume /checkpoints torchrun --nproc-per-node 4 train.py",
    ],
    page="docs/reference/configuration.md#command-line",
)
@job_file_option
@host_index_option
@host_count_option
@_resume_option
@_resume_anyway_option
@log_level_option
@log_json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(
    path: str | None,
    *,
    host_index: int | None,
    host_count: int | None,
    resume: str | None,
    resume_anyway: bool,
    log_level: str,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as the trainer beside the channels, and exit with its code.

    Options of penstock come first. COMMAND starts when every FIFO is offered; signals are forwarded to it.
    """
    with _end_logged(log_level, as_json=as_json) as end:
        from sidecar.commands import execute as command_module
        from sidecar.process.runner import run as run_loop

        running = command_module.execute(
            load_job_file(path),
            (host_index, host_count),
            command,
            resume=resume,
            resume_anyway=resume_anyway,
        )
        code = run_loop(running)
        end(code)
    sys.exit(int(code))


@click.command(cls=Command, examples=["penstock restart", "penstock restart --base-directory /data/ml"])
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
        print_json({"pid": pid, "seconds": round(seconds, 3)})
    else:
        click.echo(f"the sidecar, process {pid}, is ready again after {seconds:.1f} s")


@click.command(
    cls=Command,
    examples=["penstock keeper /run/penstock/keeper"],
    page="docs/explanation/architecture.md#the-keeper",
)
@click.argument("path", metavar="SOCKET")
def keeper(path: str) -> None:
    """Hold the FIFOs of sidecars, so that a sidecar may be killed or restarted under its trainer."""
    from streamer.helpers.keeper_connect import command, environment

    arguments = command(os.path.abspath(path))
    os.execve(arguments[0], arguments, environment())  # noqa: S606 - a process without this one's modules


@click.command(
    cls=Command,
    examples=["penstock probe", "until penstock probe --quiet; do sleep 0.2; done"],
    page="docs/reference/metrics.md",
)
@url_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: ready, why.")
def probe(url: str, *, quiet: bool, as_json: bool) -> None:
    """Ask a running sidecar whether it is ready: exit code 0 if it is, 1 if not, with the reason."""
    from sidecar.admin.client import why_not_ready

    why = why_not_ready(url)
    if as_json:
        print_json({"ready": not why, "why": why})
    elif not quiet:
        click.echo(f"not ready: {why}" if why else "ready", err=bool(why))
    sys.exit(1 if why else 0)


@click.command(
    cls=Command,
    examples=["penstock top", "penstock top --once --url http://127.0.0.1:9782"],
    page="docs/reference/metrics.md#the-status-page",
)
@url_option
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures of one frame as JSON and exit.")
@click.option(
    "--token-file", metavar="FILE", help="The file that Penstock.Admin.TokenFile names, if Protect is all."
)
def top(url: str, *, once: bool, as_json: bool, token_file: str | None) -> None:
    """Show a running sidecar live: bottleneck, speed and progress of each channel. Press Ctrl-C to quit."""
    from sidecar.admin.client import events
    from sidecar.admin.top import watch
    from sidecar.config.settings import read_token

    shown = events(url, None if token_file is None else read_token(token_file))
    if as_json:
        print_json(next(shown))
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch(shown, once=once)


@click.command(
    "set",
    cls=Command,
    examples=[
        "penstock set --token-file token bandwidth=200MB train.bandwidth=none requests_in_flight=auto",
    ],
    page="docs/reference/metrics.md#limits-that-may-change",
)
@url_option
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
    from sidecar.admin.client import change_limits, describe_limits, parse_limits
    from sidecar.config.settings import read_token

    changed = change_limits(url, parse_limits(limits), read_token(token_file))
    if as_json:
        print_json(changed)
    else:
        click.echo("\n".join(describe_limits(changed)))
