"""Describes what pydantic found wrong in a document: the key, the line, and what to write instead.

A key of another spelling (`URL`, `memory_budget`) is compared without case and separators, first with the
keys of its section, then with those of all sections.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from sidecar.config.document import Mistake, shortened
from sidecar.config.endpoint import REGION_ADVICE
from sidecar.config.model import Model
from sidecar.config.retired import RETIRED
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pydantic import ValidationError

MOST_MISTAKES = 50
"""Most mistakes that one error reports."""
_ADVICE = {
    "ChannelName": "use letters, digits, '.', '-' and '_'",
    "Region": REGION_ADVICE,
    "BaseDirectory": "write an absolute path, such as /opt/ml",
    "GiveUpAfter": "write seconds, such as 300",
    "StallTimeout": "write seconds, such as 30",
    "DrainFor": "write seconds, such as 20",
    "Include": 'write globs in quotes, such as ["*.tar"]',
    "Exclude": 'write globs in quotes, such as ["*.crc"]',
    "Limit": "write {Objects: 1000} or {Bytes: 10GB}",
    "Split": 'write {Of: 100, Take: "0-98"}',
    "Mix": "write {Weights: [7, 2, 1]}",
    "Block": "write a size from 1 B to 1 TiB, such as 4MiB",
    "KmsKeyId": "write the id or the ARN of a key, or alias/NAME",
    "Output": "write ignore, or {Replace: true}",
    "Checkpoints": "write ignore, or {Restore: newest}",
    "HedgeBudget": "write a share between 0 and 1, such as 0.05",
}
"""By key, the form of its value."""
_OF_A_CHANNEL = {
    "Ranks": "Ranks: 4",
    "ChannelBandwidth": "Bandwidth: 50MB",
    "Include": 'Include: ["*.tar"]',
    "Exclude": 'Exclude: ["*.crc"]',
    "Limit": "Limit: {Objects: 1000}",
    "Split": 'Split: {Of: 100, Take: "0-98"}',
    "AlsoFrom": 'AlsoFrom: ["s3://BUCKET/PREFIX"]',
    "Mix": "Mix: {Weights: [7, 2, 1]}",
}
"""By key that a user may expect in the `Penstock` section of the job, the setting of a channel."""
_SUBJECT = re.compile(r"^(?:Input|String|Tuple|List|Dictionary|Set|Value) should ")
_NUMBER = re.compile(r"\[\d+\]")
_TOP = "the top level"


class RuleError(ValueError):
    """A rule between keys is broken; `at` leads from the section of the rule to the key to correct."""

    def __init__(self, message: str, *, at: tuple[str | int, ...]) -> None:
        super().__init__(message)
        self.at = at


def mistakes(
    error: ValidationError,
    root: type[Model],
    *,
    line: Callable[[Sequence[str | int]], int | None] = lambda _: None,
) -> tuple[list[Mistake], int]:
    """Return the mistakes that pydantic found in a document of `root`, and how many more there are.

    `line` returns the line of the value at a path.
    """
    details = error.errors(include_url=False)
    # pydantic also reports a list whose items are all wrong as too short; the items' own errors are better.
    chosen = [
        each
        for each in details
        if each["type"] != "too_short" or len(each["input"]) < each["ctx"]["min_length"]
    ]
    chosen = chosen or details
    found = []
    for detail in chosen[:MOST_MISTAKES]:
        path = tuple(step for step in detail["loc"] if step != "[key]")
        path += getattr(detail.get("ctx", {}).get("error"), "at", ())
        message = shortened(_message(detail, root, path), 1000)
        found.append(Mistake(message, shortened(key_of(path), 1000), line(path)))
    return found, max(0, len(chosen) - MOST_MISTAKES)


def explain(error: ValidationError, root: type[Model]) -> str:
    """Describe every mistake in one line."""
    found, more = mistakes(error, root)
    texts = [f"{each.key}: {each.message}" if each.key else each.message for each in found]
    return "; ".join([*texts, *([f"and {counted(more, 'more mistake')}"] if more else [])])


def key_of(path: Sequence[str | int]) -> str:
    """Return a path as text: `InputDataConfig[0].ChannelName`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def kind_of(value: object) -> str:
    """Return the kind of a value of a document in words."""
    if isinstance(value, (dict, list, tuple, str, bool)):
        return {dict: "a mapping", str: "a text", bool: "true or false"}.get(type(value), "a list")
    return "empty" if value is None else "a number"


_TEXTS = {
    "missing": "is required",
    "string_type": "must be text; put it in quotes",
    "model_type": "must be a mapping of keys to values, and is {kind}",
    "dict_type": "must be a mapping of keys to values, and is {kind}",
    "tuple_type": "must be a list, and is {kind}; put '- ' before each item",
    "byte_rate": "{shown} is not a size; leave out '/s'",
    "byte_size": "{shown} is not a size; write 512MiB or a number of bytes",
    "byte_size_unit": "{shown} is not a size; write 512MiB or a number of bytes",
    "int_type": "{shown} is not a whole number",
    "int_parsing": "{shown} is not a whole number",
    "int_from_float": "{shown} is not a whole number",
    "float_type": "{shown} is not a number",
    "float_parsing": "{shown} is not a number",
    "bool_type": "{shown} is neither true nor false",
    "bool_parsing": "{shown} is neither true nor false",
}
"""By pydantic's name of a mistake, the message."""


