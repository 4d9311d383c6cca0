"""Real runs under faults: a few schedules that are always the same, and as many as fit into some minutes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from tests.chaos.planted import Fault
from tests.chaos.real import __main__ as real
from tests.chaos.real.campaign import Row, play, unplayed
from tests.chaos.real.checks import after_cancel
from tests.chaos.real.ledgers import Line, lost, lost_by_trainer, surely_whole
from tests.chaos.real.lives import wrongly_ended
from tests.chaos.real.planted import BUGS
from tests.chaos.real.schedule import FLAVOURS, Schedule, drawn
from tests.chaos.real.shim import READ, RENAME, ROOM, Rule, Shim, library
from tests.chaos.real.weights import ROOT, mark
from tests.chaos.real.world import Answer


@pytest.mark.parametrize("seed", [19, pytest.param(33, marks=pytest.mark.slow)])
def test_agents_are_killed_and_the_run_comes_to_its_end(seed: int) -> None:
    schedule = drawn(seed, "programs")
    assert any(fault.kind == "kill agent" for fault in schedule.faults)
    assert play(seed, "programs") == [], str(schedule)


def test_a_seed_is_a_schedule() -> None:
    for flavour in FLAVOURS:
        one, other = drawn(7, flavour), drawn(7, flavour)
        assert str(one) == str(other) and one.flavour == flavour
        assert unplayed(one).violations == []
        assert all(
            len(smaller.faults) + len(smaller.jobs) < len(one.faults) + len(one.jobs)
            for smaller in one.smaller()
        )


def test_who_has_not_begun_has_lost_nothing_and_hides_nothing() -> None:
    lines = [Line("a", 1, 10, "begin", 0, 1.0), Line("a", 1, 10, "saved", 30, 2.0)]
    lines += [Line("a", 1, 10, "step", 40, 2.5), Line("b", 2, 11, "fail", 116, 3.0)]
    lines += [Line("c", 3, 12, "begin", 30, 4.0), Line("c", 3, 12, "saved", 40, 5.0)]
    assert lost(lines) == (9, 10)


@pytest.mark.parametrize(
    ("rest", "whole"),
    [
        ([("left", 40, 2.1)], True),
        ([("step", 41, 2.1)], False),
        ([("step", 41, 2.1), ("step", 99, 7.0)], True),
    ],
)
def test_a_file_is_whole_if_it_is_old_or_its_program_has_left_by_itself(
    rest: list[tuple[str, int, float]], whole: bool
) -> None:
    saved = [Line("a", 1, 10, "begin", 0, 1.0), Line("a", 1, 10, "saved", 40, 2.0)]
    assert surely_whole([*saved, *(Line("a", 1, 10, what, step, at) for what, step, at in rest)]) == whole


def _trained(word: str, *steps: int, at: float = 0.0) -> list[Line]:
    """The lines of a trainer, a tenth of a second each."""
    return [Line(word, 0, 1, "step" if i else "begin", step, at + 0.1 * i) for i, step in enumerate(steps)]


def test_a_trainer_has_lost_what_it_does_again() -> None:
    for lines, least, most, by_the_last in (
        ([*_trained("a", 0, 1, 2), *_trained("b", 3, 4)], 0, 0, 2),
        ([*_trained("a", 0, 1, 2, 3), *_trained("b", 1, 2)], 2, 3, 2),
        ([*_trained("a", 0, 2, 4), *_trained("b", 0, 2, 4, 6)], 4, 6, 8),
    ):
        assert lost_by_trainer(lines, completed=True) == (least, most)
        assert lost_by_trainer(lines, completed=False) == (least, most + by_the_last)


ENDED = Answer(("cancel", "a"), 0, "job 1 (a): is told to end", began=9.5, ended=10.0)
WORKS = [Line("a", 1, 10, "begin", 0, 8.0), Line("a", 1, 10, "step", 40, 9.9)]


@pytest.mark.parametrize(
    ("state", "later", "within_s", "said"),
    [
        ("CANCELLED", [], 4.0, []),
        ("FAILED", [], 4.0, []),
        ("COMPLETED", [Line("a", 1, 10, "done", 50, 10.4)], 4.0, []),
        ("COMPLETED", [Line("a", 1, 10, "done", 50, 16.0)], inf, []),
        (
            "COMPLETED",
            [Line("a", 1, 10, "done", 50, 16.0)],
            4.0,
            ["it has come to its end 6.0 s after its cancel"],
        ),
        ("COMPLETED", [], 4.0, ["it is COMPLETED, and its cancel"]),
        ("RUNNING", [], 4.0, ["it is RUNNING, and its cancel"]),
        ("CANCELLED", [Line("b", 2, 11, "begin", 0, 12.0)], inf, ["it began 2.0 s after its cancel"]),
    ],
)
def test_what_is_cancelled_is_over(state: str, later: list[Line], within_s: float, said: list[str]) -> None:
    assert [*after_cancel(state, [*WORKS, *later], ENDED, within_s=within_s)] == said


def test_a_process_that_was_loading_may_begin_once() -> None:
    lines = [Line("a", 1, 10, "begin", 0, 11.0), Line("b", 2, 11, "begin", 0, 12.0)]
    assert [*after_cancel("CANCELLED", lines, ENDED, within_s=4.0)] == ["it began 2.0 s after its cancel"]


def test_a_trainer_that_is_cancelled_may_just_have_ended() -> None:
    lines = _trained("a", *range(60), at=4.0)
    assert not [*after_cancel("COMPLETED", lines, ENDED, within_s=4.0, last=59)]
    assert [*after_cancel("COMPLETED", lines[:-5], ENDED, within_s=4.0, last=59)]


GOOD, BAD = ("COMPLETED", "CANCELLED"), ("COMPLETED", "OUT_OF_MEMORY")


@pytest.mark.parametrize(
    ("code", "states", "may_stop", "moved", "right"),
    [
        (0, GOOD, False, False, True),
        (0, BAD, True, False, False),
        (0, None, True, False, False),
        (1, BAD, False, False, True),
        (1, GOOD, True, False, False),
        (1, None, True, False, True),
        (1, None, False, False, False),
        (75, None, True, False, True),
        (75, None, False, True, True),
        (75, None, False, False, False),
        (75, GOOD, True, False, False),
        (2, GOOD, True, True, False),
        (-11, None, True, True, False),
    ],
)
def test_exit_codes_say_what_became_of_a_run(
    code: int, states: tuple[str, ...] | None, may_stop: bool, moved: bool, right: bool
) -> None:
    assert (wrongly_ended(code, states, may_stop=may_stop, moved=moved) == "") is right


def test_what_was_violated_at_a_commit_stays(tmp_path: Path) -> None:
    def said(seed: int) -> list[list[str]]:
        rows = json.loads((tmp_path / "rows.json").read_text())["schedules"]
        return [row["violations"] for row in rows if row["seed"] == seed]

    good, bad = unplayed(drawn(7)), unplayed(drawn(7), "a job is lost")
    for row, wanted in ((good, []), (bad, bad.violations), (good, bad.violations)):
        real.add(tmp_path / "rows.json", row)
        assert said(7) == [wanted]
    good.commit = "another"
    real.add(tmp_path / "rows.json", good)
    assert said(7) == [[]]


def test_a_campaign_that_has_played_nothing_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(schedule: Schedule) -> Row:
        row = unplayed(schedule)
        row.skipped = "no namespaces"
        return row

    for name in ("undisturbed", "library"):
        monkeypatch.setattr(real, name, dict)
    assert real.main(["--most", "0"]) == 1
    monkeypatch.setattr(real, "played", unplayed)
    assert real.main(["--most", "2"]) == 0
    monkeypatch.setattr(real, "played", played)
    assert real.main(["--most", "2"]) == 1


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
def test_a_disk_rule_that_nobody_meets_has_struck_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shim = Shim(tmp_path / "control", run)
    env = {**os.environ, **shim.environment()}
    for calls, strikes in ((RENAME, False), (RENAME | ROOM, True), (READ, True)):
        before = shim.struck
        shim.rules(Rule(calls, error=errno.EIO))
        words = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            "import os, sys; os.statvfs(sys.argv[1]); os.stat(sys.argv[1])",
        ]
        subprocess.run([*words, str(run)], env=env, stderr=subprocess.DEVNULL, check=False)
        assert (shim.struck > before) is strikes
    shim.close()


def test_weights_are_trained_anew_where_what_trains_has_changed(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    before = mark(tmp_path)
    (tmp_path / "worker" / "sgd.py").write_text("lr = 0.1")
    assert mark(tmp_path) != before


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bugs_to_plant_are_in_the_code_as_it_is(bug: Fault) -> None:
    assert bug.planted((ROOT / "hpcsched" / bug.file).read_text())


@pytest.mark.slow
def test_as_many_as_fit_into_five_minutes(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--part"):
        pytest.skip("real runs differ each time, and a part is always the same")
    assert real.main(["--seconds", "300", "--first", "5000"]) == 0
