"""The options of a strategy: those that a job file accepts are those that the worker knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hpcsched import strategies

FOLDER = Path(strategies.__file__).parent / "worker"

ROOMS = {"packed": "packing"}


@pytest.mark.parametrize("kind", sorted(set(strategies.STRATEGIES) - {"cpu", "vsw"}))
def test_a_job_file_accepts_the_options_that_the_worker_knows(kind: str) -> None:
    """`cpu` is no trainer's; `vsw` checks its options by `planning.vsw.options` on both sides."""
    module = ast.parse((FOLDER / ROOMS.get(kind, kind) / "strategy.py").read_text())
    assigned = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert set(ast.literal_eval(assigned["OPTIONS"])) == set(strategies._OPTIONS[kind])
