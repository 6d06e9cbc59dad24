"""The Dockerfile and the wheels that its images install.

No container engine is at hand in tests, so what can be known without one is: that the file is valid, that
everything it names exists, and that the build's own commands work.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import click
import pytest

from streamer import __version__
from tests.operate.containers import (
    OURS,
    SCRIPTS,
    SERVICES,
    STAGES,
    closure,
    image_references,
    installed,
    run,
)
from tests.operate.promql import ROOT

# --- The Dockerfile ----------------------------------------------------------------------------------


def test_dockerfile_passes_hadolint() -> None:
    ran = run(os.path.join(SCRIPTS, "hadolint"), "--failure-threshold", "style", "Dockerfile")
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("reference", image_references())
def test_image_reference_has_a_version_and_no_registry(reference: str) -> None:
    name, _, tag = reference.partition(":")
    assert re.fullmatch(r"v?\d[\w.-]*", tag), "no tag, or one that moves"
    assert "." not in name.split("/")[0], "names a registry host"


def test_the_default_image_is_the_sidecar() -> None:
    assert list(STAGES)[-1] == "sidecar"
    assert {SERVICES[name]["build"]["target"] for name in OURS} == set(OURS) <= STAGES.keys()


@pytest.mark.parametrize("name", OURS)
def test_image_runs_unprivileged_without_a_shell(name: str) -> None:
    stage = STAGES[name]
    user, group = stage.last("USER").split(":")
    assert int(user) > 1000  # numeric, so that Kubernetes' runAsNonRoot can tell
    assert int(group) > 1000
    assert isinstance(json.loads(stage.last("ENTRYPOINT")), list)
    assert stage.last("STOPSIGNAL") == "SIGTERM"
    own = [instruction for instruction, _ in stage.lines]
    assert not {"RUN", "ADD", "SHELL", "ONBUILD"} & set(own)
    assert any("org.opencontainers.image.licenses" in text for how, text in stage.lines if how == "LABEL")
    assert SERVICES[name]["user"] == stage.last("USER")


@pytest.mark.parametrize("name", OURS)
def test_an_image_has_the_bytecode_that_its_user_cannot_write(name: str) -> None:
    """Without it a health check takes four times as long: the official Python images have none."""
    base = STAGES[STAGES[name].base]
    compiling = [text for how, text in base.lines if how == "RUN" and "compileall" in text]
    assert len(compiling) == 1
    steps = [how for how, text in base.lines if text in compiling or how == "USER"]
    assert steps == ["RUN", "USER"]
    for stage in STAGES.values():
        assert not any("--no-compile" in text for _, text in stage.lines)
    built = [text for how, text in STAGES["build"].lines if how == "ENV"]
    assert not any("PYTHONDONTWRITEBYTECODE" in text for text in built)


def test_the_bytecode_of_an_image_is_that_of_every_module_it_starts() -> None:
    """The pattern that the build leaves out names no module of a sidecar."""
    (text,) = [text for how, text in STAGES["runtime"].lines if how == "RUN" and "compileall" in text]
    pattern = shlex.split(text)[shlex.split(text).index("-x") + 1]
    code = "import sys, sidecar.cli, sidecar.commands.run, sidecar.commands.cat, sidecar.doctor.examination;"
    code += "print(*(each.__file__ for each in sys.modules.values() if getattr(each, '__file__', None)))"
    files = run(sys.executable, "-c", code).stdout.split()
    library = [file for file in files if "site-packages" not in file]
    assert len(library) > 100
    assert not [file for file in library if re.search(pattern, file)]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` out of the build; the last rule that matches decides."""
    state = False
    for rule in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = PurePosixPath(path).parts
        hit = any(fnmatch(part, pattern) for part in (parts if rule.startswith("**/") else parts[:1]))
        state = not rule.startswith("!") if hit else state
    return state


