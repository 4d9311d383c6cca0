"""`hpcsched simulate`: job files, traces and runs under several policies, on one screen."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.cli import simulate as module
from hpcsched.cli.main import cli
from hpcsched.cli.results import Bounds, result_of, simulated
from hpcsched.core import events as ev
from hpcsched.core.model import Device, JobSpec, JobState, Kind, Progress
from hpcsched.errors import HpcschedError
from hpcsched.policy import POLICIES
from hpcsched.sim.engine import Simulation
from hpcsched.sim.whatif import CANCELLED, FAILED, UNKNOWN, WAITING, past_of, place_of
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir, RunRecord
from hpcsched.testing.builders import Driver, a_job, a_profile, some_devices
from hpcsched.testing.simulation import Rehearsal, Scene

PROFILES = (
    a_profile("a", [10.0, 18.0, 24.0], start_s=5.0, suspend_s=3.0, resume_s=4.0),
    a_profile("b", [5.0, 9.5, 14.0, 18.0], start_s=2.0, suspend_s=8.0, resume_s=6.0),
)
JOBS = (
    a_job("one", "a", 3000),
    a_job("two", "b", 4000),
    a_job("three", "a", 900, submit_at=40.0),
    a_job("four", "b", 1500, after=("one",)),
)
CHOSEN = ("exclusive", "marble", "planner")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, without the caller's settings; profiles in p.json."""
    monkeypatch.chdir(tmp_path)
    for name in ("DIR", "CONFIG", "GPUS", "NODES", "POLICY", "POLICY_OPTION", "PROFILES", "DEVICE_TYPE"):
        monkeypatch.delenv(f"HPCSCHED_{name}", raising=False)
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setenv("HPCSCHED_DATABASE", str(tmp_path / "none.sqlite"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    keys = ("model", "device", "throughput", "start_s", "suspend_s", "resume_s")
    tables = [{key: getattr(profile, key) for key in keys} for profile in PROFILES]
    (tmp_path / "p.json").write_text(json.dumps({"schema": 1, "profiles": tables}))
    write_set(JOBS)
    return tmp_path


def write_set(jobs: Sequence[JobSpec], path: str = "jobs.toml", head: str = "") -> None:
    lines = ["schema = 1", head]
    for job in jobs:
        lines += ["[[job]]", f'name = "{job.name}"', f'model = "{job.model}"', "replay = true"]
        lines += [f"steps = {job.steps}", f"after = {json.dumps(job.after)}", f"submit_at = {job.submit_at}"]
    Path(path).write_text("\n".join(lines))


def call(*words: object) -> click.testing.Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, words)])


def shown(*words: object) -> str:
    done = call(*words)
    assert done.exit_code == 0, done.exception
    return done.stdout


def page(*words: object) -> list[dict[str, Any]]:
    read = json.loads(shown(*words, "--json"))
    return read.get("results", [read])


def refused(*words: object, code: int = 2) -> str:
    done = call(*words)
    if isinstance(done.exception, HpcschedError):
        assert done.exception.exit_code == code, done.exception
        assert "\n" not in str(done.exception)
        return str(done.exception)
    assert done.exit_code == code, done.exception
    return done.stderr


