"""Search for inputs that a parser does not end as it must on: `python -m tests.fuzz --minutes 10`.

With atheris (a build of libFuzzer; `pip install atheris`) mutations are led by which branches they reach.
Without it they are blind, from the corpus. Every target has a process of its own, under a limit of memory
and, for each input, of time. Findings are kept in tests/fuzz/corpus, where every run of the tests tries them
again; so are, with `--keep N`, up to N small inputs of each target that reach new branches.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MEMORY = 3 << 30
"""Bytes of address space that a target's process may have."""
TOO_LONG = 10
"""Seconds of one input."""
SMALL = 1024
"""Bytes of an input that `--keep` keeps."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--target", action="append", help="one of them; all, if not given")
    parser.add_argument("--keep", type=int, default=0, help="new inputs of each target to keep")
    parser.add_argument("--one", metavar="SECONDS:DIRECTORY", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        seconds, _, directory = given.one.partition(":")
        (target,) = given.target
        return fuzz(target, int(seconds), Path(directory))
    from tests.fuzz.targets import TARGETS

    chosen = given.target or list(TARGETS)
    seconds = max(1, int(given.minutes * 60 / len(chosen)))
    total, failed = 0, []
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as scratch:
            executions, output = one(name, seconds, Path(scratch))
            total += executions
            keep(name, Path(scratch), given.keep)
        print(f"{name:20} {executions:>10,} executions{'  ' + output if output else ''}", flush=True)
        if output:
            failed.append(name)
    print(
        f"{len(chosen)} targets, {total:,} executions, "
        f"{len(failed)} with findings: {', '.join(failed) or '-'}"
    )
    return 1 if failed else 0


def kept(name: str) -> list[bytes]:
    """The inputs of a target that are kept, each a line of its file: a literal of Python."""
    path = CORPUS / f"{name}.txt"
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [ast.literal_eval(line) for line in lines]


def add(name: str, data: bytes) -> None:
    """Keep an input, once."""
    if data not in kept(name):
        with open(CORPUS / f"{name}.txt", "a", encoding="ascii") as file:
            file.write(f"{data!r}\n")


def one(name: str, seconds: int, scratch: Path) -> tuple[int, str]:
    """Executions, and what was found; the input that did it goes to the corpus."""
    (scratch / "work").mkdir()
    for number, data in enumerate(kept(name)):
        (scratch / "work" / f"kept{number}").write_bytes(data)
    command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--one", f"{seconds}:{scratch}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds + 120, errors="replace"
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = str(error.stderr), 1
    counts = [int(each) for each in re.findall(r"(?:^#|Done |executions )(\d+)", output, re.MULTILINE)]
    for crash in (scratch / "crash").glob("*"):
        add(name, crash.read_bytes())
    if code == 0:
        return max(counts, default=0), ""
    lines = [
        line
        for line in output.splitlines()
        if re.match(r"\s*\w*(Error|Exception|Warning|ALARM)\b|.*: .*Error", line)
    ]
    return max(counts, default=0), (lines or output.splitlines()[-1:] or ["?"])[0].strip()[:200]


def keep(name: str, scratch: Path, most: int) -> None:
    """The smallest new inputs."""
    known = kept(name)
    new = sorted(
        (path.read_bytes() for path in (scratch / "work").glob("*")), key=lambda data: (len(data), data)
    )
    for data in [data for data in new if data not in known and 0 < len(data) <= SMALL][
        :: max(1, len(new) // max(most, 1))
    ][:most]:
        add(name, data)


def fuzz(name: str, seconds: int, scratch: Path) -> int:
    """In this process, for so long."""
    (scratch / "crash").mkdir(exist_ok=True)
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris is None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        return blind(name, seconds, scratch)
    with atheris.instrument_imports(include=["streamer", "sidecar"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    for number, seed in enumerate(target.seeds):
        (scratch / "work" / f"seed{number}").write_bytes(seed)
    atheris.Setup(
        [
            "fuzz", str(scratch / "work"), f"-artifact_prefix={scratch}/crash/", f"-max_total_time={seconds}",
            f"-timeout={TOO_LONG}", "-rss_limit_mb=1024", "-max_len=4096", "-print_final_stats=1",
        ],
        target.run,
    )  # fmt: skip
    atheris.Fuzz()
    return 0


def blind(name: str, seconds: int, scratch: Path) -> int:
    """Mutations of seeds and corpus, without knowing what they reach."""
    from tests.fuzz.targets import TARGETS

    target, dice = TARGETS[name], random.Random(f"{name} {time.time_ns()}")
    known = [*target.seeds, *(path.read_bytes() for path in sorted((scratch / "work").glob("*")))]
    signal.signal(signal.SIGALRM, _too_long)
    ends, count = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        for _ in range(100):
            data = mutated(dice.choice(known), known, dice)
            signal.alarm(TOO_LONG)
            try:
                target.run(data)
            except BaseException:
                (scratch / "crash" / "found").write_bytes(data)
                print(f"executions {count}")
                raise
            signal.alarm(0)
            count += 1
    print(f"executions {count}")
    return 0


def _too_long(*_: object) -> None:
    raise TimeoutError(f"an input took more than {TOO_LONG} s")


def mutated(data: bytes, known: list[bytes], dice: random.Random) -> bytes:
    """A few changes of the kinds that break parsers."""
    made = bytearray(data)
    for _ in range(1 << dice.randrange(4)):
        at = dice.randrange(len(made) + 1)
        match dice.randrange(7):
            case 0 if made:
                made[at % len(made)] ^= 1 << dice.randrange(8)
            case 1:
                made[at:at] = dice.choice(INTERESTING)
            case 2:
                del made[at : at + dice.randrange(1, 16)]
            case 3:
                made[at:at] = made[dice.randrange(len(made) + 1) :][: dice.randrange(64)]
            case 4:
                other = dice.choice(known)
                begin = dice.randrange(len(other) + 1)
                made[at : at + dice.randrange(16)] = other[begin : begin + dice.randrange(64)]
            case 5:
                made[at : at + 8] = dice.randbytes(dice.randrange(9))
            case _:
                made[at:at] = bytes([dice.randrange(256)]) * dice.choice((1, 2, 16, 300, 3000))
    return bytes(made)


INTERESTING = (
    b"\0", b"\xff" * 8, b"-1", b"9" * 5000, b"1e999", b"NaN", b"[" * 3000, b'{"a":' * 3000, b"null", b'""',
    b"\r\n", b"\n", b"\\ud800", b"\xed\xa0\x80", b"../", b"%00", b"&a;", b"<!--", b"]]>", b"&", b"*a",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
