"""Each strategy is run by a module of the worker, which knows exactly the options that a job file accepts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hpcsched
from hpcsched.contract.schema import options_of
from hpcsched.contract.strategies import KINDS
from hpcsched.planning.vsw.options import OPTIONS

ROOT = Path(hpcsched.__file__).parent.parent


@pytest.mark.parametrize("kind", sorted(kind for kind, cls in KINDS.items() if cls.module))
def test_a_job_file_accepts_the_options_that_the_worker_knows(kind: str) -> None:
    cls = KINDS[kind]
    tree = ast.parse((ROOT / f"{str(cls.module).replace('.', '/')}.py").read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)
    known = [
        OPTIONS if kind == "vsw" else ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPTIONS"
    ]
    assert all(set(options) == set(options_of(cls)) for options in known)
