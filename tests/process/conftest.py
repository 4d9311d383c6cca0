"""Fixtures of the live tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from livebench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A place for one run; whatever is left running there is ended."""
    place = Bench(tmp_path)
    yield place
    place.close()
