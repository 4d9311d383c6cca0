"""`profile pack` with a worker that is made up: what is asked of it, kept, shown, and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcsched.cli.profile.group import profile
from hpcsched.cli.profile.packing import packs_table, pairs_table
from hpcsched.core.profile import Profile
from hpcsched.errors import HpcschedError
from hpcsched.launch.base import LaunchPlan
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.profiling.packing_results import MeasuredPacks, PackPoint, Pair
from hpcsched.store.database import Database
from hpcsched.store.profiles import RateSample, load_profiles
from hpcsched.testing.launch import FakeLauncher, FakeWorkers

JOBS = """
schema = 1
[[job]]
name = "a"
model = "small"
trainer = "mine:Mine"
args = { width = 16, sizes = [1, 2] }
steps = 500
[[job]]
name = "a-too"
model = "small"
trainer = "mine:Mine"
args = { width = 16, lr = 0.1 }
strategy = "burst"
[[job]]
name = "b"
model = "large"
trainer = "mine:Mine"
args = { width = 64 }
[[job]]
name = "script"
command = ["true"]
"""


def pack_of(members: list[int], sample_s: float, **changed: Any) -> dict[str, Any]:
    """What the probe tells of a pack."""
    told = {"members": members, "sample_s": [sample_s] * 3, "mode": "stacked/2", "memory_mib": None}
    return {**told, "join_s": 0.2, "leave_s": 0.05, "stackable": True, "unstackable": None, **changed}


def found(packs: list[list[int]], **changed: Any) -> dict[str, Any]:
    """What the probe tells: 1 ms a sample alone, 0.6 ms of each in a pack of several, batches of 10."""
    jobs = max(max(pack) for pack in packs) + 1
    told: dict[str, Any] = {
        "batches": [10] * jobs,
        "alone_s": [[0.001, 0.001, 0.009]] * jobs,
        "input_s": [[0.0002]] * jobs,
        "load_s": [0.3, 0.1, 0.1],
        "packs": [pack_of(pack, 0.0006 * len(pack) if len(pack) > 1 else 0.00099) for pack in packs],
        "full": None,
        "about": "torch 2",
    }
    return {**told, **changed}


class Probes(FakeLauncher):
    """Each launch is answered by `answer(request)`: what the probe finds, says, and ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda asked: found(asked["packs"])
        self.code: int | None = 0
        self.writes = ""
        self.lines: list[dict[str, Any]] = []

    def launch(self, plan: LaunchPlan) -> FakeWorkers:
        request = json.loads(plan.env["HPCSCHED_PACKS"])
        self.requests.append(request)
        workers = super().launch(plan)
        answer = self.answer(request)
        if answer is not None:
            Path(request["result"]).write_text(json.dumps(answer))
        plan.output.write_text(self.writes)
        for line in self.lines:
            workers.say(json.dumps(line) + "\n")
        if self.code is not None:
            workers.end(0, self.code)
        return workers


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probes:
    probes = Probes()
    monkeypatch.setattr("hpcsched.launch.local.LocalLauncher", lambda **how: probes)
    monkeypatch.setenv("HPCSCHED_DATABASE", str(tmp_path / "h.db"))
    monkeypatch.setenv("HPCSCHED_DEVICES", "cpu:2")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.toml").write_text(JOBS)
    return probes


def call(*words: str) -> Result:
    return CliRunner().invoke(profile, ["pack", *words])


def refused(result: Result) -> str:
    """The line that a command that was refused ends with."""
    if isinstance(result.exception, HpcschedError):
        assert result.exception.exit_code == 2
        return str(result.exception)
    assert result.exit_code == 2
    return result.stderr


# -- numbers -------------------------------------------------------------------------------------------


def point(models: int, step_s: float, **changed: Any) -> PackPoint:
    rest: dict[str, Any] = {"mode": "loop", "memory_mib": None, "join_s": 0.1 * models, "leave_s": 0.05}
    return PackPoint(models=models, windows_s=(step_s, step_s, 9 * step_s), **{**rest, **changed})