def test_every_copied_source_exists_and_is_in_the_build_context() -> None:
    copied = []
    for stage in STAGES.values():
        for instruction, arguments in stage.lines:
            words = shlex.split(arguments)
            if instruction == "COPY" and words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in STAGES
            elif instruction == "COPY":
                copied += words[:-1]
    assert {"pyproject.toml", "streamer", "sidecar", "examples"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert ignored("tests/conftest.py")
    assert ignored(".git/config")
    assert ignored("streamer/__pycache__/errors.cpython-313.pyc")


def test_images_get_the_extras_that_they_need_and_no_others() -> None:
    """Credentials and storage code stay out of the trainer's image."""
    assert installed("sidecar") == {"penstock-readers", "penstock-sidecar"}
    trainer = closure(installed("trainer"))
    assert "penstock-sidecar" not in trainer
    assert "tensorflow" in trainer
    assert trainer.isdisjoint({"aiobotocore", "boto3", "botocore", "aiohttp"})
    copied = {name: [text for how, text in STAGES[name].lines if how == "COPY"] for name in OURS}
    assert copied["trainer"][0] == "--from=build-trainer /opt/venv /opt/venv"
    assert copied["sidecar"] == ["--from=build-small /opt/venv /opt/venv"]
    assert STAGES["build-small"].base == "build-sidecar"


def test_entry_point_command_and_health_check_are_commands_of_ours() -> None:
    sidecar = STAGES["sidecar"]
    program, *rest = json.loads(sidecar.last("ENTRYPOINT")) + json.loads(sidecar.last("CMD"))
    health = json.loads(sidecar.last("HEALTHCHECK").split("CMD", 1)[1])
    assert program == health[0] == "penstock"
    assert rest == ["run", "-c", "/etc/penstock/job.yaml"]
    penstock = os.path.join(SCRIPTS, "penstock")
    assert "-c, --config" in run(penstock, rest[0], "--help").stdout
    # With nothing at the probe's default address the container is unhealthy, and it says so by its status.
    ran = run(penstock, *health[1:], "--url", "http://127.0.0.1:9")
    assert ran.returncode == 1, ran.stderr


# --- The wheels that the images install --------------------------------------------------------------

READERS, SIDECAR = "penstock_readers", "penstock_sidecar"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Both wheels by name, built as the Dockerfile builds them."""
    target = tmp_path_factory.mktemp("wheels")
    # Where the build backend is installed, no index is needed.
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    building = [sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation, "--wheel-dir", str(target)]
    ran = run(*building, "./streamer", ".")
    assert ran.returncode == 0, ran.stderr
    return {path.name.split("-")[0]: path for path in target.glob("*.whl")}


def environment(python: str, home: Path, *wheels: Any) -> str:
    """A virtual environment of `python` with the wheels and nothing else; its interpreter."""
    assert run(python, "-m", "venv", "--without-pip", str(home)).returncode == 0
    inside = str(home / "bin/python")
    installing = [sys.executable, "-m", "pip", "--python", inside, "install", "--no-deps", "--no-index"]
    ran = run(*installing, *map(str, wheels))
    assert ran.returncode == 0, ran.stderr
    return inside


def oldest() -> str:
    """Python 3.10, the oldest that the readers run on, or this one where the machine lacks it."""
    ran = subprocess.run(
        ["sh", "-c", "python3.10 -c 'import venv, sys; print(sys.executable)'"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ran.stdout.strip() or sys.executable


def test_the_two_wheels_hold_both_packages_once(wheels: Any) -> None:
    """Whichever is installed or removed first, the other keeps all its files."""
    assert wheels.keys() == {READERS, SIDECAR}
    held = {}
    for name, path in wheels.items():
        files = zipfile.ZipFile(path).namelist()
        held[name] = {each for each in files if not each.split("/")[0].endswith(".dist-info")}
    assert held[READERS].isdisjoint(held[SIDECAR])
    wanted = set()
    for package in ("streamer", "sidecar"):
        wanted |= {f"{path.relative_to(ROOT)}" for path in (ROOT / package).rglob("*.py")}
        wanted.add(f"{package}/py.typed")
    assert held[READERS] | held[SIDECAR] == wanted | {"sidecar/admin/page.html"}
    assert (ROOT / "streamer/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_sidecar_wants_the_readers_of_its_own_version(wheels: Any) -> None:
    (metadata,) = [
        zipfile.ZipFile(wheels[SIDECAR]).read(name).decode()
        for name in zipfile.ZipFile(wheels[SIDECAR]).namelist()
        if name.endswith("/METADATA")
    ]
    assert f"Requires-Dist: penstock-readers=={__version__}\n" in metadata
    assert wheels[READERS].name == f"{READERS}-{__version__}-py3-none-any.whl"


def test_readers_alone_read_an_epoch_on_the_oldest_python(wheels: Any, tmp_path: Path) -> None:
    """They are for training images: no dependency, and nothing but the standard library loaded."""
    home = tmp_path / "venv"
    python = environment(oldest(), home, wheels[READERS])
    program = (
        "import os, pkgutil, struct, sys, threading, streamer.formats, streamer.readers as r\n"
        "for name in r.__all__: getattr(r, name)\n"
        "rooms = (r, streamer.formats)\n"
        "found = [each.name for room in rooms"
        " for each in pkgutil.iter_modules(room.__path__, room.__name__ + '.')]\n"
        "frameworks = {'tensorflow', 'torch', 'numpy'}\n"
        "for name in found:\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError as error: assert error.name in frameworks, (name, error)\n"
        "os.mkfifo('train_0')\n"
        "record = struct.pack('<II', 0xCED7230A, 4) + b'data'\n"
        "def write():\n"
        "    with open('train_0', 'wb') as fifo: fifo.write(3 * record)\n"
        "threading.Thread(target=write).start()\n"
        "print(*map(bytes, r.PipeReader('train', 'RecordIO', epoch=0, pipe_dir='.', config_dir='.')))\n"
        "print(r.__file__)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))\n"
    )
    ran = run(python, "-I", "-W", "error", "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}")
    assert ran.returncode == 0, ran.stderr
    records, place, loaded = ran.stdout.splitlines()
    assert records == "b'data' b'data' b'data'"
    assert place.startswith(str(home))
    assert set(loaded.split()) <= {"__main__", "streamer", "sitecustomize"}  # the last is Debian's
    assert not (home / "bin/penstock").exists()


def test_both_wheels_give_the_command(wheels: Any, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    environment(sys.executable, home, wheels[SIDECAR], wheels[READERS])
    penstock = [str(home / "bin/penstock"), "--version"]
    # Without the packages that it needs, the command names the first that is missing.
    ran = run(*penstock)
    assert ran.returncode == 2
    assert "is not installed. Install penstock-sidecar again" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    # With them lent from this environment, and our packages from the wheels.
    lent = {**os.environ, "PYTHONPATH": str(Path(click.__file__).parent.parent)}
    ran = subprocess.run(penstock, capture_output=True, text=True, check=False, cwd=tmp_path, env=lent)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"penstock, version {__version__}\n"
