"""For tests of what runs in frameworks."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def not_the_tests_end() -> Iterator[None]:
    """A training that leaves in this process must not end it with its own exit code, later."""
    yield
    if leaving := sys.modules.get("hpcsched.integrations.leaving"):
        atexit.unregister(leaving._end)
