"""What `--help` shows: whole sentences, examples, exit codes, environment, pages of the documentation."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from sidecar.process.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

EXITS = {
    Exit.OK: "Success.",
    Exit.BUG: "Penstock has a bug; `probe`: the sidecar is not ready.",
    Exit.CONFIG: "The job file or the command line is wrong.",
    Exit.DENIED: "Credentials are absent, wrong or insufficient.",
    Exit.MISSING: "There is no such bucket or object.",
    Exit.UNREACHABLE: "The endpoint did not answer, or answered wrongly.",
    Exit.CHANGED: "An object was replaced or deleted after it was listed.",
    Exit.LOCAL: "A directory, FIFO, port or limit of this machine is at fault.",
    Exit.CORRUPT: "An object is corrupt.",
    Exit.NOT_UPLOADED: "Something was not uploaded; the log names it.",
    Exit.NOT_FOUND: "`exec`: the command does not exist.",
    Exit.INTERRUPTED: "Ctrl-C, or a second signal.",
    Exit.READER_GONE: "`cat`: the reader of standard output has left.",
}
"""Exit codes in short; docs/reference/exit-codes.md has the whole meaning."""
ENVIRONMENT = {
    "PENSTOCK_CONFIG": "The job file of commands without -c.",
    "NO_COLOR": "Set to any text: no colours. Colours are for terminals only.",
    "AWS_*": "Credentials, region and endpoint, as for every AWS client.",
}
GROUPS = {
    "Prepare the data of a job": ("manifest", "index"),
    "Look before a job runs": ("check", "plan", "doctor"),
    "Run a job": ("run", "exec", "restart", "keeper"),
    "Watch a running sidecar": ("probe", "top", "set"),
    "Move data without a job file": ("cat", "upload"),
}
_is_job_file = re.compile(r"[^-].*\.(?:ya?ml|json)").fullmatch
SHELLS = ("bash", "zsh", "fish")


class Command(click.Command):
    """A command whose help ends with examples and the page about it."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), page: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.examples, self.page = tuple(examples), page

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        if self.examples:
            with formatter.section("Examples"):
                _lines(formatter, self.examples)
        if self.page:
            with formatter.section("Documentation"):
                _lines(formatter, [self.page])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, option = list(args), {"-c", "--config"}
        takes_file = any(each.name == "path" and "-c" in each.opts for each in self.params)
        file = next((each for each in given if takes_file and _is_job_file(each)), "")
        mistake = click.UsageError(f"the job file is an option: write -c {file}", ctx)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption:
            raise  # click names the options that are spelled alike
        except click.UsageError:
            if file and not option & set(given):
                raise mistake from None
            raise
        program = next(iter(ctx.params.get("command") or ()), "")  # of `exec`
        if program and program == file and not option & set(given[: given.index(file)]):
            raise mistake
        return rest


class CommandGroup(Command, click.Group):
    """A command with parts, whose help ends with the examples of all parts."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a part, and its examples to those of the group."""
        super().add_command(cmd, name)
        self.examples += getattr(cmd, "examples", ())

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(part)) for name, part in self.commands.items()])


class Commands(click.Group):
    """The command `penstock` itself."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary(self.commands[name])) for name in names])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning) for code, meaning in EXITS.items()])
        with formatter.section("Environment"):
            formatter.write_dl(list(ENVIRONMENT.items()))
        with formatter.section("Completion of commands and options, for ~/.bashrc and the like"):
            _lines(formatter, [completion(shell) for shell in SHELLS])
        with formatter.section("Documentation"):
            _lines(formatter, ["docs/index.md, docs/reference/command-line.md"])


def completion(shell: str) -> str:
    """Return the line that makes a shell complete `penstock`."""
    if shell == "fish":
        return "_PENSTOCK_COMPLETE=fish_source penstock | source"
    return f'eval "$(_PENSTOCK_COMPLETE={shell}_source penstock)"  # {shell}'


def summary(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    return " ".join((command.help or "").split("\n\n", 1)[0].split())


def color(ctx: click.Context) -> None:
    """Let click write colours to terminals only, and nowhere if NO_COLOR is set (no-color.org)."""
    ctx.color = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def _lines(formatter: click.HelpFormatter, lines: Sequence[str]) -> None:
    for line in lines:
        formatter.write(f"{'':{formatter.current_indent}}{line}\n")
