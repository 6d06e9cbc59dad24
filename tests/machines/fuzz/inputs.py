"""The inputs that are kept, a file of them for each target, and mutations of them."""

from __future__ import annotations

import ast
import random
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
INTERESTING = (
    b"\0", b"\xff" * 8, b"-1", b"9" * 5000, b"1e999", b"NaN", b"[" * 3000, b'{"a":' * 3000, b"null", b'""',
    b"\r\n", b"\n", b"\\ud800", b"\xed\xa0\x80", b"../", b"%00", b"&a;", b"<!--", b"]]>", b"&", b"*a",
)  # fmt: skip


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