def measured(*points: PackPoint, **changed: Any) -> MeasuredPacks:
    rest: dict[str, Any] = {"model": "small", "device": "cpu", "batch": 10, "alone_s": (0.01,)}
    return MeasuredPacks(
        **{**rest, "input_s": (0.002,), "points": points, "loads_s": (0.3, 0.1, 0.1), **changed}
    )


def test_improvement_is_that_of_the_papers_equation_3() -> None:
    one = measured(point(1, 0.01), point(2, 0.015), point(4, 0.05))
    assert [one.impv(p) for p in one.points] == pytest.approx([0, 0.25, -0.25])


def test_switching_is_by_member_and_of_packs_of_several() -> None:
    one = measured(point(1, 0.01, join_s=9.0, leave_s=9.0), point(2, 0.01, join_s=0.4), point(4, 0.01))
    assert (one.load_s, one.join_s, one.leave_s) == pytest.approx((0.1, 0.15, 0.05))
    assert measured(point(1, 0.01)).join_s == pytest.approx(0.1)
    assert measured().join_s is None
    assert one.costs.switch_s == pytest.approx(0.1)


def test_costs_are_those_that_plans_are_made_with() -> None:
    costs = measured(
        point(2, 0.012, memory_mib=300.0), point(4, 0.015, mode="stacked/4"), stackable=True
    ).costs
    assert (costs.separate_s, costs.shared_s, costs.stackable) == (0.01, 0.002, True)
    assert costs.points == {2: 0.012, 4: 0.015}
    assert costs.memory_mib == {2: 300.0}


def test_a_known_profile_keeps_all_but_its_packs() -> None:
    old = Profile(
        model="small",
        device="cpu",
        throughput={1: 5.0, 2: 8.0},
        global_batch=10,
        start_s=3.0,
        packed_s={8: 1.0},
        packed_mib={8: 100.0},
        source="learned",
        note="old",
    )
    got = measured(point(2, 0.015)).profile([old])
    assert got == replace(old, packed_s={1: 0.01, 2: 0.015}, packed_mib=None)
    unknown = replace(old, global_batch=None)
    assert measured(point(2, 0.015)).profile([unknown, old]).global_batch == 10
    assert measured(point(2, 0.015)).profile([unknown]).global_batch is None


def test_a_model_without_a_profile_for_the_batch_and_device_gets_one() -> None:
    others = [
        Profile(model="small", device="cpu", throughput={1: 5.0}, global_batch=99),
        Profile(model="small", device="gpu", throughput={1: 5.0}, global_batch=10),
        Profile(model="small", device="cpu", throughput={1: 5.0}, global_batch=10, nodes=2),
    ]
    got = measured(point(1, 0.011), point(2, 0.015, memory_mib=7.0), note="how").profile(others)
    assert got.throughput == {1: 100.0}
    assert (got.global_batch, got.source, got.unit, got.note) == (10, "measured", "step", "how")
    assert (got.packed_s, got.packed_mib) == ({1: 0.011, 2: 0.015}, {2: 7.0})


def test_a_pair_that_takes_what_its_costs_say_has_the_factor_1() -> None:
    one = measured(point(2, 0.018), model="one")
    other = measured(point(2, 0.05), model="other", batch=20, alone_s=(0.03,))
    alone_s = 0.01 / 10 + 0.03 / 20
    packed_s = alone_s - 0.002 / 20  # what is shared is paid once, at the larger of both rates
    pair = Pair(
        models=("one", "other"),
        batches=(10, 20),
        device="cpu",
        separate_s=3 * alone_s,  # the machine was slower just then
        packed_s=3 * packed_s,
        mode="loop",
        memory_mib=None,
    )
    assert pair.factor(one, other) == pytest.approx(1)
    assert pair.impv == pytest.approx(1 - packed_s / alone_s)


# -- text ----------------------------------------------------------------------------------------------


