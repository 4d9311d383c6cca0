"""The example under `hpcsched run`, suspended twice."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightgbm", reason="LightGBM is not installed")

from exampleruns import ExampleRun, python


@pytest.mark.slow
def test_suspended_twice(tmp_path: Path) -> None:
    work = ["--steps", "100", "--out", "out"]
    lines = ExampleRun(tmp_path / "whole", python("lightgbm/train.py", *work)).lines()
    parts = ExampleRun(tmp_path / "parts", python("lightgbm/elastic.py", *work)).suspended(15, 50)
    assert parts.lines() == lines
    assert parts.said().count("is asked to save") == 2
    assert lines[-1].startswith("done step 100 ")
