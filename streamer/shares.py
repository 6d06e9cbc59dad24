"""Which of several sources is next, so that each has its share by weight. Pure.

With T records given, a source is *due* unless it has more than T·weight/sum. Of those that are due, the
source comes next whose next block ends first on its own clock: (taken + block) / weight is least, and of
equal ones the first source. This is earliest eligible virtual deadline first (Stoica and Abdel-Wahab, 1995).
So in every prefix a source has its share to within one block, the largest of all; by record, to within one
record.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction


def in_lowest_terms(weights: Sequence[Fraction]) -> list[int]:
    """Return whole numbers in the ratio of `weights`."""
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = gcd(*whole)
    return [each // common for each in whole]


def next_source(taken: Sequence[int], blocks: Sequence[int], weights: Sequence[int], whole: int) -> int:
    """Return the source of the next block. `taken`: records of each source so far.

    `blocks`: records of the next block of each source; 0 if it has none left. If only sources that are not
    due have any, these take part. `whole`: sum of the weights. Raises ValueError if no source has any.
    """
    total = sum(taken)
    best, best_due, best_end, best_weight = -1, False, 0, 0
    for source, block in enumerate(blocks):
        if not block:
            continue
        have, weight = taken[source], weights[source]
        due = have * whole <= total * weight
        if due < best_due:
            continue
        end = have + block
        if due > best_due or best < 0 or end * best_weight < best_end * weight:
            best, best_due, best_end, best_weight = source, due, end, weight
    if best < 0:
        raise ValueError("no source has a block left")
    return best
