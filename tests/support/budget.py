"""How many random examples a tier affords (see the Hypothesis profiles in tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

Case = TypeVar("Case")

FEWEST = 5


def examples(all_of_them: int) -> int:
    """The share of these examples that the loaded profile affords; all of them in `make test-all`."""
    return max(FEWEST, all_of_them * settings().max_examples // 100)


def share(cases: Sequence[Case]) -> Sequence[Case]:
    """Every so many of these cases, as the loaded profile affords; all of them in `make test-all`."""
    return cases[:: max(1, 100 // settings().max_examples)]


def slow(*values: object) -> object:
    """A case of a parametrized test that only `make test-all` tries."""
    return pytest.param(*values, marks=pytest.mark.slow)
