"""Bugs that are planted on purpose, and who finds them.

    python -m tests.plants [--only WORD] [--jobs 2] [--into docs/design/plants.md]
    python -m tests.plants --searchers [--within 120]   # which machines find each plant without its tests
    python -m tests.plants --searchers --by schedules --part 0.1   # one machine, a tenth of its amount

Each plant goes into a copy of the tree by itself. The checkers look at it in order of cost, each for a
limited time, until one complains; what complained must pass in a copy without the bug, or it does not
count. Ends with 1 if more than `--missed` plants are found by nobody: then a checker must become stronger.
"""

from __future__ import annotations

import argparse
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import insert_into
from tests.plants.catalogue import PLANTS, Plant
from tests.plants.checkers import Checker, checkers, searchers

ROOT = Path(__file__).resolve().parents[2]
CLEAN_LONGER = 3
"""How much longer a look may take in the clean tree, if it had no end in the planted one."""


@dataclass(frozen=True, slots=True)
class Found:
    """What has become of one plant."""

    plant: Plant
    by: str
    """The checker; empty if nobody."""
    what: str
    seconds: float
    """Seconds of all looks, up to the one that found it."""
    searchers: tuple[str, ...] = ()
    """The machines that found it, if all were asked."""


class Trees:
    """Copies of the tree: some to plant in, and one that stays as it is."""

    def __init__(self, directory: Path, count: int) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._clean_lock = threading.Lock()
        self._sound: dict[str, bool] = {}
        """By machine: whether it passes on the clean tree."""
        files = subprocess.run(
            ["/usr/bin/git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        names = [name.decode() for name in files.split(b"\0") if name]
        self.clean = directory / "clean"
        for tree in (self.clean, *(directory / f"planted-{number}" for number in range(count))):
            for name in names:
                if (ROOT / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, tree / name)
            if tree != self.clean:
                self._free.put(tree)

    def try_plant(self, plant: Plant, *, within: float, machines: bool) -> Found:
        """Plant it, and have the checkers look, one after the other."""
        tree = self._free.get()
        path = tree / plant.path
        whole = path.read_text()
        try:
            path.write_text(plant.planted(whole))
            spent = 0.0
            for checker in checkers(plant, machines=machines):
                looks: Checker | None = checker
                while looks is not None:
                    outcome = looks.look(tree, within)
                    spent += outcome.seconds
                    if not outcome.complains:
                        break
                    longest = CLEAN_LONGER * within if outcome.hung else within
                    if self._counts(looks.again(outcome), tree, longest):
                        return Found(plant, checker.name, outcome.what, spent)
                    print(f"    {plant.name}: not counted, fails without it too: {outcome.what}", flush=True)
                    looks = looks.but(outcome)
            return Found(plant, "", "", spent)
        finally:
            path.write_text(whole)
            self._free.put(tree)

    def _counts(self, looks: Checker, tree: Path, within: float) -> bool:
        """Whether the complaint comes from the plant.

        What fails in the clean tree too may fail because the machine is busy, so it looks at both again.
        """
        with self._clean_lock:
            if not looks.look(self.clean, within).complains:
                return True
            return looks.look(tree, within).complains and not looks.look(self.clean, within).complains

    def search(self, plant: Plant, machines: list[Checker], *, within: float) -> Found:
        """Plant it, and have every machine search for it."""
        tree = self._free.get()
        path = tree / plant.path
        whole = path.read_text()
        try:
            path.write_text(plant.planted(whole))
            spent, names, what = 0.0, [], ""
            for searcher in machines:
                outcome = searcher.look(tree, within)
                spent += outcome.seconds
                # One that is busy to the end of its time has found nothing.
                if outcome.complains and not outcome.hung and self._is_sound(searcher, within):
                    names.append(searcher.name)
                    what = what or outcome.what
            return Found(plant, names[0] if names else "", what, spent, tuple(names))
        finally:
            path.write_text(whole)
            self._free.put(tree)

    def _is_sound(self, searcher: Checker, within: float) -> bool:
        with self._clean_lock:
            if searcher.name not in self._sound:
                outcome = searcher.look(self.clean, within)
                self._sound[searcher.name] = not outcome.complains or outcome.hung
            return self._sound[searcher.name]


def table(found: list[Found]) -> str:
    """The results in Markdown."""
    count = sum(bool(each.by) for each in found)
    lines = [
        f"{count} of {len(found)} plants found, on {time.strftime('%Y-%m-%d')}.",
        "",
        "| Found by | Bugs |",
        "|---|---|",
    ]
    by: dict[str, list[str]] = {}
    for each in found:
        by.setdefault(each.by or "**nobody**", []).append(each.plant.name)
    lines += [f"| {checker} | {'; '.join(names)} |" for checker, names in by.items()]
    return "\n".join(lines)


def search_table(found: list[Found], names: list[str]) -> str:
    """Which of these machines found which plants, in Markdown."""
    lines = [
        f"{sum(bool(each.by) for each in found)} of {len(found)} plants found by machines, which know none, "
        f"on {time.strftime('%Y-%m-%d')}.",
        "",
        f"| Planted in | Bug | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for each in found:
        cells = ("found" if name in each.searchers else "" for name in names)
        lines.append(f"| `{each.plant.path}` | {each.plant.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.plants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [each.name for each in searchers()]
    parser.add_argument("--only", action="append", help="plants whose name or path has this word")
    parser.add_argument("--jobs", type=int, default=2, help="plants looked at side by side (2)")
    parser.add_argument("--within", type=float, default=300, help="seconds for each look (300)")
    parser.add_argument("--missed", type=int, default=2, help="plants that may be found by nobody (2)")
    parser.add_argument("--near", action="store_true", help="only the tests that plants name, no machines")
    parser.add_argument(
        "--searchers", action="store_true", help="only the machines, each of them: prints which find what"
    )
    parser.add_argument("--part", type=float, default=1.0, help="of the machines' amounts, with --searchers")
    parser.add_argument("--by", action="append", choices=names, help="this machine alone, with --searchers")
    parser.add_argument("--into", metavar="FILE", help="replace the table in this Markdown file")
    options = parser.parse_args()
    machines = [each for each in searchers(options.part) if each.name in (options.by or names)]
    chosen = [
        plant
        for plant in PLANTS
        if not options.only or any(word in f"{plant.name} {plant.path}" for word in options.only)
    ]
    with tempfile.TemporaryDirectory(prefix="penstock-plants-") as directory:
        trees = Trees(Path(directory), options.jobs)

        def one(plant: Plant) -> Found:
            if options.searchers:
                found = trees.search(plant, machines, within=options.within)
                print(
                    f"{', '.join(found.searchers) or 'NOBODY':16} {found.seconds:5.0f} s  {plant.name}",
                    flush=True,
                )
                return found
            found = trees.try_plant(plant, within=options.within, machines=not options.near)
            print(f"{found.by or 'NOBODY':16} {found.seconds:5.0f} s  {plant.name}  {found.what}", flush=True)
            return found

        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(one, chosen))
    if options.searchers:
        print(search_table(results, [each.name for each in machines]))
        return 0
    print(table(results))
    if options.into:
        insert_into(
            options.into,
            table(results),
            begin="<!-- plants: begin; written by python -m tests.plants -->",
            end="<!-- plants: end -->",
        )
    return int(sum(not each.by for each in results) > options.missed)


if __name__ == "__main__":
    sys.exit(main())
