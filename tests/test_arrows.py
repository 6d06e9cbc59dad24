"""The arrows of docs/explanation/architecture.md: who may import whom. Nothing points back."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from scripts.diagrams import FOUNDATION, ROOM_ARROWS, ROOMS, SHARED
from streamer.helpers.keeper_connect import command
from tests.kit.processes import job, write_job
from tests.kit.stub import S3Stub

ROOT = Path(__file__).parent.parent
BASE = {
    "streamer", "streamer.errors", "streamer.units",
    "streamer.cancellation", "streamer.escaping", "streamer.launchers",
    "streamer.step_state",
}  # fmt: skip
"""Names that every room may use."""

MAY_IMPORT = {
    "streamer": set(),
    "streamer.errors": set(),
    "streamer.units": set(),
    "streamer.cancellation": set(),
    "streamer.escaping": set(),
    "streamer.launchers": set(),
    "streamer.step_state": set(),
    "streamer.trailer": set(),
    "streamer.key_list": set(),
    "streamer.secrets": set(),
    "streamer.file_reads": set(),
    "streamer.finish": set(),
    "streamer.aio": set(),
    "streamer.linux": set(),
    "streamer.directory": set(),
    "streamer.inflate": set(),
    "streamer.retry": set(),
    "streamer.formats": set(),
    "streamer.plan": {"streamer.formats"},
    "streamer.schedule": {"streamer.plan"},
    "streamer.helpers.keeper": {"streamer.linux"},
    "streamer.helpers": {"streamer.helpers.keeper", "streamer.plan"},
    "streamer.sink": {
        "streamer.directory", "streamer.helpers", "streamer.key_list", "streamer.linux", "streamer.plan",
        "streamer.trailer",
    },
    "streamer.s3.client": {
        "streamer.file_reads", "streamer.linux", "streamer.retry", "streamer.secrets",
    },
    "streamer.s3.signing": {"streamer.plan", "streamer.s3.client"},
    "streamer.s3.http": {"streamer.aio", "streamer.linux", "streamer.s3.client", "streamer.s3.signing"},
    "streamer.s3": {
        "streamer.aio", "streamer.plan", "streamer.retry", "streamer.secrets",
        "streamer.s3.client", "streamer.s3.http", "streamer.s3.signing",
    },
    "streamer.s3.pages": {
        "streamer.aio", "streamer.linux", "streamer.plan", "streamer.retry", "streamer.secrets",
        "streamer.s3", "streamer.s3.client", "streamer.s3.http", "streamer.s3.signing",
    },
    "streamer.s3.manifests": {
        "streamer.aio", "streamer.inflate", "streamer.plan", "streamer.retry", "streamer.s3",
        "streamer.s3.client", "streamer.s3.pages",
    },
    "streamer.relay.statistics": {"streamer.s3"},
    "streamer.relay.staging": {
        "streamer.linux", "streamer.plan", "streamer.relay.statistics", "streamer.s3",
        "streamer.s3.client", "streamer.schedule",
    },
    "streamer.relay.fetch": {
        "streamer.aio", "streamer.plan", "streamer.relay.staging", "streamer.relay.statistics",
        "streamer.retry", "streamer.s3", "streamer.s3.client", "streamer.schedule",
    },
    "streamer.relay.deliver": {
        "streamer.aio", "streamer.directory", "streamer.formats", "streamer.inflate", "streamer.linux",
        "streamer.plan",
        "streamer.relay.fetch", "streamer.relay.staging", "streamer.relay.statistics", "streamer.retry",
        "streamer.s3", "streamer.schedule", "streamer.sink",
    },
    "streamer.relay": {
        "streamer.aio", "streamer.directory", "streamer.helpers", "streamer.linux",
        "streamer.plan", "streamer.relay.deliver", "streamer.relay.fetch", "streamer.relay.staging",
        "streamer.relay.statistics", "streamer.retry", "streamer.s3", "streamer.s3.client",
        "streamer.s3.http", "streamer.s3.signing", "streamer.schedule",
        "streamer.sink", "streamer.trailer",
    },
    "streamer.readers.core": {
        "streamer.formats", "streamer.key_list", "streamer.linux", "streamer.trailer",
    },
    "streamer.readers.samples": {"streamer.formats"},
    "streamer.readers.tensorflow": {"streamer.formats", "streamer.readers.core", "streamer.trailer"},
    "streamer.readers.torch": {
        "streamer.formats", "streamer.readers.core", "streamer.readers.samples", "streamer.trailer",
    },
    "streamer.readers": {"streamer.formats", "streamer.readers.core", "streamer.readers.torch"},
    "sidecar": set(),
    "sidecar.process": {"sidecar", "streamer.secrets", "streamer.sink"},
    "sidecar.config": {"sidecar.process"},
    "sidecar.observe": {"sidecar.config", "sidecar.process"},
    "sidecar.admin": {"sidecar.config", "sidecar.observe", "sidecar.process"},
    "sidecar.index": {"sidecar.config", "sidecar.process"},
    "sidecar.records": {"sidecar.config", "sidecar.index", "sidecar.process"},
    "sidecar.download": {"sidecar.config", "sidecar.observe", "sidecar.process", "sidecar.upload"},
    "sidecar.upload": {"sidecar.observe", "sidecar.process"},
    "sidecar.job": {
        "sidecar.admin", "sidecar.config", "sidecar.download", "sidecar.index", "sidecar.observe",
        "sidecar.process", "sidecar.records", "sidecar.upload",
    },
    "sidecar.commands": {
        "sidecar.config", "sidecar.index", "sidecar.job", "sidecar.observe", "sidecar.process",
        "sidecar.records", "sidecar.upload",
    },
    "sidecar.doctor": {
        "sidecar.config", "sidecar.index", "sidecar.job", "sidecar.process", "sidecar.records",
    },
    "sidecar.cli": {
        "sidecar", "sidecar.admin", "sidecar.commands", "sidecar.config", "sidecar.doctor", "sidecar.job",
        "sidecar.process",
    },
    "sidecar.__main__": {"sidecar", "sidecar.cli", "sidecar.process"},
}  # fmt: skip
"""By room, the rooms that it may import."""
ENGINE = {
    "streamer.aio", "streamer.directory", "streamer.file_reads", "streamer.finish", "streamer.formats",
    "streamer.helpers",
    "streamer.linux", "streamer.plan", "streamer.relay", "streamer.relay.deliver", "streamer.relay.fetch",
    "streamer.relay.staging", "streamer.relay.statistics", "streamer.retry", "streamer.s3",
    "streamer.s3.client", "streamer.s3.manifests", "streamer.s3.pages", "streamer.schedule",
    "streamer.secrets", "streamer.sink", "streamer.trailer",
}  # fmt: skip
"""What every room of `sidecar` may use of the library."""
FOREIGN = {
    "aiobotocore": {"streamer.s3.client"},
    "botocore": {"streamer.s3.client"},
    "uvloop": {"sidecar.process"},
    "aiohttp": {"streamer.s3.client", "sidecar.admin"},
    "prometheus_client": {"sidecar.admin"},
    "click": {"sidecar.cli"},
    "pydantic": {"sidecar.config", "sidecar.admin", "sidecar.cli"},
    "tensorflow": {"streamer.readers.tensorflow", "streamer.readers.samples"},
    "numpy": {"streamer.plan", "streamer.readers", "streamer.readers.tensorflow", "streamer.readers.torch"},
    "torch": {"streamer.readers.torch", "streamer.readers"},
    "pyarrow": {"streamer.readers"},
    "keras": {"streamer.readers.tensorflow"},
    "lightning": {"streamer.readers"},
    "pytorch_lightning": {"streamer.readers"},
    "google": {"streamer.readers"},
    # In formats only the index has it, where it is installed.
    "isal": {"streamer.inflate", "streamer.formats", "sidecar.upload"},
    "backports": {"streamer.inflate"},
}
"""Third-party packages and the only rooms that may import them."""


def room(module: str) -> str:
    """The longest room that the module is in."""
    return max((name for name in MAY_IMPORT if f"{module}.".startswith(f"{name}.")), key=len)


def _is_module(package: str, name: str) -> bool:
    path = ROOT.joinpath(*package.split("."), name)
    return path.with_suffix(".py").exists() or path.is_dir()


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in ("streamer", "sidecar"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append((name, path))
    return found


def imports(path: Path) -> set[str]:
    """Every module imported anywhere in the file, late imports and those for type checking included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            names = (alias.name for alias in node.names)
            found |= {f"{node.module}.{name}" for name in names if _is_module(node.module, name)}
    return found


