"""Where the benchmarks are, and how to call what is in one."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module; the helpers beside it can be imported for the rest of the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module
