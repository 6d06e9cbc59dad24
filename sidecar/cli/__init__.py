"""The command line: parses arguments, runs commands on uvloop, prints errors and returns exit codes.

    help        the texts of `--help`, and the class of every command
    options     options that several commands share, and what they stand for
    objects, planning, indexing, running    the commands

These modules import click and little else, because every command imports all of them. A command imports the
modules that it needs in its function, so that `penstock probe`, which health checks run every few seconds,
loads no S3 client and `penstock plan` no supervisor. `tests/test_arrows.py` lists what each command may load.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from sidecar.cli.help import Commands, color
from sidecar.cli.indexing import index
from sidecar.cli.objects import cat, manifest, upload
from sidecar.cli.planning import check, doctor, plan
from sidecar.cli.running import change, execute, keeper, probe, restart, run, top
from sidecar.process.exits import Exit, exit_code, local_error
from sidecar.process.streams import guard
from sidecar.process.wording import spelled
from streamer import __version__
from streamer.errors import ConfigError, PenstockError, ReaderGone
from streamer.escaping import escape_control
from streamer.linux import forbid_dumps
from streamer.secrets import redact, remember_environment


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Stream S3 objects into FIFOs for training jobs: SageMaker Pipe mode, anywhere."""
    color(ctx)


for command in (
    run, restart, keeper, execute, cat, upload, check, plan, doctor, manifest, index, top, change, probe,
):  # fmt: skip
    cli.add_command(command)


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
        _end(error)
    except Exception as error:  # noqa: BLE001 - whatever no code above expects
        if (
            isinstance(error, (OSError, ImportError, MemoryError))
            and (local := local_error(error)) is not None
        ):
            _end(local)
        from sidecar.process.logs import configure_unless_done, log

        configure_unless_done()
        log.exception("unexpected error; please report it")
        sys.exit(int(Exit.BUG))


def _end(error: PenstockError) -> NoReturn:
    """Print an error that ended the command, and exit with its code."""
    # A ConfigError of a job file has one line for each mistake. Any other text may contain an object's
    # key, whose line ends must be escaped.
    lines = str(error).split("\n") if isinstance(error, ConfigError) else [str(error)]
    click.echo("penstock: " + "\n".join(spelled(escape_control(redact(line))) for line in lines), err=True)
    sys.exit(int(exit_code(error)))