def test_imports_follow_the_arrows() -> None:
    against = []
    for name, path in modules():
        here = room(name)
        library = ENGINE if here.startswith("sidecar") else set()
        for module in imports(path):
            top = module.split(".")[0]
            if top in ("streamer", "sidecar"):
                allowed = room(module) in MAY_IMPORT[here] | BASE | library | {here}
            else:
                allowed = top not in FOREIGN or here in FOREIGN[top]
            if not allowed:
                against.append(f"{name} imports {module}")
    assert not against


def test_no_file_is_in_a_circle() -> None:
    files = dict(modules())
    arrows = {
        name: {each for each in imports(path) if each in files} - {name} for name, path in files.items()
    }
    finished: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"circle: {' -> '.join((*above[above.index(name) :], name))}"
        if name not in finished:
            for target in sorted(arrows[name]):
                visit(target, (*above, name))
            finished.add(name)

    for name in files:
        visit(name, ())


def test_the_table_allows_no_circle() -> None:
    seen: set[str] = set()

    def visit(name: str, above: Any) -> None:
        assert name not in above, f"circle through {name}"
        for target in MAY_IMPORT[name]:
            visit(target, above | {name})
        seen.add(name)

    for name in MAY_IMPORT:
        visit(name, frozenset())
    assert seen == set(MAY_IMPORT)


