r"""Reads the index files that other programs write beside one object.

    DALI's tfrecord2idx      a line `OFFSET SIZE` for each TFRecord, in order; sizes are those of whole frames
    RecordIO's im2rec.py     a line `KEY\tOFFSET` for each record, in any order

DALI's sizes prove that its lines cover the object. RecordIO's offsets prove nothing about records that have
no line, so such a file must list all records. The bytes are not seen here: whoever uses the result compares
some records with them (`RecordFormat.fault`). Pure.
"""

from __future__ import annotations

import re
from array import array

from streamer.formats.borders import BadRecord

_DALI = re.compile(rb"(\d{1,19})[ \t]+(\d{1,19})")
_RECORDIO = re.compile(rb"\d{1,19}\t(\d{1,19})")


def read_dali(text: bytes, size: int) -> array[int]:
    """Return the offsets of all records of a TFRecord object of `size` bytes. Raises BadRecord."""
    offsets, end = array("Q"), 0
    for number, line in enumerate(text.splitlines(), 1):
        match = _DALI.fullmatch(line.strip())
        if match is None:
            raise BadRecord(f"line {number} of the index is not `OFFSET SIZE`", end)
        offset, length = int(match[1]), int(match[2])
        if offset != end or not length:
            raise BadRecord(f"line {number} of the index has a record at {offset}, and {end} is due", end)
        offsets.append(offset)
        end = offset + length
    if end != size:
        raise BadRecord(f"the records of the index end at {end}, and the object at {size}", min(end, size))
    return offsets


def read_recordio(text: bytes, size: int) -> array[int]:
    """Return the offsets of all records of a RecordIO object of `size` bytes. Raises BadRecord."""
    found: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _RECORDIO.fullmatch(line.strip())
        if match is None:
            raise BadRecord(f"line {number} of the index is not `KEY\\tOFFSET`", 0)
        found.append(int(match[1]))
    found.sort()
    if len(set(found)) < len(found):
        raise BadRecord("two lines of the index have one offset", 0)
    if (found[0] if found else size) != 0:
        raise BadRecord("the index has no record at offset 0", 0)
    if found and found[-1] + 8 > size:
        raise BadRecord(f"the index has a record at {found[-1]}, and the object ends at {size}", size)
    return array("Q", found)
