"""Every error says what to do, or docs/reference/errors.md does; each has a cause and an exit code.

The texts are taken from the code, where they are raised (`scripts.texts`, which prints them as a table).
"""

from __future__ import annotations

import subprocess
import sys

from scripts.texts import Text, explained, raised
from streamer import errors

ROWS = [row for row, _ in explained()]


def test_every_error_has_a_cause_a_remedy_and_an_exit_code() -> None:
    texts = list(raised())
    assert len(texts) > 500
    absent = [f"{each.place}: | `{each.text}` | … |" for each in texts if not each.remedy]
    assert not absent, "write what to do into the text, or add such a row to docs/reference/errors.md"
    assert not [each for each in texts if not each.cause]
    assert {each.code for each in texts} >= {None, *range(2, 9)}
    assert not [each for each in texts if each.code == 1]


def test_a_text_without_a_remedy_is_found() -> None:
    assert not Text("here", "the moon is in the way", errors.SinkError).remedy
    own = Text("here", "the moon is in the way; wait a while", errors.SinkError)
    assert (own.remedy, own.code) == ("wait a while", 7)
    assert own.cause == "The FIFO side failed: the directory, a FIFO, or a limit of the process"


def test_every_row_says_what_to_do() -> None:
    assert not [row for row, remedy in explained() if not remedy]


def test_no_row_is_there_twice() -> None:
    assert sorted(ROWS) == sorted(set(ROWS))


def test_the_table_is_printed() -> None:
    done = subprocess.run([sys.executable, "-m", "scripts.texts"], capture_output=True, text=True, check=True)
    _, _, *lines = done.stdout.splitlines()
    assert len(lines) == len(list(raised()))
    (expired,) = (line for line in lines if line.endswith("| S3's ExpiredToken |"))
    assert "renew the credentials | 3 DENIED |" in expired
