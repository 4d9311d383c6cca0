"""When a ratio to the floor, or to a peer, counts as lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import regressions
import run_all

STEADY, WILD = [1.00, 1.01, 0.99, 1.00, 1.005], [1.0, 1.5, 0.5, 1.2, 0.8]
ABOUT = {"cpu": "Some CPU", "cores": 2, "gpus": [], "commit": "abc", "dirty": False, "load_before": 0.1}


def lost(before: list[float], now: list[float]) -> bool:
    (verdict,) = regressions.verdicts({"x": before}, {"x": now})
    return verdict.lost


@pytest.mark.parametrize(("factor", "is_lost"), [(1.0, False), (0.96, False), (0.93, True), (2.0, False)])
def test_what_is_steady_is_held_tightly(factor: float, is_lost: bool) -> None:
    assert lost(STEADY, [factor * ratio for ratio in STEADY]) is is_lost


@pytest.mark.parametrize(("factor", "is_lost"), [(0.8, False), (0.1, True)])
def test_what_varies_has_to_fall_far(factor: float, is_lost: bool) -> None:
    assert lost(WILD, [factor * ratio for ratio in WILD]) is is_lost
    assert lost(STEADY, [ratio - 0.3 for ratio in WILD]) is False  # noise of either side counts
    assert lost(STEADY, [ratio - 0.3 for ratio in STEADY]) is True


def test_what_is_not_in_both_is_not_judged() -> None:
    assert regressions.verdicts({"x": STEADY, "y": STEADY}, {"x": STEADY[:2], "z": STEADY}) == []


def test_ratios_are_of_pairs_and_leave_out_a_peer_that_was_not_there() -> None:
    dispatch = {"ratio_to_xargs": [0.4, 0.5, 0.6]}
    latency = {"python_s": [1.0, 2.0], "status_s": [4.0, 4.0], "status_json_s": [2.0, 2.0]}
    found = regressions.ratios({"dispatch": dispatch, "latency": latency, "decisions": {"exit_s": [1.0]}})
    assert sorted(found.values()) == [[0.25, 0.5], [0.4, 0.5, 0.6], [0.5, 1.0]]


def test_what_is_not_judged_is_told_with_the_reason() -> None:
    xargs, hyperqueue, spooler = (ratio.what for ratio in regressions.RATIOS[:3])
    dispatch = {"ratio_to_xargs": STEADY, "ratio_to_hyperqueue": STEADY[:2], "ratio_to_renamed": STEADY}
    reference = {hyperqueue: STEADY, spooler: STEADY, "of old": STEADY}
    told = regressions.not_judged(reference, {"dispatch": dispatch})
    assert {what: why.split(":")[0] for what, why in told.items()} == {
        xargs: "no reference",
        hyperqueue: "fewer than 3 pairs",
        spooler: "no samples",
        "of old": "the reference has it, and no program",
    }
    judged = regressions.verdicts(reference, regressions.ratios({"dispatch": dispatch}))
    assert not judged
    assert regressions.not_judged({xargs: STEADY}, {}) == {}  # no program of it was run


def test_a_reference_keeps_what_is_not_measured_anew(tmp_path: Path) -> None:
    file = regressions.reference_of(ABOUT, tmp_path)
    assert file.name == "reference-2x-some-cpu.json"
    regressions.store({"dispatch": {"ratio_to_xargs": [0.4], "ratio_to_hyperqueue": [0.9]}}, ABOUT, file)
    later = {**ABOUT, "commit": "def"}
    regressions.store({"dispatch": {"ratio_to_xargs": [0.5]}}, later, file)
    assert list(regressions.stored(file).values()) == [[0.5], [0.9]]
    assert [one["commit"] for one in json.loads(file.read_text())["ratios"].values()] == ["def", "abc"]


@pytest.mark.parametrize("wrong", [{"dirty": True}, {"commit": None}, {"load_before": 3.0}])
def test_no_reference_of_a_dirty_tree_or_a_busy_machine(wrong: dict[str, Any]) -> None:
    assert regressions.why_no_reference(ABOUT) == ""
    assert regressions.why_no_reference({**ABOUT, **wrong})


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`run_all.py --check` with one program, of which `measured` are the ratios; the reference's file."""
    monkeypatch.setattr(run_all, "machine", lambda: {**ABOUT, "date": "2026-01-01"})
    monkeypatch.setattr(run_all, "headline", lambda about: "")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--check", "--only", "dispatch"])
    (tmp_path / "results").mkdir()
    return regressions.reference_of(ABOUT, tmp_path / "results")


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.8, 1)])
def test_a_lost_ratio_is_exit_code_1(
    checked: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    code: int,
) -> None:
    regressions.store({"dispatch": {"ratio_to_xargs": STEADY}}, ABOUT, checked)
    now = {"ratio_to_xargs": [factor * ratio for ratio in STEADY]}
    monkeypatch.setattr(run_all, "_run", lambda name, *words, quick: {"results": now, "rows": []})
    assert run_all.main() == code
    table = capsys.readouterr().out
    assert table.count("not judged: no samples") == 2 and "rate over HyperQueue's" in table


def test_without_a_reference_nothing_is_run(checked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "_run", lambda *words, **more: pytest.fail("it was run"))
    assert run_all.main() == 2
    assert not checked.exists()
