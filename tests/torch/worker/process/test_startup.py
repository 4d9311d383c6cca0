"""Processes start and end quickly, and nothing that Python promises at the end is left out."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from hpcsched.worker.process.startup import fewer_collections

PROGRAM = """
import atexit, sys
from hpcsched.worker.process.startup import exit_quickly, run_to_the_end

def main():
    atexit.register(print, "goodbye")
    exit_quickly()
    try:
        {end}
    finally:
        print("finally")

run_to_the_end(main)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return 0", 0),
        ("return 2", 2),
        ("raise SystemExit(75)", 75),
        ("sys.exit()", 0),
        ("sys.exit('why')", 1),
        ("raise KeyError('users')", 1),
    ],
)
def test_the_exit_code_is_kept_and_exit_handlers_run(end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == code
    assert done.stdout == "finally\ngoodbye\n"
    assert ("Traceback" in done.stderr) == ("KeyError" in end)
    assert ("why" in done.stderr) == ("why" in end)


def test_collections_are_as_usual_afterwards() -> None:
    usual = gc.get_threshold()
    with pytest.raises(ValueError), fewer_collections():
        assert gc.get_threshold()[0] > usual[0]
        raise ValueError
    assert gc.get_threshold() == usual


@pytest.mark.torch
def test_torch_deregisters_nothing_at_the_end_and_the_users_finalizers_run() -> None:
    pytest.importorskip("torch")
    program = """
import weakref
from hpcsched.worker.process.startup import leave_torch_as_it_is, run_to_the_end

class Users: pass

def torchs():
    return [f for f in weakref.finalize._registry if f.atexit and f.peek()[1].__module__ == "torch.library"]

def main():
    import torch
    main.kept = Users()
    weakref.finalize(main.kept, print, "the user's")
    weakref.finalize(main.kept, [].append, 1)
    print(len(torchs()) > 0)
    leave_torch_as_it_is()
    print(len(torchs()))
    return 0

run_to_the_end(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["True", "0", "the user's"], done.stderr
