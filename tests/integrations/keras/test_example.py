"""The example under `hpcsched run`, suspended twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras is not installed")

from exampleruns import ExampleRun, python


@pytest.mark.slow
def test_suspended_twice(tmp_path: Path) -> None:
    work = ["--steps", "100", "--out", "out"]
    lines = ExampleRun(tmp_path / "whole", python("keras/train.py", *work)).lines()
    parts = ExampleRun(tmp_path / "parts", python("keras/elastic.py", *work)).suspended(5, 50)
    assert parts.lines() == lines
    assert parts.said().count("is asked to save") == 2
    assert lines[-1].startswith("done step 100 ")
