"""Strategies: what stands once is what everybody goes by; others can be added, and a broken one is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, EntryPoints
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched import jobfile
from hpcsched import strategies as added
from hpcsched.contract import strategies
from hpcsched.contract.schema import number, option, options_of
from hpcsched.contract.strategies import KINDS, Cpu, Ps, Strategy
from hpcsched.core.mechanisms.cpu.cores import LEAST, WHOLE
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.batching import RULES
from hpcsched.policy.cpu.configurations import Rules

ANYTHING = st.one_of(
    st.booleans(),
    st.integers(-2, 40),
    st.floats(-1, 3),
    st.sampled_from(("", "auto", "shared", "sqrt", "x")),
    st.lists(st.integers(0, 64), max_size=3),
)


def job(strategy: Any, **rest: Any) -> Any:
    runs = {"command": ["x"]} if KINDS.get(strategy.get("kind")) is Cpu else {"trainer": "a:B"}
    table = {"schema": 1, "job": [{"name": "a", **runs, "strategy": strategy, **rest}]}
    return jobfile.parse(table, where="jobs.toml", workdir=Path()).jobs[0]


@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_a_job_file_and_a_worker_accept_the_same(kind: str, data: st.DataObject) -> None:
    """And a table of options that are right one by one is refused only for what does not fit together."""
    names = st.sampled_from((*options_of(KINDS[kind]), "another"))
    table = data.draw(st.dictionaries(names, ANYTHING, max_size=4))
    said = {"kind": kind, **table}
    answers = []
    for read in (lambda: job(said), lambda: strategies.read(said, where="strategy")):
        try:
            read()
            answers.append("")
        except ConfigError as error:
            answers.append(f"{error.key.removeprefix('job a.strategy.')}: {error.got}; {error.accepted}")
    assert answers[0] == answers[1]
    right = all(name in options_of(KINDS[kind]) and options_of(KINDS[kind])[name].admits(value)
                for name, value in table.items())  # fmt: skip
    assert right or answers[0]


def test_the_spec_keeps_what_the_user_wrote() -> None:
    assert job({"kind": "vsw", "local_batch": 32}).strategy == {"kind": "vsw", "local_batch": 32}


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_says_what_it_means_and_what_holds_without_it(kind: str) -> None:
    cls = KINDS[kind]
    assert cls.about.endswith(".") and (Path(__file__).parents[3] / "docs" / cls.guide.split("#")[0]).exists()
    for each in fields(cls):  # type: ignore[arg-type]
        assert each.metadata["about"].endswith("."), each.name
        assert (each.default is None) == bool(each.metadata["unset"]), each.name
        if each.default is not None and each.name != "cpus":
            assert each.metadata["accepted"].admits(each.default), each.name


def test_numbers_that_stand_in_other_rooms_too_are_the_same() -> None:
    assert isclose(strategies.LEAST_CORES, LEAST / WHOLE)
    assert set(strategies.LEARNING_RATES) == set(RULES)
    rules = Rules.of({"kind": "ps", "cpus": 1})
    assert (*rules.counts, rules.start, rules.scale_up) == (1, 2, Ps.start, Ps.scale_up)


@pytest.mark.parametrize("kind", ["", "no", None, 3, ["ddp"], {}])
def test_what_is_no_strategy_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=rf"accepted: {', '.join(KINDS)}$"):
        added.read({"kind": kind}, where="x")


@dataclass(frozen=True)
class Clipped(Strategy):
    about = "Data parallel, with clipped gradients."
    module = "somewhere.clipped"

    norm: float = option(number("a positive number", exclusiveMinimum=0), 1.0, about="The largest norm.")


class Point(EntryPoint):
    """One whose object is here, if it has any."""

    def load(self) -> Any:
        return {"toy": Clipped, "plain": Strategy}.get(self.name) or super().load()


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The entry points of other packages."""
    names = {"toy": "toy:Clipped", "plain": "plain:Plain", "gone": "no.such.module:Thing"}
    points = EntryPoints(Point(name, value, added.GROUP) for name, value in names.items())
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: points)
    yield
    KINDS.pop("toy", None)


@pytest.mark.usefixtures("others")
def test_another_package_adds_a_strategy() -> None:
    spec = job({"kind": "toy", "norm": 2})
    assert spec.strategy == {"kind": "toy", "norm": 2} and (spec.gpus_min, spec.gpus_max) == (1, None)
    with pytest.raises(ConfigError, match=r"job a\.strategy\.norm: 0; accepted: a positive number"):
        job({"kind": "toy", "norm": 0})


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("gone", "the strategy 'gone' (no.such.module:Thing) cannot be loaded: No module named 'no'"),
        ("plain", "is not a dataclass that inherits"),
        ("other", f"'other'; accepted: {', '.join(KINDS)}, toy, plain, gone"),
    ],
)
def test_one_that_cannot_be_loaded_is_named_in_one_line(kind: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job({"kind": kind})
    assert "jobs.toml: job a.strategy: " in str(refused.value)
    assert line in str(refused.value) and "\n" not in str(refused.value)
    assert kind not in KINDS
    job({"kind": "ddp"})


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="called 'ddp' already"):
        strategies.register("ddp", Clipped)


def test_a_job_of_a_built_in_strategy_waits_for_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: pytest.fail("not needed"))
    assert added.read({"kind": "ps", "cpus": 1}, where="x") == Ps(cpus=1)
