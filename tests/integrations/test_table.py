"""Each example of examples/ under hpcsched: what the table of docs/frameworks.md says of it is so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from frameworks.examples import EXAMPLES, Example, python_of  # noqa: E402
from frameworks.table import ENVIRONMENTS, try_example  # noqa: E402

STEPS = 45


@pytest.mark.slow
@pytest.mark.parametrize("which", ["newest", "oldest"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_nothing_goes_wrong_in_silence(example: Example, which: str, tmp_path: Path) -> None:
    if which == "oldest" and not example.environment:
        pytest.skip("of torch, not of a framework: `make old-env`")
    python = python_of(example, ENVIRONMENTS / which)
    if not python or (which == "oldest" and python == sys.executable):
        pytest.skip(f"no {', '.join(example.packages)} here: packaging/framework_envs.sh {which} has them")
    row = try_example(example, python=python, steps=STEPS, place=tmp_path)
    assert row.ok, row.wrong
