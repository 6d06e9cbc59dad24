"""Reads a YAML or JSON file as dicts, lists and scalars, and finds the line of each value.

`read_document` returns within a few seconds or raises ConfigError, whatever is in the file: the size of the
file and the number of values after the expansion of YAML aliases have limits. It refuses duplicate keys, and
NULs and half surrogate pairs, which no path, variable, header or S3 key can contain.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import yaml
from yaml.constructor import ConstructorError

from streamer.errors import ConfigError
from streamer.file_reads import read_file
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    Path = Sequence[str | int]
    """Keys and indexes that lead to a value of a document."""

MOST_BYTES = 1 << 20
"""Most bytes of a file; the largest CreateTrainingJob request has about a third of it."""
MOST_YAML = 1 << 18
"""Most bytes of a YAML file: the parser takes about 10 s for a megabyte."""
MOST_VALUES = 100_000
"""Most values of a document, with aliases expanded."""
_IMPOSSIBLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """The value in a file, and the text that it was read from."""

    value: Any
    text: str
    is_json: bool

    def line(self, path: Path) -> int | None:
        """Return the line, from 1, of the value at `path`: that of its key, if it has one.

        If the value is absent, the line is that of the section that lacks it; None for the whole document,
        and for JSON that the parser of YAML does not read, or reads for too long.
        """
        line, node = None, self._node
        for step in path:
            if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line + 1
                continue
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = next(((key, value) for key, value in pairs if key.value == str(step)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return line

    @cached_property
    def _node(self) -> yaml.Node | None:
        """The tree of the values. JSON is YAML but for tabs, which no text of JSON may hold."""
        if len(self.text) <= MOST_YAML:
            with contextlib.suppress(yaml.YAMLError, RecursionError):
                return yaml.compose(self.text.replace("\t", " ") if self.is_json else self.text, _Loader)
        return None


class FileMistakes(ConfigError):
    """Mistakes in a file. After its first line its text has one for each: `FILE:LINE: KEY: MESSAGE`."""

    def __init__(self, path: str, mistakes: Sequence[Mistake], *, more: int = 0) -> None:
        """`more`: the number of mistakes that are not in `mistakes`."""
        self.path, self.mistakes, self.more = path, tuple(mistakes), more
        lines = [mistake.text(path) for mistake in mistakes]
        if more:
            lines.append(f"{path}: and {counted(more, 'more mistake')}")
        count = len(mistakes) + more
        super().__init__("\n".join([f"{path} has {counted(count, 'mistake')}", *lines]))


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a file."""

    message: str
    key: str = ""
    """Keys and indexes that lead to the value, such as `InputDataConfig[0].ChannelName`."""
    line: int | None = None

    def text(self, path: str) -> str:
        """Return the mistake in the form of compilers, which editors and CI systems link to the line."""
        place = path if self.line is None else f"{path}:{self.line}"
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


def read_document(path: str) -> Document:
    """Read the file, JSON if it begins with a bracket, else YAML. Raises ConfigError."""
    try:
        data = read_file(path, MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}{_similar_file(path)}") from error
    try:
        text = data[:MOST_BYTES].decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    is_json = text.lstrip().startswith(("{", "["))
    most = MOST_BYTES if is_json else MOST_YAML
    if len(data) > most:
        why = "" if is_json else ", or write it as JSON, which may have 1 MiB"
        raise ConfigError(f"{path} has more than {most // 1024} KiB; shorten it{why}")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates) if is_json else _yaml(text)
        check_texts(value)
    except Exception as error:  # PyYAML's constructors raise IndexError, KeyError, ... for odd scalars
        why, line = _explain(error)
        message = f"cannot understand this {'JSON' if is_json else 'YAML'}: {shortened(why)}"
        raise FileMistakes(path, [Mistake(message, line=line)]) from error
    return Document(value, text, is_json)


def _similar_file(path: str) -> str:
    """Return the job file that was probably meant, as the end of a sentence; empty if there is none."""
    directory, name = os.path.split(path)
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            names = [
                each for each in os.listdir(directory or ".") if each.endswith((".yaml", ".yml", ".json"))
            ]
            if close := difflib.get_close_matches(name, names, n=1):
                return f"; did you mean {os.path.join(directory, close[0])}?"
    return ""


def _explain(error: Exception) -> tuple[str, int | None]:
    """Return what a parser found wrong, and the line if the parser knows it."""
    if isinstance(error, json.JSONDecodeError):
        marks = "Expecting", "Illegal trailing comma"  # the second is of Python 3.13
        advice = "; remove a comma that is too many, or add the quotes" if error.msg.startswith(marks) else ""
        return f"{error.msg} (column {error.colno}){advice}", error.lineno
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        what = error.problem or error.context or "syntax error"
        if "'\\t'" in what:
            what = "a tab stands where only spaces may; indent with spaces"
        elif error.context == "while scanning an alias" or "found undefined alias" in what:
            what = 'a value that begins with * must be in quotes, such as "*.tar"'
        elif "mapping values are not allowed" in what:
            what = "a ':' is not allowed here; correct the indentation, or put the text in quotes"
        elif "expected <block end>" in what or "could not find expected ':'" in what:
            what = f"{what}; correct the indentation, or add the ':' after the key"
            mark = error.context_mark or mark if "could not find" in what else mark
        return what, mark.line + 1
    return str(error), None


def check_texts(document: Any) -> None:
    """Refuse texts that no path, variable or S3 key can hold. Raises ValueError, which names the text."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, str) and _IMPOSSIBLE.search(value):
            raise ValueError(f"{shortened(repr(value))} holds a NUL or half a surrogate pair; remove that")
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set)):
            left += value


def shortened(text: str, most: int = 300) -> str:
    """Return a text, cut after `most` characters."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MOST_VALUES:
            raise ValueError(f"it expands to more than {MOST_VALUES} values; remove aliases")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values(node: Any, counts: dict[int, int]) -> int:
    """Count the values of a node with its aliases expanded. `counts`: those of earlier nodes, by id."""
    if id(node) not in counts:
        counts[id(node)] = MOST_VALUES  # so that a node which contains itself counts as too many
        inner: list[Any] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        counts[id(node)] = 1 + sum(_values(each, counts) for each in inner)
    return counts[id(node)]


class _Loader(yaml.SafeLoader):
    """YAML loader that reads dates as text, because no key of a job file takes a date."""


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for (key_node, _), (key, value) in zip(node.value, loader.construct_pairs(node, deep=True), strict=True):
        try:
            _add(mapping, key, value)
        except ValueError as error:
            raise ConstructorError(None, None, str(error), key_node.start_mark) from error
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        _add(mapping, key, value)
    return mapping


def _add(mapping: dict[Any, Any], key: Any, value: Any) -> None:
    """Add a key to a mapping. Raises ValueError for a duplicate key, of which parsers drop one."""
    if not isinstance(key, (str, int, float, type(None))):
        raise ValueError(f"{key!r} cannot be a key")  # noqa: TRY004 - a mistake in the file
    if key in mapping:
        raise ValueError(f"key {key!r} is written twice")
    mapping[key] = value
