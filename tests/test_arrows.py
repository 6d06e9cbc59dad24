"""The arrows of docs/architecture.md: who may import whom. Nothing points back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {"streamer", "streamer.errors", "streamer.units"}
"""Names that every room may use."""

MAY_IMPORT = {
    "streamer.plan": {"streamer.formats"},
    "streamer.source": {"streamer.bare", "streamer.plan", "streamer.secrets"},
    "streamer.trailer": set(),
    "streamer.keeper": set(),
    "streamer.bare": set(),
    "streamer.secrets": set(),
    "streamer.sink": {"streamer.bare", "streamer.keeper", "streamer.plan", "streamer.trailer"},
    "streamer.relay": {
        "streamer.formats", "streamer.plan", "streamer.source", "streamer.sink", "streamer.trailer",
    },
    "streamer.formats": set(),
    "streamer.readers": {"streamer.formats", "streamer.trailer"},
    "sidecar": {
        "streamer.plan", "streamer.source", "streamer.sink", "streamer.relay", "streamer.trailer",
        "streamer.bare", "streamer.secrets",
    },
    "streamer.errors": set(),
    "streamer.units": set(),
    "streamer": set(),
}  # fmt: skip
FOREIGN = {
    "aiobotocore": {"streamer.source"},
    "botocore": {"streamer.source"},
    "aiohttp": {"streamer.source", "sidecar"},
    "prometheus_client": {"sidecar"},
    "structlog": {"sidecar"},
    "click": {"sidecar"},
    "pydantic": {"sidecar"},
    "tensorflow": {"streamer.readers"},
    "numpy": {"streamer.readers"},
    "torch": {"streamer.readers"},
    "stamina": {"streamer.relay", "streamer.source", "sidecar"},
    "isal": {"streamer.relay"},
    "backports": {"streamer.relay"},
}
"""Third-party packages and the only rooms that may know them."""


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
            found.add(node.module)
            names = (alias.name for alias in node.names)
            found |= {f"{node.module}.{name}" for name in names if _is_module(node.module, name)}
    return found


@pytest.mark.parametrize(
    ("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_follow_the_arrows(name, path):
    here = room(name)
    for module in imports(path):
        top = module.split(".")[0]
        if top in ("streamer", "sidecar"):
            target = room(module)
            assert target in MAY_IMPORT[here] | BASE | {here}, f"{name} imports {module}"
        elif top in FOREIGN:
            assert here in FOREIGN[top], f"{name} imports {module}"


def test_the_table_allows_no_circle():
    seen: set[str] = set()

    def visit(name, above):
        assert name not in above, f"circle through {name}"
        for target in MAY_IMPORT[name]:
            visit(target, above | {name})
        seen.add(name)

    for name in MAY_IMPORT:
        visit(name, frozenset())
    assert seen == set(MAY_IMPORT)


def test_the_keeper_is_the_standard_library_alone():
    """It runs without site-packages, and nothing of ours can break it."""
    loaded = imports(ROOT / "streamer" / "keeper.py")
    assert {name.split(".")[0] for name in loaded} <= set(sys.stdlib_module_names)


def test_readers_load_nothing_but_the_standard_library():
    """What a training image imports must not bring a storage client, nor TensorFlow for those without."""
    code = (
        "import sys; before = set(sys.modules);"
        "import streamer.readers, streamer.readers.plain, streamer.trailer;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert set(loaded) - set(sys.stdlib_module_names) == {"streamer"}