def measures(text: str) -> dict[str, list[str]]:
    """The cells of each line of a comparison, by the line's label."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        label, *cells = re.split(r"  +", line.strip())
        rows.setdefault(label, cells)
    return rows


SET = ("jobs.toml", "--gpus", 4, "--profiles", "p.json")


# --- job files --------------------------------------------------------------------------------


def test_three_policies_on_one_screen() -> None:
    text = shown(*SET, "--policy", ",".join(CHOSEN))
    lines = text.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert lines[0] == "jobs.toml: 4 jobs on 4 GPUs"
    for number, name in enumerate(("one", "two", "three", "four"), 1):
        assert any(line.split()[:2] == [str(number), name] for line in lines)
    rows = measures(text)
    results = page(*SET, "--policy", ",".join(CHOSEN))
    first, *others = (result["makespan_s"] for result in results)
    told = [f"{first:.1f}"]
    for other in others:
        told += [f"{other:.1f}", f"{100 * (other / first - 1):+.1f}%"]
    assert rows["makespan(s)"] == told
    assert rows["lower bound(s)"] == [f"{results[0]['lower_bound_s']:.1f}"] * 3
    assert {"mean JCT(s)", "p95 JCT(s)", "mean wait(s)", "utilisation(%)", "GPU-hours", "switches"} <= set(
        rows
    )


def test_the_bounds_are_below_every_policy_and_the_gaps_say_by_how_much() -> None:
    for result in page(*SET, "--policy", ",".join(POLICIES)):
        assert 0 < result["lower_bound_s"] <= result["makespan_s"]
        assert 0 < result["mean_jct_bound_s"] <= result["mean_jct_s"]
        assert result["gap"] == pytest.approx(result["makespan_s"] / result["lower_bound_s"] - 1)
        assert result["jct_gap"] == pytest.approx(result["mean_jct_s"] / result["mean_jct_bound_s"] - 1)


def test_with_too_many_jobs_for_the_screen_only_the_measures_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_set([a_job(f"j{i}", "a", 100 + i) for i in range(12)])
    words = (*SET, "--policy", "exclusive,marble")
    text = shown(*words)
    assert text.splitlines()[0] == "jobs.toml: 12 jobs on 4 GPUs (--jobs lists them)"
    assert "j11" not in text and len(text.splitlines()) < 24
    monkeypatch.setattr(module, "_PLAIN_HEIGHT", 40)
    assert "j11" in shown(*words) and "(--jobs" not in shown(*words)


def test_a_list_of_jobs_of_each_policy_comes_before_the_comparison() -> None:
    text = shown(*SET, "--policy", "exclusive,marble", "--jobs")
    assert text.count("JOBID") == 2
    places = [text.index(what) for what in ("exclusive on 4 GPUs", "marble on 4 GPUs", "4 jobs on 4 GPUs")]
    assert places == sorted(places) and "makespan(s)" in text[places[-1] :]


def test_one_policy_has_its_list_of_jobs_however_many_there_are() -> None:
    write_set([a_job(f"j{i}", "a", 100) for i in range(60)])
    lines = shown(*SET).splitlines()
    assert lines[0].startswith("marble on 4 GPUs: makespan") and lines[1].startswith("JOBID")
    assert len(lines) == 2 + 60 + 1


def test_options_go_to_the_policies_that_know_them_and_the_files_to_its_own() -> None:
    write_set(JOBS, head='[policy]\nname = "marble"\npromote = "never"')
    never, always = (
        page(*SET),
        page(*SET, "--policy", "exclusive,marble", "--policy-option", "promote=always"),
    )
    assert never[0]["switches"] == 0 and never[0]["policy"] == "marble"
    assert [result["policy"] for result in always] == ["exclusive", "marble"]
    assert always[1]["switches"] > 0
    said = refused(*SET, "--policy", "exclusive,marble", "--policy-option", "promte=never")
    assert "marble.promte: unknown option; accepted: promote" in said
    assert "exclusive" in refused(*SET, "--policy", "exclusive", "--policy-option", "promote=never")


def test_options_in_the_settings_count_as_they_do_in_a_run(place: Path) -> None:
    (place / "site.toml").write_text('policy_option = { promote = "never" }\n')
    assert page(*SET)[0]["switches"] == 0
    assert page(*SET, "--policy-option", "promote=always")[0]["switches"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no jobs; accepted: one of JOBS.toml, --trace F.csv and --run [DIR]"),
        (("jobs.toml", "--run", "."), "JOBS.toml and --run"),
        (("jobs.toml", "--trace", "t.csv", "--gpus", 2), "JOBS.toml and --trace"),
        (("--trace", "t.csv", "--run", "."), "--trace and --run"),
        (("jobs.toml",), "--gpus: missing"),
        (("--trace", "t.csv"), "--gpus: missing"),
        (("--trace", "missing.csv", "--gpus", 2), "missing.csv"),
        ((*SET, "--workload", "w"), "--workload"),
        ((*SET, "--policy", "marble,best"), "'best'; accepted: marble"),
        (("jobs.toml", "--gpus", 4), "no profile of 'a'"),
        ((*SET, "--gantt", "nowhere/g.svg"), "no folder nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[object, ...], says: str) -> None:
    assert says in refused(*words)


def test_charts_of_several_policies_share_a_file(place: Path) -> None:
    shown(*SET, "--policy", ",".join(CHOSEN), "--gantt", "g.svg")
    text = (place / "g.svg").read_text()
    assert all(f">{name} on 4 GPUs: makespan" in text for name in CHOSEN)
    (place / "g.svg").unlink()
    (place / "g.svg").mkdir()
    assert "--gantt: g.svg" in refused(*SET, "--gantt", "g.svg")


# --- traces -----------------------------------------------------------------------------------


def write_trace(count: int, gpus: str = "1") -> tuple[object, ...]:
    rows = [f"{10 * i},{30 + i},{gpus}" for i in range(count)]
    Path("t.csv").write_text("\n".join(["submit_s,duration_s,gpus", *rows, ""]))
    return ("--trace", "t.csv", "--gpus", 4)


def test_a_trace_of_jobs_of_fixed_size() -> None:
    words = write_trace(3)
    (result,) = page(*words)
    assert [(job["start_s"], job["end_s"]) for job in result["jobs"]] == [(0, 30), (10, 41), (20, 52)]
    assert (result["mean_wait_s"], result["mean_queued_s"]) == (0, 0)
    assert shown(*words).splitlines()[1].startswith("JOBID")
    assert measures(shown(*words, "--policy", "exclusive,marble"))["makespan(s)"] == [
        "93.0",
        "52.0",
        "-44.1%",
    ]


def test_a_trace_says_how_many_lines_were_left_out_or_rounded() -> None:
    Path("t.csv").write_text("submit_s,duration_s,gpus\n0,10,5\n0,10,9\n0,10,100\n0,10,2\n")
    done = call("--trace", "t.csv", "--gpus", 4, "--nodes", 2)
    assert done.stderr == (
        "hpcsched: 2 jobs left out: more GPUs asked for than there are; "
        "1 job rounded up to the same GPU count on each host\n"
    )
    assert done.stdout.startswith("marble on 8 GPUs: makespan 20.0 s")
    assert "4 jobs, all for more" in refused(*write_trace(4, gpus="5"))


def test_the_jobs_of_a_long_trace_are_listed_only_if_wanted() -> None:
    words = write_trace(51)
    assert "JOBID" not in shown(*words)
    assert shown(*words).splitlines()[0] == "t.csv: 51 jobs on 4 GPUs (--jobs lists them)"
    assert shown(*words, "--jobs").count("\n") > 51
    assert "JOBID" in shown(*write_trace(50))


def test_elastic_jobs_of_a_trace_go_by_profiles() -> None:
    Path("t.csv").write_text("time,model,steps,workload\n0,a,3000,x\n0,b,4000,x\n7,b,100,y\n")
    common = ("--trace", "t.csv", "--gpus", 4)
    (result,) = page(*common, "--workload", "x", "--profiles", "p.json")
    assert [job["model"] for job in result["jobs"]] == ["a", "b"]
    assert "no profile of 'b'" in refused(*common, "--workload", "y")
    assert "--workload" in refused(*common)


def test_of_very_many_jobs_only_the_measures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    words = write_trace(20)
    (whole,) = page(*words)
    monkeypatch.setattr(module, "MOST_KEPT", 19)
    monkeypatch.setattr(module, "MOST_DRAWN", 19)
    (lean,) = page(*words)
    assert (lean["jobs"], lean["jobs_total"], lean["jobs_completed"]) == ([], 20, 20)
    assert {**whole, "jobs": []} == lean
    assert len(page(*words, "--jobs")[0]["jobs"]) == 20
    assert "--gantt: 20 jobs; accepted: at most 19" in refused(*words, "--gantt", "g.svg")


# --- runs -------------------------------------------------------------------------------------


def a_run(scene: Scene, name: str = "hpcsched-run") -> RunDir:
    """A run that the simulator went through, and wrote the journal of."""
    rundir = RunDir(Path(name))
    rundir.make()
    folder = Path(f"{name}-rehearsal")
    folder.mkdir()
    Rehearsal(scene, folder)
    (folder / "whole.jsonl").rename(rundir.journal)
    return rundir


def keep(driver: Driver, name: str = "hpcsched-run") -> RunDir:
    """A run with the events of a story played by hand."""
    rundir = RunDir(Path(name))
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append(driver.events)
    journal.close()
    return rundir


SCENE = Scene(jobs=JOBS, profiles=PROFILES, gpus=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_as_it_was_is_what_a_simulation_of_its_jobs_shows(policy: str) -> None:
    a_run(replace(SCENE, policy=policy))
    was, again, other = page(
        "--run", "--policy", f"{policy},exclusive" if policy != "exclusive" else "exclusive,marble"
    )
    fresh = page(*SET, "--policy", policy)[0]
    assert (was["label"], was["policy"], again["label"]) == ("as it was", policy, "")
    assert again == fresh
    assert {**was, "label": "", "lower_bound_s": None, "jobs": []} == {
        **fresh,
        "lower_bound_s": None,
        "jobs": [],
    }
    assert was["lower_bound_s"] == fresh["lower_bound_s"]
    for before, after in zip(was["jobs"], again["jobs"], strict=True):
        assert (before["end_s"], before["attempts"]) == (after["end_s"], after["attempts"])
    assert other["makespan_s"] != was["makespan_s"]


def test_what_another_policy_would_have_done_beside_what_was() -> None:
    a_run(SCENE)
    lines = shown("--run", "--policy", "exclusive,planner").splitlines()
    assert lines[0] == f"run {Path('hpcsched-run').absolute()}: 4 jobs on 4 GPUs"
    assert lines[2].split()[2:5] == ["as", "it", "was"]
    assert len(lines) < 24 and max(map(len, lines[1:])) <= 80
    rows = measures("\n".join(lines))
    assert len(rows["makespan(s)"]) == 5 and rows["makespan(s)"][2].startswith("+")


def test_a_run_is_named_as_everywhere_and_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = a_run(SCENE, "elsewhere")
    listing = {path: path.stat().st_mtime_ns for path in [rundir.root, *rundir.root.rglob("*")]}
    results = [page("--run", "elsewhere")]
    monkeypatch.setenv("HPCSCHED_DIR", "elsewhere")
    results.append(page("--run"))
    monkeypatch.delenv("HPCSCHED_DIR")
    done = CliRunner().invoke(cli, ["--dir", "elsewhere", "simulate", "--run", "--json"])
    results.append(json.loads(done.stdout)["results"])
    assert results[0] == results[1] == results[2]
    assert [result["policy"] for result in results[0]] == ["marble", "marble"]
    assert {path: path.stat().st_mtime_ns for path in [rundir.root, *rundir.root.rglob("*")]} == listing


def test_a_run_that_is_not_there_or_has_not_begun() -> None:
    assert "no run in" in refused("--run", code=3)
    assert "no run in" in refused("--run", "nowhere", code=3)
    rundir = RunDir(Path("fresh"))
    rundir.make()
    assert "has not started" in refused("--run", "fresh", code=3)
    rundir.journal.touch()
    assert "has not started" in refused("--run", "fresh", code=3)


def test_the_runs_own_policy_and_options_are_those_that_are_simulated(place: Path) -> None:
    a_run(replace(SCENE, options={"promote": "never"}))
    (place / "site.toml").write_text('policy = "exclusive"\npolicy_option = { promote = "always" }\n')
    was, never = page("--run")
    assert was["makespan_s"] == never["makespan_s"] and never["switches"] == 0
    assert page("--run", "--policy-option", "promote=always")[1]["switches"] > 0


def test_other_gpus_than_the_run_had() -> None:
    a_run(SCENE)
    text = shown("--run", "--gpus", 3, "--nodes", 2)
    assert text.splitlines()[0].endswith("4 jobs on 2 hosts with 3 GPUs each; as it was on 4")
    assert [result["gpus"] for result in page("--run", "--gpus", 3, "--nodes", 2)] == [4, 6]
    a_run(Scene(jobs=(a_job("wide", "b", 100, gpus=4),), profiles=PROFILES, gpus=4), "other")
    assert "job wide.gpus: 4 GPUs" in refused("--run", "other", "--gpus", 3)


def test_profiles_given_by_hand_replace_those_of_the_run() -> None:
    a_run(SCENE)
    fast = {"model": "a", "device": "new", "throughput": {"1": 100.0}}
    Path("fast.json").write_text(json.dumps({"schema": 1, "profiles": [fast]}))
    was, again = page("--run", "--profiles", "fast.json")
    assert again["makespan_s"] < was["makespan_s"]


def a_mixed_run() -> Driver:
    """Every way in which a job can go."""
    command = {"kind": Kind.COMMAND, "command": ("true",)}
    driver = Driver(
        a_job("done", "a", 1000, gpus=2),
        a_job("plain", steps=None, gpus=2, **command),
        a_job("broken", "a", 100, gpus=1, retries=0),
        a_job("orphan", "a", 100, gpus=1, after=("broken",)),
        a_job("unwanted", "a", 100, gpus=1),
        a_job("late", "a", 500, gpus=1, after=("plain",)),
        a_job("endless", steps=None, gpus=1, **command),
        a_job("behind", "a", 100, gpus=1, after=("endless",)),
        a_job("further", "a", 100, gpus=1, after=("behind",)),
        a_job("seen", "new", None, gpus=(1, 2), **command),
        gpus=8,
        profiles=PROFILES[:1],
    )
    driver.runs("done", "plain", "endless", "seen")
    driver.now = 10.0
    driver.exits("broken", 1)
    driver.cancel("unwanted")
    driver.exits("unwanted", 143)
    driver.now = 30.0
    driver.exits("plain", 0)
    driver.trains("seen", rate=2.0)
    driver.exits("done", 0, 1000, 1000)
    driver.now = 80.0
    driver.exits("seen", 0, 130, 130)
    return driver


def test_what_of_a_run_can_be_simulated() -> None:
    driver = a_mixed_run()
    past = past_of(driver.machine)
    assert past.left_out == {FAILED: (3,), CANCELLED: (4, 5), UNKNOWN: (7,), WAITING: (8, 9)}
    assert (past.ids, past.rigid) == ((1, 2, 6, 10), (2,))
    jobs = {spec.name: spec for spec in past.jobs}
    assert jobs["late"].after == ("plain",) and jobs["late"].steps == 500
    assert jobs["seen"].steps == 130
    profiles = {profile.model: profile for profile in past.profiles}
    assert profiles["new"].source == "learned"
    rigid = jobs["plain"]
    assert (rigid.gpus_min, rigid.gpus_max, rigid.steps) == (2, 2, 30_000)
    assert rigid.steps / profiles[rigid.model].rate(2) == 30.0
    simulation = Simulation(past.jobs, past.profiles, gpus=8).run()
    assert simulation.jobs[2].ended_s == 30.0
    assert all(job.state is JobState.COMPLETED for job in simulation.jobs.values())


def test_a_run_that_goes_on_is_told_so_far_and_compared_between_policies() -> None:
    keep(a_mixed_run())
    done = call("--run", "--policy", "exclusive,marble")
    assert done.exit_code == 0, done.exception
    assert done.stderr == (
        "hpcsched: left out: 1 failed, 2 cancelled, 1 of unknown work, 2 waiting for one of these; "
        "1 job without steps or rate: taken as it went\n"
        "hpcsched: the run is not over: `so far` ends now, the policies go to the end\n"
    )
    rows = measures(done.stdout)
    assert rows["jobs completed"] == ["3/10", "4/4", "4/4"]
    assert len(rows["makespan(s)"]) == 4 and rows["makespan(s)"][-1].endswith("%")  # only marble's change
    was, exclusive, _ = page("--run", "--policy", "exclusive,marble")
    assert (was["label"], was["lower_bound_s"]) == ("so far", None)
    assert [(job["id"], job["name"], job["model"]) for job in exclusive["jobs"]] == [
        (1, "done", "a"),
        (2, "plain", "plain"),
        (6, "late", "a"),
        (10, "seen", "new"),
    ]


def test_a_job_waits_for_the_end_of_a_completed_one_that_is_left_out() -> None:
    driver = Driver(
        a_job("odd", steps=None, gpus=(1, None), kind=Kind.COMMAND, command=("true",)),
        a_job("next", "a", 100, gpus=1, after=("odd",)),
        gpus=4,
        profiles=PROFILES[:1],
    )
    driver.runs("odd")
    driver.now = 50.0
    driver.tell(ev.SuspendRequested, "odd")
    driver.leaves("odd", 0)
    driver.lose(3)
    driver.lose(2)
    driver.resume("odd")
    driver.now = 80.0
    driver.exits("odd", 0)
    widths = {len(attempt.gpus) for attempt in driver.job("odd").attempts}
    past = past_of(driver.machine)
    assert len(widths) == 2, "it has run on two GPU counts, so nothing says how long it takes on others"
    assert past.left_out == {UNKNOWN: (1,)}
    assert [(spec.name, spec.after, spec.submit_at) for spec in past.jobs] == [("next", (), 80.0)]


def test_work_that_was_not_saved_is_no_part_of_how_long_a_job_takes() -> None:
    driver = Driver(a_job("retried", steps=None, gpus=1, kind=Kind.COMMAND, command=("true",)), gpus=1)
    driver.runs("retried")
    driver.now = 40.0
    driver.exits("retried", 1)
    driver.runs("retried")
    driver.now = 65.0
    driver.exits("retried", 0)
    assert past_of(driver.machine).jobs[0].steps == 25_000


def test_what_starts_and_suspends_cost_is_taken_from_the_run_where_no_profile_says_it() -> None:
    bare = a_profile("a", [10.0], start_s=None, suspend_s=None)
    driver = Driver(
        a_job("x", "a", 1000, gpus=1), a_job("y", "b", 1000, gpus=1), gpus=2, profiles=(bare, PROFILES[1])
    )
    driver.now = 7.0
    driver.runs("x", "y")
    driver.tell(ev.SuspendRequested, "x")
    driver.tell(ev.SuspendRequested, "y")
    driver.now = 16.0
    driver.leaves("x", 50)
    driver.leaves("y", 50)
    past = past_of(driver.machine)
    assert [spec.steps for spec in past.jobs] == [1000, 1000]  # all of their work, not what is done
    a, b = past.profiles
    assert (a.start_s, a.suspend_s, a.resume_s) == (7.0, 9.0, None)
    assert b == PROFILES[1]


def test_a_job_that_ended_early_did_the_work_that_it_did() -> None:
    driver = Driver(a_job("x", "a", 1000, gpus=1), gpus=1, profiles=PROFILES)
    driver.runs("x")
    driver.now = 60.0
    driver.handle(ev.ProgressObserved(at=60.0, progress=(Progress(job_id=1, attempt=1, step=400),)))
    driver.exits("x", 0)
    assert past_of(driver.machine).jobs[0].steps == 400


def test_a_run_on_changing_gpus_is_simulated_on_the_most_it_had() -> None:
    driver = Driver(a_job("x", "a", 1000), gpus=2, hosts=2, profiles=PROFILES)
    driver.runs("x")
    driver.drain()
    driver.leaves("x", 500)
    driver.now = 100.0
    driver.start_agent(2)
    driver.runs("x")
    driver.now = 130.0
    driver.exits("x", 0, 1000, 1000)
    rundir = keep(driver)
    was, again = page("--run")
    assert (was["gpus"], again["gpus"], was["switches"], again["switches"]) == (4, 4, 1, 0)
    assert shown("--run").splitlines()[0].endswith(": 1 job on 2 hosts with 2 GPUs each")
    assert was["downtime_s"] == 0.0
    rundir.write_record(a_record("replay:2@4"))
    assert page("--run")[0]["downtime_s"] == 75.0  # 100 s of the wall, of which the run's clock explains 25


def a_record(devices: str) -> RunRecord:
    return RunRecord(
        id="r", version="0", host="h", pid=1, started=1, began=0.0, devices=devices, policy="marble"
    )


def test_hosts_that_are_not_alike_have_to_be_said() -> None:
    devices = (*some_devices(2), Device(index=2, host="n2", kind="test", handle="0"))
    driver = Driver(a_job("x", "a", 100), gpus=2, profiles=PROFILES)
    driver.events[0] = replace(driver.events[0], devices=devices)  # type: ignore[type-var]
    driver.runs("x")
    driver.exits("x", 0, 100, 100)
    keep(driver)
    assert "hosts with 1 and 2 GPUs; accepted: GPUs per node" in refused("--run")
    assert page("--run", "--gpus", 3)[1]["gpus"] == 3


def test_bounds_of_the_whole_work_say_nothing_of_a_run_that_did_less() -> None:
    bounds = Bounds(1.0, 2.0)
    driver = a_mixed_run()
    result = result_of(driver.machine, bounds=bounds)
    assert (result.lower_bound_s, result.mean_jct_bound_s) == (None, None)
    whole = Simulation(JOBS, PROFILES, gpus=4).run()
    assert result_of(whole, bounds=bounds).lower_bound_s == 1.0


def test_the_place_of_devices() -> None:
    assert place_of(some_devices(4)) == (4, 1)
    assert place_of(some_devices(2, hosts=3)) == (2, 3)
    with pytest.raises(HpcschedError, match="had none"):
        place_of(())


def test_a_run_with_nothing_to_simulate() -> None:
    driver = Driver(a_job("x", "a", 100), gpus=2, profiles=PROFILES)
    driver.cancel("x")
    driver.exits("x", 143)
    keep(driver)
    assert "no job to simulate (1 cancelled)" in refused("--run")


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    rates = st.lists(st.floats(0.5, 8.0), min_size=1, max_size=4)
    cost = st.floats(0.0, 40.0)
    profiles = tuple(
        a_profile(model, draw(rates), start_s=draw(cost), suspend_s=draw(cost), resume_s=draw(cost))
        for model in ("a", "b")
    )
    jobs: list[JobSpec] = []
    for i in range(draw(st.integers(1, 6))):
        after = (f"j{draw(st.integers(0, i - 1))}",) if i and draw(st.booleans()) else ()
        least = draw(st.integers(1, 3))
        jobs.append(
            a_job(
                f"j{i}",
                draw(st.sampled_from("ab")),
                draw(st.integers(1, 2000)),
                gpus=(least, draw(st.sampled_from([None, 3, 4]))),
                submit_at=draw(st.floats(0.0, 300.0)),
                after=after,
            )
        )
    return Scene(jobs=tuple(jobs), profiles=profiles, gpus=4, policy=draw(st.sampled_from(list(POLICIES))))


@settings(max_examples=40)
@given(scenes())
def test_the_same_policy_does_with_a_runs_past_what_it_did(scene: Scene) -> None:
    machine = Simulation(scene.jobs, scene.profiles, gpus=scene.gpus, policy=scene.policy).run()
    past = past_of(machine)
    assert not past.left_out and not past.rigid
    again = simulated(past.jobs, past.profiles, gpus=scene.gpus, policy=scene.policy, options={})
    was = result_of(machine)
    assert again.makespan_s == pytest.approx(was.makespan_s, rel=0.01)
    assert [job.end_s for job in again.jobs] == pytest.approx([job.end_s for job in was.jobs], rel=0.01)
