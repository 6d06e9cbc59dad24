"""Inside the guest: a cgroup (v2) with limits for the sidecar and its keeper."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/run/cgroup")


class Limited:
    """A cgroup of this name; `limits` by the names of its files, as `memory.max`."""

    def __init__(self, name: str, **limits: str) -> None:
        self._path = ROOT / name
        self._path.mkdir()
        for file, value in limits.items():
            self.set(file.replace("_", "."), value)

    @property
    def prefix(self) -> list[str]:
        """A command's prefix that runs it in the cgroup."""
        return ["sh", "-c", f'echo $$ > {self._path}/cgroup.procs; exec "$@"', "sh"]

    def set(self, file: str, value: str) -> None:
        (self._path / file).write_text(value)

    def events(self, controller: str) -> dict[str, int]:
        """The counts of `<controller>.events`: how often a limit was met, whom the kernel killed for it."""
        lines = (self._path / f"{controller}.events").read_text().splitlines()
        return {name: int(count) for name, count in (line.split() for line in lines)}
