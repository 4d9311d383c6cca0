"""A strategy is loaded by what a job file says of it; what cannot be loaded is said in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcsched.contract.schema import option, whole
from hpcsched.contract.strategies import KINDS, Strategy, register
from hpcsched.errors import ConfigError
from hpcsched.worker.load import load_strategy


@dataclass(frozen=True)
class Toy(Strategy):
    module = "toy_strategy"

    norm: int = option(whole("a norm"), 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where modules are found; what is imported from there is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_strategy", raising=False)
    register("toy", Toy)
    yield tmp_path
    del KINDS["toy"]


def test_a_strategy_is_run_with_its_options(folder: Path) -> None:
    (folder / "toy_strategy.py").write_text("def run(trainer, env, options):\n    env.append(options)\n")
    seen: list[object] = []
    load_strategy({"kind": "toy", "norm": 3})(None, seen)
    assert seen == [Toy(norm=3)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ValueError('no licence\\nfor this host')", "no licence"),
        ("", "has no attribute 'run'"),
        (None, "No module named 'toy_strategy'"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_one_line(folder: Path, text: str | None, why: str) -> None:
    if text is not None:
        (folder / "toy_strategy.py").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_strategy({"kind": "toy"})
    line = str(refused.value)
    assert line.startswith(
        "strategy: kind: the module 'toy_strategy' of the strategy 'toy' cannot be loaded: "
    )
    assert why in line and "\n" not in line


def test_a_strategy_of_programs_trains_nothing() -> None:
    with pytest.raises(ConfigError, match="cores for jobs with a command only"):
        load_strategy({"kind": "cpu", "cpus": 1})


def test_a_strategy_without_a_module_trains_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "module", None)
    with pytest.raises(ConfigError) as refused:
        load_strategy({"kind": "toy"})
    assert str(refused.value).startswith("strategy: kind: 'toy', for no trainer; accepted: one whose class")
