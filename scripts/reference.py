"""Writes docs/reference from the program itself: `python -m scripts.reference`. A test compares both.

    sidecar.cli.cli           -> command-line.md    every command and option, as `--help` has them
    sidecar.config.job.Job    -> job.schema.json    every key with type, limits and default, as JSON Schema

docs/reference/configuration.md, which is not generated, explains the keys.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sidecar.cli import cli
from sidecar.cli.help import ENVIRONMENT, SHELLS, completion
from sidecar.config.job import Job

TARGET = Path(__file__).parent.parent / "docs/reference"
UNITS = """\
## Units

Data and rates have decimal units: 1 GB is 10^9 bytes, as in the prices of S3 and the rates of networks.
Memory, pipes and limits have binary units: 1 MiB is 2^20 bytes, as in the kernel. A size in an option or in
the job file may have either: `64MiB`, `500MB`, or a number of bytes.
"""


def command_line() -> str:
    """Return the page of the command line."""
    page = [
        "# Command line\n",
        "Generated from the program by `python -m scripts.reference`. What the commands do to a job:",
        "[configuration](configuration.md#command-line).\n",
        f"`penstock`: {cli.help}\n",
    ]
    shared = _shared()
    with click.Context(cli, info_name="penstock") as above:
        for name, command in sorted(cli.commands.items()):
            page += _command(name, command, above, "##", shared)
    page += [
        "## Options of several commands\n",
        *_table(sorted(shared, key=lambda row: row[0].lstrip("-"))),
        "",
    ]
    page += ["[Exit codes](exit-codes.md) are the same for every command.\n"]
    page += ["## Environment\n", "| Variable | Meaning |", "|---|---|"]
    page += [f"| `{name}` | {_cell(meaning)} |" for name, meaning in ENVIRONMENT.items()]
    page += [
        "",
        UNITS,
        "## Shell completion\n",
        "One line in the start file of the shell completes commands,",
    ]
    page += ["options and job files:\n", "```bash", *(completion(shell) for shell in SHELLS), "```", ""]
    return "\n".join(page)


Row = tuple[str, str]
"""An option as `--help` writes it, and its meaning."""


def _shared() -> set[Row]:
    """Return the options that several commands have, and that mean the same in all of them."""
    with click.Context(cli, info_name="penstock") as context:
        found = Counter(row for command in _leaves(cli) for row in _options(command, context))
    meanings = Counter(option for option, _ in found)
    return {row for row, count in found.items() if count > 1 and meanings[row[0]] == 1}


def _leaves(command: click.Command) -> Iterator[click.Command]:
    """Yield a command, or the commands of a group."""
    if not isinstance(command, click.Group):
        yield command
        return
    for part in command.commands.values():
        yield from _leaves(part)


def _options(command: click.Command, context: click.Context) -> list[Row]:
    options = [each for each in command.params if isinstance(each, click.Option)]
    return [row for each in options if (row := each.get_help_record(context)) is not None]


def _table(rows: list[Row]) -> list[str]:
    lines = [f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in rows]
    return ["| Option | Meaning |", "|---|---|", *lines]


def _command(
    name: str, command: click.Command, above: click.Context, heading: str, shared: set[Row]
) -> list[str]:
    """Return the lines about a command and its parts."""
    with click.Context(command, info_name=name, parent=above) as context:
        usage = command.get_usage(context).removeprefix("Usage: ")
        lines = [f"{heading} {context.command_path}\n", inspect.cleandoc(command.help or "").strip() + "\n"]
        lines += ["```", " ".join(usage.split()), "```\n"]
        if isinstance(command, click.Group):
            parts = [_command(*part, context, f"{heading}#", shared) for part in command.commands.items()]
            return lines + [line for part in parts for line in part]
        rows = _options(command, context)
        if own := [row for row in rows if row not in shared]:
            lines += [*_table(own), ""]
        if others := [
            f"`{option.split(' ')[0].rstrip(',')}`" for option, meaning in rows if (option, meaning) in shared
        ]:
            lines += [
                f"Also [options of several commands](#options-of-several-commands): {', '.join(others)}.\n"
            ]
        return [*lines, "```sh", *getattr(command, "examples", ()), "```", ""]


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file. It allows keys that Penstock ignores by name, without a type."""
    found = Job.model_json_schema(by_alias=True, mode="validation")
    models = {model.__name__: model for model in _models(Job)}
    for name, part in [("Job", found), *found["$defs"].items()]:
        part.pop("title", None)
        for ignored in sorted(models[name].ignored):
            part["properties"][ignored] = {"description": "Known to SageMaker; says nothing about data."}
        for inner in part["properties"].values():
            inner.pop("title", None)
            if "$ref" in inner and "default" in inner:
                inner["default"] = {}  # a section has the defaults of its keys
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Penstock job file"} | found


def _models(model: Any) -> set[Any]:
    """Return the model and all models of its fields."""
    found = {model}
    stack = [field.annotation for field in model.model_fields.values()]
    while stack:
        each = stack.pop()
        if isinstance(each, type) and hasattr(each, "model_fields"):
            found |= _models(each)
        stack += getattr(each, "__args__", ())
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def pages() -> dict[str, str]:
    """Return the text of every generated file of docs/reference, by name."""
    return {
        "command-line.md": command_line(),
        "job.schema.json": json.dumps(schema(), indent=2, ensure_ascii=False) + "\n",
    }


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for name, text in pages().items():
        (TARGET / name).write_text(text, encoding="utf-8")
