"""A YAML or JSON document that a person or a program wrote, as dicts, lists and scalars.

Whatever the file holds, `read_document` returns in a few seconds or raises ConfigError. The size of the file
is bounded, and so is what its YAML aliases expand to. A key that is written twice, a NUL and half a surrogate
pair are refused: no path, variable, header or S3 key can hold the last two.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from streamer.errors import ConfigError

MOST_BYTES = 1 << 20
"""Of a file; the largest CreateTrainingJob request has about a third."""
MOST_YAML = 1 << 18
"""Of a YAML file: its parser takes some 10 s for a megabyte."""
MOST_VALUES = 100_000
"""Of a document, each counted as often as aliases repeat it."""
_IMPOSSIBLE = re.compile("[\0\ud800-\udfff]")


def read_document(path: str) -> Any:
    """Read the file, JSON if it begins with a bracket, else YAML. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
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
        document = json.loads(text, object_pairs_hook=_no_duplicates) if is_json else _yaml(text)
        check_texts(document)
    except Exception as error:  # PyYAML's constructors raise IndexError, KeyError, ... for odd scalars
        raise ConfigError(f"cannot understand {path}: {shortened(str(error))}") from error
    return document


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
    """The beginning of a text that may be of any length."""
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


def _values(node: Any, known: dict[int, int]) -> int:
    """How many values a node stands for once its aliases are expanded. Raises ValueError for a circle."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES  # until it is known: what contains itself is too much
        inner: list[Any] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        known[id(node)] = 1 + sum(_values(each, known) for each in inner)
    return known[id(node)]


class _Loader(yaml.SafeLoader):
    """Leaves dates as the text they were written as: nothing in a job file is a date to us."""


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    return _no_duplicates(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Either way a key written twice is an error, not a silent choice."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, (str, int, float, type(None))):
            raise ValueError(f"{key!r} cannot be a key")  # noqa: TRY004 - a mistake in the file
        if key in found:
            raise ValueError(f"key {key!r} is written twice")
        found[key] = value
    return found
