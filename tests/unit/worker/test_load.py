"""Strategies are found by their kind: in the table, and among those of installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcsched.errors import ConfigError
from hpcsched.worker.load import GROUP, STRATEGIES, load_strategy

TOY = "OPTIONS = ('norm',)\n\n\ndef run(trainer, env):\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules and packages are found; what is imported from there is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("toy_strategy", "toy_broken", "toy_empty"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def install(folder: Path, *lines: str) -> None:
    """A package that has these entry points."""
    info = folder / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))


def test_the_table_says_which_module_it_is(folder: Path) -> None:
    (folder / "toy_strategy.py").write_text(TOY)
    table = {**STRATEGIES, "clipped": "toy_strategy"}
    assert load_strategy({"kind": "clipped", "norm": 1.0}, table).__name__ == "toy_strategy"
    with pytest.raises(ConfigError, match="strategy clipped: nrom: unknown option; accepted: norm"):
        load_strategy({"kind": "clipped", "nrom": 1.0}, table)


def test_an_installed_package_adds_a_strategy(folder: Path) -> None:
    (folder / "toy_strategy.py").write_text(TOY)
    install(folder, "clipped = toy_strategy", "broken = toy_broken")
    assert load_strategy({"kind": "clipped"}).__name__ == "toy_strategy"
    with pytest.raises(ConfigError, match=r"kind: 'magic'; accepted: ddp, .*, vsw, broken, clipped"):
        load_strategy({"kind": "magic"})
    with pytest.raises(ConfigError, match="kind: None; accepted: ddp"):
        load_strategy({})


def test_a_built_in_strategy_cannot_be_replaced(folder: Path) -> None:
    (folder / "toy_strategy.py").write_text(TOY)
    install(folder, "own = toy_broken")
    assert load_strategy({"kind": "own"}, {"own": "toy_strategy"}).__name__ == "toy_strategy"


def test_a_broken_entry_point_is_one_line(folder: Path) -> None:
    (folder / "toy_broken.py").write_text("raise ValueError('no licence\\nfor this host')\n")
    (folder / "toy_empty.py").write_text("OPTIONS = ()\n")
    install(folder, "broken = toy_broken", "empty = toy_empty", "gone = toy_gone")
    for kind, why in (
        ("broken", "'toy_broken' of the entry point 'broken' cannot be loaded: no licence"),
        ("empty", "'toy_empty' of the entry point 'empty' has no run"),
        ("gone", "'toy_gone' of the entry point 'gone' cannot be loaded: No module named 'toy_gone'"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_strategy({"kind": kind})
        expected = f"strategy: kind: {why}; accepted: a module with OPTIONS and run(trainer, env)"
        assert str(refused.value) == expected
