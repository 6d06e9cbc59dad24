"""What every program trains on: the shape of a record, the learning rate, the number of epochs."""

from __future__ import annotations

DIMENSIONS = 16
"""32-bit floats of a vector; one more is the label. A 64-bit number of the record comes first."""
RATE = 0.05
EPOCHS = 2
