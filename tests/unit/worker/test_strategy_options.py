"""Each strategy is run by a module of the worker."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hpcsched
from hpcsched.contract.strategies import KINDS

ROOT = Path(hpcsched.__file__).parent.parent


@pytest.mark.parametrize("kind", sorted(kind for kind, cls in KINDS.items() if cls.module))
def test_a_module_of_the_worker_runs_a_strategy(kind: str) -> None:
    cls = KINDS[kind]
    tree = ast.parse((ROOT / f"{str(cls.module).replace('.', '/')}.py").read_text())
    (run,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    assert ast.unparse(run.args) == f"trainer: Trainer, env: JobEnv, options: {cls.__name__}"
