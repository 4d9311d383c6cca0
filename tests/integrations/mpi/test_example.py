"""The example under mpirun and `hpcsched run`, suspended twice: its ranks hear of that by the stop file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from exampleruns import ExampleRun, python

KEYS = """
gpus = 2
env = { OMPI_ALLOW_RUN_AS_ROOT = "1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1" }
"""
MPIRUN = ["mpirun", "-np", "{world_size}", "--oversubscribe"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_suspended_twice(tmp_path: Path) -> None:
    work = ["--steps", "100", "--out", "out"]
    lines = ExampleRun(tmp_path / "whole", [*MPIRUN, *python("mpi/train.py", *work)], KEYS).lines()
    parts = ExampleRun(tmp_path / "parts", [*MPIRUN, *python("mpi/elastic.py", *work)], KEYS)
    assert parts.suspended(15, 50).lines() == lines
    assert "is told to end" not in parts.said()  # Open MPI's would hold its ranks at SIGTSTP
    assert lines[-1].startswith("done step 100 ")
