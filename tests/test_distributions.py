"""Every distribution that a text tells people to install is ours, or one that we depend on.

A package index gives a name to whoever registers it first. A text that names a stranger's distribution has
its reader run the stranger's code.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECTS = [".", "streamer", "compat/sagemaker_tensorflow"]
MENTIONED = {"atheris", "pip"}
"""Others' that a page recommends and no project of ours needs."""
COMMAND = re.compile(
    r"\bpip3?(?:[ ](?:--python[ ]\S+|-\S+))*[ ](?:install|wheel|download)\b"
    r"(?P<words>(?:(?!, |[`\n#;&|]|\\n).)*)"
)
EXTRA = re.compile(r"\bpenstock[a-z-]*\[[a-z,-]+\]")
"""Our name with an extra, wherever it stands."""
VALUED = {"--group", "--python", "--wheel-dir", "--target", "--requirement", "-r", "-w", "-t"}


def project(directory: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / directory / "pyproject.toml").read_text())


def ours() -> dict[str, set[str]]:
    """The extras of each distribution of ours, by its name."""
    found = [project(directory)["project"] for directory in PROJECTS]
    return {each["name"]: set(each.get("optional-dependencies", ())) for each in found}


def needed() -> set[str]:
    """Distributions that a project of ours needs, for whatever purpose."""
    found: set[str] = set()
    for directory in PROJECTS:
        table = project(directory)
        groups = [
            table["build-system"]["requires"],
            table["project"].get("dependencies", []),
            *table["project"].get("optional-dependencies", {}).values(),
            *table.get("dependency-groups", {}).values(),
        ]
        wanted = [each for group in groups for each in group if isinstance(each, str)]
        found |= {canonicalize_name(Requirement(each).name) for each in wanted}
    return found - ours().keys()


def check(word: str) -> str | None:
    """What is wrong with one argument of pip's, a requirement or a path; None if nothing is."""
    path = re.fullmatch(r"(?P<path>(?:\.|/src/penstock)(?:/[\w./-]+)?)(?:\[(?P<extras>[\w,]+)\])?", word)
    if path is not None:
        directory = path["path"].removeprefix("/src/penstock").strip("./") or "."
        if directory not in PROJECTS:
            return "is no project of ours"
        name, extras = (
            project(directory)["project"]["name"],
            set(filter(None, (path["extras"] or "").split(","))),
        )
    else:
        try:
            wanted = Requirement(word)
        except InvalidRequirement:
            return "is no requirement"
        name, extras = canonicalize_name(wanted.name), wanted.extras
    if name in ours():
        return None if extras <= ours()[name] else f"asks {name} for extras that it does not have"
    return None if name in needed() | MENTIONED else "is neither ours nor one that we depend on"


def requirements(text: str) -> list[str]:
    """What the commands of a text install."""
    found = EXTRA.findall(text)
    for command in COMMAND.finditer(text):
        words = command["words"].split()
        for before, word in zip(["", *words], words, strict=False):
            bare = word.strip("'\")(.") if not word.startswith(("'.", ".")) else word.strip("'\")(")
            if bare and not bare.startswith(("-", "$", "/wheels/", "\\")) and before not in VALUED:
                found.append(bare)
    return found


def texts() -> dict[Path, str]:
    """Every file of the repository that people or programs read as text."""
    tops = [top for top in ROOT.iterdir() if top.name[0] != "." and top.name not in {"build", "dist"}]
    found = {}
    for path in (each for top in tops for each in (top.rglob("*") if top.is_dir() else [top])):
        if path.is_file() and path != Path(__file__) and "__pycache__" not in path.parts:
            with contextlib.suppress(UnicodeDecodeError):
                found[path] = path.read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`pip install -e '.[torch]' --group demo`", ["asks"]),
        ("RUN pip --python /x/python install requestz", ["neither"]),
        ("PIP install: pip install 'penstock[sidecar]', or", ["neither", "neither"]),
        ("pip wheel --no-deps --wheel-dir /wheels ./streamer .", []),
        ("pip install './streamer[tensorflow]' ./compat/sagemaker_tensorflow", []),
        ("pip install './streamer[sidecar]' 'awscrt>=0.38' x-y==1", ["asks", "neither"]),
        ("penstock-readers[torch] and penstock-sidecar[tls]", ["asks"]),
    ],
)
def test_the_search_finds_strangers(text: str, found: list[str]) -> None:
    objections = [each for each in map(check, requirements(text)) if each is not None]
    assert len(objections) == len(found), objections
    assert all(start in each for start, each in zip(found, objections, strict=True))


def test_no_text_names_a_strangers_distribution() -> None:
    assert ours().keys() == {"penstock-sidecar", "penstock-readers", "penstock-sagemaker-tensorflow"}
    seen, wrong = 0, []
    for path, text in texts().items():
        for word in requirements(text):
            seen += 1
            if (problem := check(word)) is not None:
                wrong.append(f"{path.relative_to(ROOT)}: {word} {problem}")
    assert seen > 20
    assert not wrong


def test_dependencies_on_our_own_name_distributions_of_ours() -> None:
    for directory in PROJECTS:
        for word in project(directory)["project"].get("dependencies", []):
            if word.startswith("penstock"):
                assert check(word) is None, f"{directory}: {word}"
