"""A job of hpcsched's in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.integrations.transformers.trainings import Job  # where transformers is installed

    return Job(tmp_path, monkeypatch)
