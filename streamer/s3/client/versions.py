"""Checks that botocore is of a version for which aiobotocore is made."""

from __future__ import annotations

import operator
import re

_COMPARISONS = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
    ">": operator.gt,
}  # fmt: skip


def moved_botocore() -> str:
    """Return what is wrong if another package has moved botocore (`pip install boto3`); else empty."""
    from importlib.metadata import PackageNotFoundError, requires, version  # takes 20 ms

    try:
        installed, client = version("botocore"), version("aiobotocore")
        pins = requires("aiobotocore") or []
    except PackageNotFoundError:
        return ""
    pin = next((each.partition(";")[0] for each in pins if re.match(r"botocore\b", each)), "")
    for sign, bound in re.findall(r"([<>=!]=|<|>)\s*([0-9.]+)", pin):
        if not _COMPARISONS[sign](_numbers(installed), _numbers(bound)):
            return (
                f"botocore {installed} is installed, and aiobotocore {client} needs {pin.strip()}: another "
                "package has moved it; install penstock-sidecar again, and boto3 by `aiobotocore[boto3]`"
            )
    return ""


def _numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"[0-9]+", text)[:3]]
