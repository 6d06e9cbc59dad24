"""The key `Mix` of a channel's `Penstock` section."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StrictFloat, model_validator

from sidecar.config.model import Model
from streamer.errors import ConfigError
from streamer.plan.mix import Mix, MixBy, Until, lowest_terms

Weight = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]
"""A number, whole or not."""


class MixConfig(Model):
    """How the prefixes of a channel are mixed."""

    weights: Annotated[tuple[Weight, ...], Field(min_length=2)]
    """Of S3Uri, then of each prefix of AlsoFrom: shares of the records, in any unit."""
    until: Until = "first"
    """End of an epoch: before a prefix would begin again, or when every prefix has been read."""
    by: MixBy = "block"
    """What comes from one prefix at a time: a block, or a record."""

    @model_validator(mode="after")
    def _exact(self) -> Self:
        _ = self.mix
        return self

    @property
    def mix(self) -> Mix:
        """The weights in lowest terms. Raises ValueError if they are too fine."""
        try:
            return Mix(lowest_terms(self.weights), self.until, self.by)
        except ConfigError as error:
            raise ValueError(f"Weights: {error}") from None
