"""The key `Mix` of a channel's `Penstock` section."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StrictFloat, StrictInt, model_validator

from sidecar.config.mistakes import RuleError
from sidecar.config.model import Model
from streamer.errors import ConfigError
from streamer.plan.mix import Mix, MixBy, MixChange, Until, lowest_terms

Weight = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]
"""A number, whole or not."""
Number = Annotated[StrictInt, Field(ge=0, lt=1 << 62)]
MOST_CHANGES = 100
"""Most changes of the weights: states and trailers have all, and each has a table of picks."""


class MixChangeConfig(Model):
    """Other weights, from a global batch on."""

    epoch: Number
    step: Number = 0
    """Number of the first global batch of the epoch with these weights."""
    weights: Annotated[tuple[Weight, ...], Field(min_length=2)]
    """Weight of each prefix, in the order of `Mix.Weights`."""


class MixConfig(Model):
    """How the prefixes of a channel are mixed."""

    weights: Annotated[tuple[Weight, ...], Field(min_length=2)]
    """Shares of the records, in any unit: that of S3Uri, then one for each prefix of AlsoFrom."""
    until: Until = "first"
    """End of an epoch: before a prefix would begin again, or when every prefix has been read."""
    by: MixBy = "block"
    """What comes from one prefix at a time: a block, or a record."""
    then: Annotated[tuple[MixChangeConfig, ...], Field(max_length=MOST_CHANGES)] = ()
    """Schedule of other weights, in the order of their steps."""

    @model_validator(mode="after")
    def _exact(self) -> Self:
        _terms(self.weights, "Weights")
        last = (0, 0)
        for number, change in enumerate(self.then):
            if len(change.weights) != len(self.weights):
                raise RuleError(
                    f"the change has {len(change.weights)} Weights, and Mix {len(self.weights)}; write one "
                    "weight for each prefix",
                    at=("Then", number, "Weights"),
                )
            if (change.epoch, change.step) <= last:
                after = f"step {last[1]} of epoch {last[0]}"
                raise RuleError(
                    f"the change is not after {after}; write the changes in the order of Epoch and Step, "
                    "without the weights of the first step, which Mix.Weights has",
                    at=("Then", number),
                )
            _terms(change.weights, "Then", number, "Weights")
            last = change.epoch, change.step
        return self

    @property
    def mix(self) -> Mix:
        """The weights in lowest terms."""
        then = (MixChange(each.epoch, each.step, lowest_terms(each.weights)) for each in self.then)
        return Mix(lowest_terms(self.weights), self.until, self.by, tuple(then))


def _terms(weights: tuple[float, ...], *at: str | int) -> None:
    """Check that the weights have lowest terms. Raises RuleError."""
    try:
        lowest_terms(weights)
    except ConfigError as error:
        raise RuleError(str(error), at=at) from None
