"""What every section of a job file has in common: frozen, in SageMaker's spelling, no unknown key.

A key is known in one of two ways: as a field that we carry out, or by name in `ignored`, the keys of
SageMaker's own model at that place that have no bearing on data. Anything else is an error, so a
misspelt key is never dropped. `tests/sidecar/test_sagemaker.py` holds fields and lists against the
API's public model.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_pascal


class Model(BaseModel):
    """A section of a job file."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_pascal)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Keys that SageMaker's model has here and that say nothing about data."""

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: inner for key, inner in value.items() if key not in cls.ignored}

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML makes truth values of yes, no, on and off; only a field of that type takes them."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(f"must not be {str(value).lower()}; for text, put it in quotes")
        return value
