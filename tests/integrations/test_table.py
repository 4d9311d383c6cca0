"""Each example of examples/ under hpcsched: what the table of docs/frameworks.md says of it is so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from frameworks.examples import EXAMPLES, Example, python_of  # noqa: E402
from frameworks.table import try_example  # noqa: E402

STEPS = 45


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_nothing_goes_wrong_in_silence(example: Example, tmp_path: Path) -> None:
    python = python_of(example, ROOT / ".venv-frameworks")
    if not python:
        pytest.skip(f"no {', '.join(example.packages)} here: packaging/framework_envs.sh has them")
    row = try_example(example, python=python, steps=STEPS, place=tmp_path)
    assert row.ok, row.wrong