def test_a_table_has_a_line_for_each_number_of_models() -> None:
    points = (
        point(1, 0.0102),
        point(2, 0.015, mode="stacked/2", memory_mib=1234.5),
        point(4, 0.05, mode="turns", memory_mib=2000),
    )
    shown = packs_table(measured(*points, full=8, unstackable="the models draw random numbers, each its own"))
    assert shown == (
        "small on one cpu, batch 10: 10.000 ms a step alone\n"
        "MODELS  STEP(ms)  IMPV  MODE       MEMORY(MiB)  JOIN(s)\n"
        "     1    10.200   -2%  loop                 -     0.10\n"
        "     2    15.000   25%  stacked/2         1234     0.20\n"
        "     4    50.000  -25%  turns             2000     0.40\n"
        "a member takes 0.100 s to load, 0.100 s to join, 0.050 s to leave\n"
        "cannot be computed as one: the models draw random numbers, each its own\n"
        "8 models or more do not fit into memory\n"
    )


def test_memory_that_is_not_known_has_no_column() -> None:
    assert packs_table(measured(point(1, 0.0102))).splitlines()[1] == "MODELS  STEP(ms)  IMPV  MODE  JOIN(s)"


def test_a_table_of_pairs_has_times_of_a_sample() -> None:
    pair = Pair(
        models=("a", "bb"),
        batches=(32, 64),
        device="cpu",
        separate_s=0.0002,
        packed_s=0.00015,
        mode="loop",
        memory_mib=None,
    )
    assert pairs_table([pair]) == (
        "a sample of both:\n"
        "PAIR    BATCHES  SEPARATE(us)  PACKED(us)  IMPV  MODE\n"
        "a + bb   32, 64       200.000     150.000   25%  loop"
    )


# -- the command ---------------------------------------------------------------------------------------


def test_each_model_is_measured_once_and_kept(probes: Probes, tmp_path: Path) -> None:
    probes.lines = [
        {},
        {"job": 0, "alone_s": 0.01},
        {"members": [0, 0], "step_s": 0.012, "mode": "stacked/2"},
        {"members": "x"},
    ]
    done = call("jobs.toml", "--counts", "2,1", "--seconds", "3", "-o", "out.json")
    assert done.exit_code == 0, done.stderr
    assert [request["jobs"] for request in probes.requests] == [
        [{"trainer": "mine:Mine", "args": {"width": 16, "sizes": [1, 2]}}],
        [{"trainer": "mine:Mine", "args": {"width": 64}}],
    ]
    assert [(r["packs"], r["seconds"], r["mode"]) for r in probes.requests] == [
        ([[0], [0, 0]], 3.0, "auto")
    ] * 2
    (plan, workers), _ = probes.launched
    assert plan.module == "hpcsched.worker.packing.probe"
    assert (len(plan.devices), plan.arena, workers.closed) == (1, False, True)
    assert done.stderr.splitlines() == [
        "note: job a-too has other args than job a, but the same model 'small': they count as one, and a is"
        " measured",
        "small: 10.000 ms a step alone",
        "small: 2 in a pack, 12.000 ms a step (stacked/2)",
        "large: 10.000 ms a step alone",
        "large: 2 in a pack, 12.000 ms a step (stacked/2)",
        f"kept in {tmp_path / 'h.db'} and in out.json",
    ]
    lines = done.stdout.splitlines()
    assert lines[0] == "small on one cpu, batch 10: 10.000 ms a step alone"
    assert [line.split()[:3] for line in lines[2:4]] == [["1", "9.900", "1%"], ["2", "12.000", "40%"]]
    with Database(tmp_path / "h.db") as db:
        (small,) = db.profiles("small")
        assert sorted(one.model for one in db.profiles()) == ["large", "small"]
    assert load_profiles("out.json")[0] == small
    assert small.packed_s == pytest.approx({1: 0.0099, 2: 0.012})
    assert re.fullmatch(r"measured by hpcsched \S+ on \S+ at \S+Z: mine:Mine; torch 2, .*", small.note)
    assert not list(tmp_path.glob("hpcsched-packs-*"))