def _drawn(name: str) -> str:
    """The room of the diagram that a room is in."""
    return max((each for each in ROOMS if f"{name}.".startswith(f"{each}.")), key=len)


def test_the_diagram_has_every_room_and_arrow() -> None:
    """docs/pictures/rooms-*.svg; an allowed import without an arrow of its own is a chain of arrows."""
    assert {name for name, allowed in MAY_IMPORT.items() if not allowed} >= FOUNDATION
    allowed = {
        (_drawn(name), _drawn(target))
        for name, targets in MAY_IMPORT.items()
        if name not in FOUNDATION
        for target in targets - FOUNDATION
        if name.startswith("streamer") or target.startswith("sidecar")
    }
    arrows = {(source, target) for source, _, target in (each.partition(" ") for each in ROOM_ARROWS)}
    assert arrows <= allowed

    def below(name: str) -> set[str]:
        return {name}.union(*(below(target) for source, target in arrows if source == name))

    assert not {(name, target) for name, target in allowed if target not in below(name)}
    assert set(ROOMS) <= set(MAY_IMPORT)
    assert {_drawn(name) for name in ENGINE - FOUNDATION} == SHARED


def test_the_keeper_loads_the_standard_library_and_the_linux_room() -> None:
    """Its interpreter has no site-packages, and each module costs memory and time at its start."""
    interpreter, *rest = command("/no/such/directory/keeper")
    done = subprocess.run(
        [interpreter, "-X", "importtime", *rest], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, "/no/such/directory/keeper: No such file or directory\n")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "streamer.helpers.keeper.server" in loaded
    ours = {name for name in loaded if name.startswith("streamer.")}
    assert {room(name) for name in ours} == {
        "streamer.helpers", "streamer.helpers.keeper", "streamer.linux", "streamer.units",
    }  # fmt: skip
    assert {name.split(".")[0] for name in loaded - ours - {"imported package"}} <= sys.stdlib_module_names
    assert not loaded & {"asyncio", "dataclasses", "inspect", "logging", "subprocess", "threading"}


