"""Sweeps: parametrisations of which `make test` keeps representative cases, and `make test-long` runs the rest."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["sweep"]


def sweep(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as parameters of a test, marked `long` except for those that `make test` keeps.

    Args:
        cases: The values of `pytest.mark.parametrize`; tuples hold one value for each argument.
        kept: The cases that are not marked. Each must be among `cases`.
    """
    found = list(cases)
    assert kept
    assert all(each in found for each in kept), [each for each in kept if each not in found]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.long)
        for case in found
    ]
