"""Reads a YAML or JSON file as dicts, lists and scalars.

`read_document` returns within a few seconds or raises ConfigError, whatever is in the file: the size of the
file and the number of values after the expansion of YAML aliases have limits. It refuses duplicate keys, and
NULs and half surrogate pairs, which no path, variable, header or S3 key can contain.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from streamer.errors import ConfigError

MOST_BYTES = 1 << 20
"""Most bytes of a file; the largest CreateTrainingJob request has about a third of it."""
MOST_YAML = 1 << 18
"""Most bytes of a YAML file: the parser takes about 10 s for a megabyte."""
MOST_VALUES = 100_000
"""Most values of a document, with aliases expanded."""
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
    return _no_duplicates(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return pairs as a dict. Raises ValueError for a duplicate key, of which parsers drop one."""
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, (str, int, float, type(None))):
            raise ValueError(f"{key!r} cannot be a key")  # noqa: TRY004 - a mistake in the file
        if key in mapping:
            raise ValueError(f"key {key!r} is written twice")
        mapping[key] = value
    return mapping