def test_readers_load_nothing_but_the_standard_library() -> None:
    """What a training image imports must not bring a storage client, nor TensorFlow for those without."""
    code = (
        "import sys; before = set(sys.modules);"
        "import streamer.readers, streamer.readers.core.plain, streamer.trailer;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert set(loaded) - set(sys.stdlib_module_names) == {"streamer"}


@dataclass(frozen=True)
class Loaded:
    """A command that has ended, and every module that it has loaded."""

    returncode: int
    stdout: str
    stderr: str
    modules: set[str]


def loading(*arguments: str) -> Loaded:
    """Run `penstock` with these arguments."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sidecar", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "sidecar.cli" in modules
    return Loaded(done.returncode, done.stdout, done.stderr, modules)


HEAVY = {
    "aiobotocore", "aiohttp", "asyncio", "awscrt", "botocore", "cryptography", "email.parser", "http.client",
    "httptools", "isal", "logging", "OpenSSL", "prometheus_client", "pydantic", "rich",
    "urllib.request", "uvloop", "yaml", "sidecar.admin.server", "sidecar.job.supervisor",
}  # fmt: skip
"""Modules that take 5 ms or more to import, or that import such modules."""


@pytest.mark.parametrize(
    ("arguments", "code", "heavy"),
    [
        (["--help"], 0, set()),
        (["index", "show", "--from", "/no/such/folder"], 2, {"isal", "logging"}),
        (["run", "--help"], 0, set()),
        (["--version"], 0, set()),
        (["probe", "--url", "http://127.0.0.1:1"], 1, {"http.client", "email.parser"}),
    ],
)
def test_a_command_loads_what_it_uses(arguments: list[str], code: int, heavy: set[str]) -> None:
    done = loading(*arguments)
    assert done.returncode == code
    assert done.modules & HEAVY == heavy


PLAN = {"asyncio", "httptools", "isal", "logging", "pydantic", "uvloop", "yaml"}
"""What a listing by Penstock's own client and a job file need."""


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        (["check"], {"logging", "pydantic", "yaml"}),
        (["plan"], PLAN),
        (["doctor"], PLAN | {"email.parser"}),
    ],
)
def test_a_command_with_a_job_loads_what_it_uses(
    stub: S3Stub, tmp_path: Path, command: list[str], heavy: set[str]
) -> None:
    """Keys in the environment and an endpoint are enough for our own client."""
    stub.objects["b/train/0"] = b"bytes"
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    done = loading(command[0], "-c", path, *command[1:])
    assert done.returncode == 0, done.stderr
    assert done.modules & HEAVY == heavy


def test_run_loads_the_admin_server_after_it_is_ready(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects["b/train/0"] = b"bytes"
    document = job(stub.url, tmp_path / "ml", "b/train/", Admin={"Port": 0})
    command = [sys.executable, "-X", "importtime", "-m", "sidecar", "run", "-c"]
    with subprocess.Popen(
        [*command, write_job(tmp_path / "job.yaml", document)], stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        before, after = set[str](), set[str]()
        loaded = before
        for line in running.stderr:
            loaded = after if '"ready"' in line else loaded
            loaded.add(line.rpartition("|")[2].strip())
            if "sidecar.admin.server" in loaded:
                break
        running.terminate()
        running.stderr.read()
    assert running.returncode == 0
    assert before & HEAVY == PLAN | {"sidecar.job.supervisor"}
    assert after & HEAVY == {
        "aiohttp",
        "email.parser",
        "http.client",
        "prometheus_client",
        "urllib.request",
    } | {"sidecar.admin.server"}


def test_the_end_of_a_command_collects_no_module() -> None:
    """A collection at the end would traverse every module that the command has loaded."""
    code = (
        "import atexit, gc, sys; sys.argv = ['penstock', '--version'];"
        "atexit.register(lambda: print(gc.get_freeze_count(), len(gc.get_objects())));"
        "from sidecar.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    frozen, left = map(int, done.stdout.splitlines()[-1].split())
    assert frozen > 1000 > left


def test_cat_of_a_small_object_loads_what_it_uses(stub: S3Stub) -> None:
    """It takes no longer than its imports. Every package of others that it may load is here."""
    stub.objects["b/k"] = b"bytes"
    done = loading("cat", "--path-style", "s3://b/k", "--endpoint-url", stub.url)
    assert (done.returncode, done.stdout) == (0, "bytes")
    assert done.modules & HEAVY == PLAN - {"pydantic", "yaml"}
    packages = {name.split(".")[0] for name in done.modules} & packages_distributions().keys()
    # setuptools loads `_distutils_hack` at the start of every process, where it is installed.
    assert packages - {"streamer", "sidecar", "backports", "_distutils_hack"} == {
        "click", "httptools", "isal", "uvloop",
    }  # fmt: skip


def test_cat_loads_what_it_uses() -> None:
    """`penstock cat` of a small object takes no longer than its imports: no server, no job file."""
    code = "import sys, sidecar.cli, sidecar.commands.cat; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    ours = {name for name in loaded if name.startswith("sidecar.")}
    assert ours == {
        *("sidecar.cli", "sidecar.commands", "sidecar.commands.cat"),
        *(
            f"sidecar.cli.{name}"
            for name in (
                "help",
                "indexing",
                "objects",
                "options",
                "planning",
                "running",
            )
        ),
        *(
            f"sidecar.process{name}"
            for name in (
                "",
                ".exits",
                ".logs",
                ".resources",
                ".progress",
                ".wording",
                ".streams",
                ".terminal",
            )
        ),
    }
    assert not loaded & {"pydantic", "rich", "yaml", "aiohttp.web", "tensorflow"}
