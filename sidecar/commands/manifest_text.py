"""The text of a manifest in SageMaker's two formats, and labels that regular expressions find in keys. Pure.

    no label    ManifestFile: a JSON array, the prefix first, then what follows it in each object's URI
    labels      AugmentedManifestFile: for each object a line of JSON with its URI and its labels

The text is ASCII: other characters are JSON escapes, because some programs end a line at U+2028 or U+0085.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import ConfigError
from streamer.plan import S3Uri
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

SOURCE = "source-ref"
"""Attribute of an augmented manifest that has the object's URI."""
LONGEST_NAME = 256
"""Most characters of an attribute's name (contract §3.1)."""

Ids = dict[str, dict[str, int]]
"""Number of each label, by attribute."""


class Item(NamedTuple):
    """An object of the manifest."""

    uri: str
    """URI, with a version id if one is given."""
    key: str
    """Key, in which labels are searched."""


@dataclass(frozen=True, slots=True)
class Label:
    """An attribute whose value is a part of the key."""

    name: str
    pattern: re.Pattern[str]
    """Expression with one group, whose text is the label."""

    @classmethod
    def parse(cls, text: str) -> Label:
        """Return the label of `NAME=REGEX`. Raises ValueError."""
        name, equals, expression = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{text!r} is no label: write NAME=REGEX, such as 'class=([^/]+)/[^/]+$'")
        if name.endswith("-ref"):
            raise ValueError(f"the name {name!r} ends in -ref, so its value would be read as an object's URI")
        if name.startswith("$") or len(name) > LONGEST_NAME or not name.isprintable():
            raise ValueError(
                f"{name!r} cannot be the name of an attribute: use at most {LONGEST_NAME} printable "
                "characters, and no $ in front"
            )
        try:
            pattern = re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{expression!r} is no regular expression of Python: {error}") from None
        if pattern.groups != 1:
            raise ValueError(
                f"{expression!r} has {pattern.groups} groups; put one pair of parentheses around the label, "
                "and write (?:...) for others"
            )
        return cls(name, pattern)

    def of(self, key: str) -> str | None:
        """Return the label in a key; None if the expression finds none, or an empty one."""
        match = self.pattern.search(key)
        return (match[1] or None) if match else None


@dataclass(frozen=True, slots=True)
class Labelled:
    """The labels of all objects."""

    names: tuple[str, ...]
    """The attributes."""
    rows: Sequence[tuple[str, ...] | None]
    """Labels of each object, in the order of the attributes; None for an object that lacks one."""

    @property
    def skipped(self) -> int:
        """Number of objects that lack a label."""
        return self.rows.count(None)

    def texts(self) -> dict[str, list[str]]:
        """Return the different labels of each attribute, sorted."""
        found = [row for row in self.rows if row is not None]
        return {name: sorted({row[number] for row in found}) for number, name in enumerate(self.names)}


def find_labels(items: Collection[Item], labels: Sequence[Label], *, skip_unmatched: bool) -> Labelled:
    """Find the labels of all objects. Raises ConfigError if an object lacks one, or every object does.

    `skip_unmatched`: allow objects that lack a label.
    """
    rows: list[tuple[str, ...] | None] = []
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    first: tuple[str, Label] | None = None
    for item in items:
        found = [label.of(item.key) for label in labels]
        row = tuple(text for text in found if text is not None)
        if len(row) < len(labels):
            first = first or (item.uri, labels[found.index(None)])
            rows.append(None)
        else:
            rows.append(known.setdefault(row, row))
    if first is not None and (not skip_unmatched or not known):
        uri, label = first
        left_out = ", or leave such objects out with --exclude or --skip-unmatched" if known else ""
        raise ConfigError(
            f"{rows.count(None)} of {counted(len(rows), 'object')} have no label: in the key of {uri} "
            f"nothing matches --label {label.name}={label.pattern.pattern}; correct it{left_out}"
        )
    return Labelled(tuple(label.name for label in labels), rows)


def number_labels(labels: Labelled) -> Ids:
    """Return numbers for the labels of each attribute: from 0, in the order of their text."""
    return {name: {text: id_ for id_, text in enumerate(texts)} for name, texts in labels.texts().items()}


def check_ids(document: object, labels: Labelled, *, path: str) -> Ids:
    """Return the numbers of labels that the document at `path` has. Raises ConfigError if one is absent."""
    ids: Ids = {}
    for name, texts in labels.texts().items():
        numbers = document.get(name) if isinstance(document, dict) else None
        if not isinstance(numbers, dict) or not all(type(each) is int for each in numbers.values()):
            raise ConfigError(
                f"the file of --label-ids, {path}, has no numbers of the labels of {name!r}, such as "
                f'{{"{name}": {{"cat": 0, "dog": 1}}}}; remove the file to number them anew'
            )
        if absent := [text for text in texts if text not in numbers]:
            raise ConfigError(
                f"the file of --label-ids, {path}, has no number for {counted(len(absent), 'label')} of "
                f"{name!r}, the first of them {absent[0]!r}; add them, or remove the file to "
                "number all labels anew"
            )
        ids[name] = numbers
    return ids


def ids_text(ids: Ids) -> bytes:
    """Return the text of the file of `--label-ids`."""
    return (json.dumps(ids, indent=2) + "\n").encode()


def common_prefix(uris: Sequence[S3Uri]) -> str:
    """Return the start that all these have, up to its last slash. Raises ConfigError for several buckets."""
    bucket = uris[0].bucket
    for uri in uris:
        if uri.bucket != bucket:
            raise ConfigError(
                f"the buckets {bucket} and {uri.bucket} cannot be in one ManifestFile, which has objects of "
                "one bucket; make a manifest of each, or one with labels (--label)"
            )
    key = os.path.commonprefix([uri.key for uri in uris])  # noqa: RUF071 - keys, not paths
    return f"s3://{bucket}/{key[: key.rfind('/') + 1]}"


def manifest_file(items: Iterable[Item], prefix: str) -> Iterator[str]:
    """Yield the text of a ManifestFile (contract §4.1). `prefix`: the start of every object's URI."""
    yield "[\n" + json.dumps({"prefix": prefix})
    for item in items:
        yield ",\n" + json.dumps(item.uri[len(prefix) :])
    yield "\n]\n"


def augmented_manifest(items: Iterable[Item], labels: Labelled, ids: Ids) -> Iterator[str]:
    """Yield the lines of an augmented manifest (contract §4.2). `ids`: the numbers to write for labels."""
    for item, row in zip(items, labels.rows, strict=True):
        if row is not None:
            texts = zip(labels.names, row, strict=True)
            values = {name: ids[name][text] if ids else text for name, text in texts}
            yield json.dumps({SOURCE: item.uri} | values) + "\n"