def test_json_has_points_and_pairs(probes: Probes) -> None:
    done = call("jobs.toml", "--counts", "1,2", "--pairs", "--json", "--costs", "c.json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == 1
    small, _ = told["packs"]
    assert (small["model"], small["device"], small["global_batch"]) == ("small", "cpu", 10)
    assert small["separate_s"] == pytest.approx(0.01)
    assert [(p["models"], p["mode"], p["memory_mib"]) for p in small["points"]] == [
        (1, "stacked/2", None),
        (2, "stacked/2", None),
    ]
    for p in small["points"]:
        sequential_s = p["models"] * small["separate_s"]
        assert p["impv"] == pytest.approx((sequential_s - p["step_s"]) / sequential_s)
    assert (small["load_s"], small["join_s"], small["leave_s"]) == (0.1, 0.1, 0.05)
    assert probes.requests[-1]["packs"] == [[0, 1]]
    (pair,) = told["pairs"]
    assert (pair["models"], pair["batches"], pair["impv"]) == (
        ["small", "large"],
        [10, 10],
        pytest.approx(0.4),
    )


def test_the_costs_are_a_problem_to_plan(probes: Probes) -> None:
    assert call("jobs.toml", "--counts", "2", "--pairs", "--costs", "c.json").exit_code == 0
    problem = PackProblem.parse(json.loads(Path("c.json").read_text()), where="c.json")
    assert [(m.name, m.batch, m.steps) for m in problem.members] == [
        ("a", 10, 500),
        ("a-too", 10, None),
        ("b", 10, None),
    ]
    assert problem.members[0].config == {"width": 16}
    (factor,) = problem.speeds.factors.values()
    assert factor == pytest.approx(0.0012 / 0.0018)  # 0.2 of 2 ms are shared


def test_a_known_profile_keeps_its_samples(probes: Probes, tmp_path: Path) -> None:
    old = Profile(model="small", device="cpu", throughput={1: 5.0, 2: 8.0}, global_batch=10)
    sample = RateSample(gpus=1, rate=5.0, seconds=1.0, at="2026-01-01T00:00:00Z")
    with Database(tmp_path / "h.db") as db:
        db.record_profile(old, [sample], at=datetime(2026, 1, 1, tzinfo=UTC))
    assert call("jobs.toml", "--job", "a", "--counts", "2").exit_code == 0
    with Database(tmp_path / "h.db") as db:
        (new,) = db.profiles("small")
        assert new.throughput == {1: 5.0, 2: 8.0}
        assert new.packed_s == pytest.approx({1: 0.01, 2: 0.012})
        assert db.samples(new) == (sample,)


def test_show_has_a_line_of_packs(probes: Probes) -> None:
    assert call("jobs.toml", "--job", "a", "--counts", "1,2").exit_code == 0
    shown = CliRunner().invoke(profile, ["show", "small"]).stdout
    assert "\npacked on one device: 1 in 9.9 ms a step, 2 in 12 ms a step\n" in shown


def test_too_little_memory_ends_the_list_with_a_line(probes: Probes) -> None:
    probes.answer = lambda asked: found(asked["packs"][:2], full=[0] * 4)
    done = call("jobs.toml", "--job", "a", "--counts", "1,2,4,8")
    assert done.exit_code == 0
    assert "small: 4 of it do not fit into the memory of one cpu\n" in done.stderr
    assert "4 models or more do not fit into memory\n" in done.stdout


def test_a_pair_that_does_not_fit_is_left_out_with_a_line(probes: Probes) -> None:
    probes.answer = lambda asked: {
        **found(asked["packs"]),
        **({"packs": [], "full": [0, 1]} if len(asked["jobs"]) == 2 else {}),
    }
    done = call("jobs.toml", "--pairs", "--json")
    assert done.exit_code == 0
    assert "small and large do not fit into the memory of one cpu together\n" in done.stderr
    assert json.loads(done.stdout)["pairs"] == []


def test_what_was_measured_before_the_kernel_killed_it_is_kept(probes: Probes) -> None:
    probes.answer, probes.code = lambda asked: found(asked["packs"][:2]), 137
    done = call("jobs.toml", "--job", "a", "--counts", "1,2,4")
    assert done.exit_code == 0, done.stderr
    assert "small: ended with signal 9 (SIGKILL) after packs of 2; larger ones are missing\n" in done.stderr


def test_a_refusal_of_the_probe_is_one_line(probes: Probes, tmp_path: Path) -> None:
    probes.answer, probes.code = lambda asked: None, 2
    probes.writes = "chatter\nhpcsched: Digits: kind: 'x'; accepted: 'mlp' or 'cnn'\n"
    assert refused(call("jobs.toml")) == "small: Digits: kind: 'x'; accepted: 'mlp' or 'cnn'"
    assert not list(tmp_path.glob("hpcsched-packs-*"))


def test_a_crash_is_told_with_the_last_line_and_where_the_output_is(probes: Probes, tmp_path: Path) -> None:
    probes.answer, probes.code = lambda asked: found(asked["packs"]), 1
    probes.writes = "Traceback\nZeroDivisionError: my own mistake\n"
    text = refused(call("jobs.toml"))
    (output,) = tmp_path.glob("hpcsched-packs-*/packs.out")
    ends = f"{output} ends: ZeroDivisionError: my own mistake"
    assert text == f"small: it ended with exit code 1; {ends}"
    with Database(tmp_path / "h.db") as db:
        assert db.profiles() == ()


def test_a_probe_that_says_nothing_is_ended_at_the_deadline(probes: Probes) -> None:
    probes.code = None
    text = refused(call("jobs.toml", "--timeout", "0.05"))
    assert text == "small: it made no step in 0.05 s; a longer --timeout may help; it wrote no output"
    assert probes.launched[0][1].reap() is not None


def test_a_dry_run_says_what_would_be_launched(probes: Probes, tmp_path: Path) -> None:
    done = call("jobs.toml", "--dry-run", "--pairs", "--counts", "1,2", "--seconds", "4")
    assert [line.partition(": python ")[0] for line in done.stdout.splitlines()] == [
        "small on one cpu: alone, then packs of 1, 2, at least 13 s",
        "large on one cpu: alone, then packs of 1, 2, at least 13 s",
        "small and large on one cpu: alone, then packs of 2, at least 14 s",
    ]
    trials = json.loads(call("jobs.toml", "--dry-run", "--json").stdout)["trials"]
    assert [trial["models"] for trial in trials] == [["small"], ["large"]]
    assert probes.launched == []
    assert not (tmp_path / "h.db").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["none.toml"], "none.toml: "),
        (["commands.toml"], "commands.toml: no job with a trainer; accepted: at least one with trainer ="),
        (["jobs.toml", "--job", "c"], "jobs.toml: no job 'c'; accepted: a, a-too, b, script"),
        (["jobs.toml", "--job", "script"], "jobs.toml: job script: command; accepted: a job with a trainer"),
        (["jobs.toml", "--counts", "0,1"], "--counts: '0,1'; accepted: models from 1 to"),
        (["jobs.toml", "--counts", ""], "--counts: ''; accepted"),
        (["jobs.toml", "--counts", "-2"], "--counts: '-2'; accepted"),
        (["jobs.toml", "--job", "a", "--pairs"], "only the model 'small'; accepted: jobs with two different"),
        (["jobs.toml", "--devices", "replay:2"], "--devices: replay:2; accepted: cuda or cpu:N"),
        (["jobs.toml", "--devices", "tpu"], "--devices: 'tpu'"),
        (["jobs.toml", "-o", "none/out.json"], "-o: none/out.json: no such place"),
        (["jobs.toml", "--costs", "."], "--costs: .: a folder"),
    ],
)
def test_what_makes_no_sense_is_one_line(probes: Probes, tmp_path: Path, words: list[str], text: str) -> None:
    Path("commands.toml").write_text('schema = 1\n[[job]]\nname = "x"\ncommand = ["true"]\n')
    said = refused(call(*words))
    assert text in said
    assert "\n" not in said
    assert probes.launched == []


def test_a_pair_is_trained_by_one_process_in_one_folder(probes: Probes) -> None:
    Path("jobs.toml").write_text(JOBS.replace('name = "b"', 'name = "b"\nworkdir = "elsewhere"'))
    assert "jobs with different `workdir`s" in refused(call("jobs.toml", "--pairs"))
