"""hpcsched-worker is made of what the worker imports, needs torch and numpy at most, and suits Python 3.9."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "packaging"))
import build  # noqa: E402
import closure  # noqa: E402

OPTIONAL = {
    Path("hpcsched/planning/vsw/forecast.py"): {"sklearn", "statsmodels"},
    Path("hpcsched/examples/digits.py"): {"sklearn"},
    Path("hpcsched/worker/call.py"): {"cloudpickle"},
    Path("hpcsched/integrations/jax.py"): {"jax", "orbax"},
    Path("hpcsched/integrations/keras.py"): {"keras"},
    Path("hpcsched/integrations/lightgbm.py"): {"lightgbm"},
    Path("hpcsched/integrations/xgboost.py"): {"xgboost"},
}
"""What these say in one line that it is missing, when they are used."""


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return closure.files()


@pytest.mark.long
def test_what_is_staged_is_what_the_worker_imports_and_no_more(tmp_path: Path, files: list[Path]) -> None:
    build.stage(tmp_path)
    staged = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    beside = {Path(name) for name in ("pyproject.toml", "README.md", "LICENSE")}
    assert staged == {*files, *map(Path, closure.DATA), *beside}
    for entry in ("hpcsched/worker", "hpcsched/contract", "hpcsched/examples", "hpcsched/integrations"):
        assert {path.relative_to(ROOT) for path in (ROOT / entry).rglob("*.py")} <= staged
    rooms = {path.parts[1] for path in files if len(path.parts) > 2}
    assert rooms == {"contract", "examples", "integrations", "planning", "worker"}


@pytest.mark.long
def test_nothing_but_torch_and_numpy_is_needed_besides_the_frameworks_of_adapters(files: list[Path]) -> None:
    for path in files:
        if path.parts[1] == "integrations":
            continue
        others = {name.partition(".")[0] for name in closure.imported(ROOT / path, {})}
        others -= {*sys.stdlib_module_names, "hpcsched", "torch", "numpy"}
        assert others <= OPTIONAL.get(path, set()), path


@pytest.mark.long
def test_the_linter_reads_all_of_it_as_python_3_9(files: list[Path]) -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["per-file-target-version"]
    read = {path for glob in table for path in _matching(glob)}
    assert set(files) <= read
    for path in files:
        ast.parse((ROOT / path).read_text(), feature_version=(3, 9))


def _matching(glob: str) -> set[Path]:
    head, brace, rest = glob.partition("{")
    words, _, tail = rest.partition("}")
    globs = [f"{head}{word}{tail}" for word in words.split(",")] if brace else [glob]
    if "{" in tail:
        return {path for one in globs for path in _matching(one)}
    deep = (f"{one}/*.py" if one.endswith("**") else one for one in globs)
    return {path.relative_to(ROOT) for one in deep for path in ROOT.glob(one)}