def _message(detail: Any, root: type[Model], path: tuple[str | int, ...]) -> str:
    kind, shown = detail["type"], shortened(repr(detail["input"]))
    advice = _ADVICE.get(str(path[-1])) if path else None
    if kind in ("extra_forbidden", "literal_error") and (instead := _retired(path, detail["input"])):
        subject = f"{shown} " if kind == "literal_error" else ""
        return f"{subject}is retired: {instead}"
    if kind == "extra_forbidden":
        return f"is not a key that Penstock supports here; {_advice(root, path)}"
    if kind == "literal_error":
        expected = detail["ctx"]["expected"]
        close = _closest(str(detail["input"]), re.findall(r"'([^']*)'", expected))
        return f"{shown} is not one of {expected}" + (f"; did you mean {close!r}?" if close else "")
    if kind == "string_pattern_mismatch":
        return f"{shown} is not allowed; {advice or 'it must match ' + detail['ctx']['pattern']}"
    if kind == "too_short":
        least = detail["ctx"]["min_length"]
        text = f"must have at least {least} item{'s' * (least > 1)}"
    elif kind in _TEXTS:
        text = _TEXTS[kind].format(shown=shown, kind=kind_of(detail["input"]))
    else:
        text = _SUBJECT.sub("must ", str(detail["msg"]).removeprefix("Value error, "))
    return f"{text}; {advice}" if advice and kind not in ("missing", "string_type", "value_error") else text


def _retired(path: Sequence[str | int], value: object) -> str | None:
    """Return what to use in place of a retired key, or of a retired value of a key; None if neither is."""
    key = _NUMBER.sub("[]", key_of(path))
    return RETIRED.get(key) or RETIRED.get(f"{key}: {value}")


def _advice(root: type[Model], path: tuple[str | int, ...]) -> str:
    """Return what to do about an unknown key."""
    key = str(path[-1])
    own = _section(root, path[:-1])
    if (close := _closest(key, own, cutoff=1)) is not None:
        return f"did you mean {close}?"
    if key in _OF_A_CHANNEL and path[:-1] == ("Penstock",):
        return f"each channel has it in a section of its own, `Penstock: {{{_OF_A_CHANNEL[key]}}}`"
    sections = _sections(root)
    if (exact := _closest(key, sections, cutoff=1)) is not None:
        spelling = "it" if exact == key else exact
        return f"{spelling} belongs in {' or '.join(sections[exact])}"
    if (close := _closest(key, own, cutoff=0.6)) is not None:
        return f"did you mean {close}?"
    if (close := _closest(key, sections)) is not None:
        return f"did you mean {close}? It belongs in {' or '.join(sections[close])}"
    return "remove it"


def _closest(word: str, words: Any, *, cutoff: float = 0.8) -> str | None:
    """Return the word of `words` that is most like `word`, compared without case and separators."""
    plain = {_plain(each): each for each in words}
    close = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[close[0]] if close else None


def _plain(word: str) -> str:
    return re.sub(r"[\W_]", "", word).casefold()


def _section(root: type[Model], path: Sequence[str | int]) -> list[str]:
    """Return the keys of the section at `path`."""
    model: type[Model] | None = root
    for step in path:
        if isinstance(step, int) or model is None:
            continue
        fields = model.model_fields
        model = next((_model(each.annotation) for name, each in fields.items() if each.alias == step), None)
    return [] if model is None else _keys(model)


def _keys(model: type[Model]) -> list[str]:
    """Return the keys that a section may have."""
    return [*(field.alias or name for name, field in model.model_fields.items()), *model.ignored]


@cache
def _sections(root: type[Model]) -> dict[str, tuple[str, ...]]:
    """Return, by key, the sections that it belongs in."""
    found: dict[str, list[str]] = defaultdict(list)
    for section, model in _walk(root, ""):
        for key in _keys(model):
            found[key].append(section or _TOP)
    return {key: tuple(sections) for key, sections in found.items()}


def _walk(model: type[Model], section: str) -> Iterator[tuple[str, type[Model]]]:
    """Yield every section below `model` with its path: `InputDataConfig[].DataSource`."""
    yield section, model
    for name, field in model.model_fields.items():
        if (inner := _model(field.annotation)) is not None:
            many = "[]" if inner is not field.annotation else ""
            yield from _walk(inner, f"{section}.{field.alias or name}{many}".lstrip("."))


def _model(annotation: Any) -> type[Model] | None:
    """Return the section that values of a type consist of, None if the type has no keys."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model(each)) is not None), None)
