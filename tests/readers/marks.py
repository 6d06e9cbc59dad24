"""Marks of the tests whose DataLoaders have workers."""

from __future__ import annotations

import pytest

WITH_WORKERS = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("workers_of_torch"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
