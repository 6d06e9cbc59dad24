"""Base class of the sections of a job file: frozen, SageMaker's spelling, no unknown keys.

A section accepts its fields and the keys in `ignored`: keys that SageMaker has in this section and that do
not concern data. Any other key is an error, so a misspelt key is never dropped.
`tests/sidecar/test_sagemaker.py` compares fields and ignored keys with the API's public model.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_pascal


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
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(f"must not be {str(value).lower()}; for text, put it in quotes")
        return value
