"""The Dockerfile and the wheel that its images install.

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
import sysconfig
import zipfile
from fnmatch import fnmatch
from pathlib import PurePosixPath

import pytest

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


def test_dockerfile_passes_hadolint():
    ran = run(os.path.join(SCRIPTS, "hadolint"), "--failure-threshold", "style", "Dockerfile")
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("reference", image_references())
def test_image_reference_has_a_version_and_no_registry(reference):
    name, _, tag = reference.partition(":")
    assert re.fullmatch(r"v?\d[\w.-]*", tag), "no tag, or one that moves"
    assert "." not in name.split("/")[0], "names a registry host"


def test_the_default_image_is_the_sidecar():
    assert list(STAGES)[-1] == "sidecar"
    assert {SERVICES[name]["build"]["target"] for name in OURS} == set(OURS) <= STAGES.keys()


@pytest.mark.parametrize("name", OURS)
def test_image_runs_unprivileged_without_a_shell(name):
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


def ignored(path):
    """Whether .dockerignore keeps `path` out of the build; the last rule that matches decides."""
    verdict = False
    for rule in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = PurePosixPath(path).parts
        hit = any(fnmatch(part, pattern) for part in (parts if rule.startswith("**/") else parts[:1]))
        verdict = not rule.startswith("!") if hit else verdict
    return verdict


def test_every_copied_source_exists_and_is_in_the_build_context():
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


def test_images_get_the_extras_that_they_need_and_no_others():
    """Credentials and storage code stay out of the trainer's image."""
    assert installed("sidecar") == {"penstock[sidecar]"}
    trainer = closure(installed("trainer"))
    assert "tensorflow" in trainer
    assert trainer.isdisjoint({"aiobotocore", "boto3", "botocore", "aiohttp"})
    copied = {name: [text for how, text in STAGES[name].lines if how == "COPY"] for name in OURS}
    assert copied["trainer"][0] == "--from=build-trainer /opt/venv /opt/venv"
    assert copied["sidecar"] == ["--from=build-small /opt/venv /opt/venv"]
    assert STAGES["build-small"].base == "build-sidecar"


def test_entry_point_command_and_health_check_are_commands_of_ours():
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


# --- The wheel that the images install ---------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built as the Dockerfile builds it."""
    target = tmp_path_factory.mktemp("wheels")
    # Where the build backend is installed, no index is needed.
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    ran = run(sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation, "--wheel-dir", str(target), ".")
    assert ran.returncode == 0, ran.stderr
    (built,) = target.glob("penstock-*.whl")
    return built


def test_wheel_holds_the_two_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"streamer", "sidecar"} == {top for top in tops if not top.endswith(".dist-info")}
    for package in ("streamer", "sidecar"):
        assert f"{package}/py.typed" in names
        inside = {f"{path.relative_to(ROOT)}" for path in (ROOT / package).rglob("*.py")}
        assert inside <= set(names)


def test_wheel_alone_gives_the_readers(wheel, tmp_path):
    """The base install is for training images: no dependency, and nothing but the standard library loaded."""
    home = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", str(home)).returncode == 0
    python = str(home / "bin/python")
    ran = run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel)
    )
    assert ran.returncode == 0, ran.stderr
    program = (
        "import streamer.readers as r, sys\n"
        "for name in r.__all__: getattr(r, name)\n"
        "print(r.__file__)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))\n"
    )
    ran = run(python, "-I", "-W", "error", "-c", program)
    assert ran.returncode == 0, ran.stderr
    place, loaded = ran.stdout.splitlines()
    assert place.startswith(str(home))
    assert set(loaded.split()) <= {"__main__", "streamer"}
    # The command, with its dependencies lent from this environment and our packages from the wheel.
    lent = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    ran = subprocess.run(
        [str(home / "bin/penstock"), "--version"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=lent,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("penstock, version ")
