"""The object of a record, and how errors and logs name it."""

from __future__ import annotations

from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from streamer.errors import StreamError
from streamer.escaping import escape_control

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class RecordKey(NamedTuple):
    """The object of a record."""

    key: str
    """Key of the object in S3; empty for the text of an attribute, which is of no object."""
    number: int
    """Number of the record in its object, from 0."""
    bucket: str

    def __str__(self) -> str:
        return record_name(*self)


Named = TypeVar("Named", bound=StreamError)


def record_name(key: str, number: int | None, bucket: str | None) -> str:
    """Return the name of a record in errors and logs; its number may be unknown."""
    if not key:
        return "the text of an attribute"
    record = "a record" if number is None else f"record {number}"
    return f"{record} of s3://{bucket}/{escape_control(key)}"


def named(error: Named, record: object) -> Named:
    """Return an error whose text names the record."""
    return type(error)(f"{error}; it is {record}")


class KeyedRecord(NamedTuple):
    """A record with the key of its object, and its number there."""

    record: Any
    key: str
    number: int
    bucket: str


class KeyRun(NamedTuple):
    """The object of successive records of a stream."""

    records: int
    """Number of these records, at least 1."""
    key: str
    number: int
    """Number in the object of the first one; the others follow."""
    bucket: str

    def record_keys(self) -> Iterator[RecordKey]:
        """Yield the key of each record."""
        for number in range(self.number, self.number + self.records):
            yield RecordKey(self.key, number, self.bucket)


def keyed_records(records: Iterable[Any], runs: Iterable[KeyRun]) -> list[KeyedRecord]:
    """Return records with their keys."""
    found: list[KeyedRecord] = []
    rest = iter(records)
    for count, key, number, bucket in runs:
        numbers = range(number, number + count)
        found += map(KeyedRecord, islice(rest, count), repeat(key), numbers, repeat(bucket))
    return found
