"""A job of hpcsched's in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tests.integrations.transformers.trainings import Job  # where transformers is installed

    before = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGTERM, signal.SIGCHLD)}
    yield Job(tmp_path, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)
