"""Base class of the sections of a job file: frozen, SageMaker's spelling, no unknown keys. The type of sizes.

A section accepts its fields and the keys in `ignored`: keys that SageMaker has in this section and that do
not concern data. Any other key is an error, so a misspelt key is never dropped.
`tests/sidecar/test_sagemaker.py` compares fields and ignored keys with the API's public model.

A size is `200MB`, `1.5GiB`, or a number of bytes. pydantic's `ByteSize` reads a prefix of the text: `1,5 GB`
is 1 byte there. The type here takes the whole text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_pascal
from pydantic_core import PydanticCustomError

from streamer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST = 2**60
"""The largest size, 1 EiB. Figures of every size fit a float, as metrics and waits need them."""
_FORM = re.compile(r"\s*(?:[0-9]+|[0-9]*\.[0-9]+)\s*[A-Za-z]*\s*")


class Model(BaseModel):
    """A section of a job file."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_pascal)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Keys of SageMaker's model in this section that do not concern data."""

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: inner for key, inner in value.items() if key not in cls.ignored}

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for any other type: YAML reads yes, no, on and off as booleans."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation not in (bool, bool | None):
            raise ValueError(f"must not be {str(value).lower()}; for text, put it in quotes")
        return value


def _whole(value: Any) -> Any:
    if isinstance(value, str) and _FORM.fullmatch(value) is None:
        kind = "byte_rate" if _FORM.fullmatch(value.removesuffix("/s")) else "byte_size"
        raise PydanticCustomError(kind, "the text is not a size")
    return value


Size = Annotated[ByteSize, BeforeValidator(_whole), Field(le=LARGEST)]


def parse_size(value: Any) -> int:
    """Return a number of bytes. Raises pydantic's ValidationError, which is a ValueError."""
    return int(TypeAdapter(Size).validate_python(value))


def valid_for(check: Callable[[str], object]) -> AfterValidator:
    """Return the validator of texts for which `check` raises ConfigError unless they are valid."""

    def validate(value: str) -> str:
        try:
            check(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)
