"""How many random examples a tier affords (see the Hypothesis profiles in tests/conftest.py)."""

from __future__ import annotations

import pytest
from hypothesis import settings

FEWEST = 5


def examples(all_of_them: int) -> int:
    """The share of these examples that the loaded profile affords; all of them in `make test-all`."""
    return max(FEWEST, all_of_them * settings().max_examples // 100)


def slow(*values: object) -> object:
    """A case of a parametrized test that only `make test-all` tries."""
    return pytest.param(*values, marks=pytest.mark.slow)
