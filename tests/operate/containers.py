"""Dockerfile and compose file, parsed for the tests."""

from __future__ import annotations

import re
import shlex
import subprocess
import sysconfig
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.operate.promql import ROOT

SCRIPTS = sysconfig.get_path("scripts")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


def declared(directory: str) -> tuple[str, list[str]]:
    """The requirements of a distribution of ours, as its metadata has them once it is built."""
    project = tomllib.loads((ROOT / directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    optional = [f"{need}; extra == '{extra}'" for extra, needs in extras.items() for need in needs]
    return project["name"], [*project["dependencies"], *optional]


PROJECTS = dict(map(declared, [".", "streamer"]))
OURS = ("seed", "sidecar", "trainer")


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, **options)


@dataclass
class Stage:
    base: str
    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    """(instruction, arguments) in order."""

    def last(self, instruction: str) -> str:
        """The arguments in force, inherited ones included; empty if there are none."""
        own = [arguments for name, arguments in self.lines if name == instruction]
        if own or self.base not in STAGES:
            return own[-1] if own else ""
        return STAGES[self.base].last(instruction)


def stages() -> dict[str, Stage]:
    """The Dockerfile's stages by name."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, arguments = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = arguments.split()
            found[name] = Stage(base, name)
        else:
            list(found.values())[-1].lines.append((instruction, arguments))
    return found


STAGES = stages()


def image_references() -> list[Any]:
    bases = {stage.base for stage in STAGES.values()} - STAGES.keys()
    return sorted(bases | {service["image"] for service in SERVICES.values() if "image" in service})


def mounts(service: Any) -> list[Any]:
    """(source, target) of each mount of a service."""
    return [tuple(each.split(":")[:2]) for each in SERVICES[service].get("volumes", ())]


def installed(name: str) -> set[str]:
    """The requirements that pip installs for an image, our wheels under their names."""
    stage: Stage | None = STAGES[f"build-{name}"]
    found: set[str] = set()
    while stage is not None:
        commands = [text for how, text in stage.lines if how == "RUN" and " install " in text]
        for words in map(shlex.split, commands):
            found |= set(words[words.index("install") + 1 :])
        stage = STAGES.get(stage.base)
    ours = re.compile(r"(?:\$\(echo )?/wheels/(penstock_\w+)-\*\.whl\)?(?:\$EXTRAS)?")  # empty by default
    return {ours.sub(lambda wheel: canonicalize_name(wheel[1]), one) for one in found}


def closure(requirements: Any) -> set[NormalizedName]:
    """Names of all distributions that the requirements bring, as far as they are installed here."""
    found, queue = set(), [Requirement(one) for one in requirements]
    seen = set()
    while queue:
        wanted = queue.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(key[0])
        try:
            needs = PROJECTS.get(key[0]) or metadata.requires(wanted.name) or []
        except metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            extras = wanted.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(need)
    return found
