"""`hpcsched simulate --run`: how a run went, beside what other policies would have done with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from budget import examples
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from simulatebench import JOBS, PROFILES, SET, call, make_place, measures, page, refused, shown

from hpcsched.cli.main import cli
from hpcsched.cli.run.results import Bounds, bounds_of, result_of, simulated
from hpcsched.core import events as ev
from hpcsched.core.model import Device, JobSpec, JobState, Kind, Progress
from hpcsched.errors import HpcschedError
from hpcsched.policy import POLICIES
from hpcsched.sim.engine import Simulation
from hpcsched.sim.past_run import CANCELLED, FAILED, UNKNOWN, WAITING, past_of, place_of
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir, RunRecord
from hpcsched.testing.builders import Driver, a_job, a_profile, some_devices
from hpcsched.testing.simulation import Rehearsal, Scene

SCENE = Scene(jobs=JOBS, profiles=PROFILES, gpus=4)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_place(tmp_path, monkeypatch)


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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_as_it_was_is_what_a_simulation_of_its_jobs_shows(policy: str) -> None:
    a_run(replace(SCENE, policy=policy))
    was, again, other = page(
        "--run", "--policy", f"{policy},exclusive" if policy != "exclusive" else "exclusive,marble"
    )
    fresh = page(*SET, "--policy", policy)[0]
    assert (was["label"], was["policy"], again["label"]) == ("as it was", policy, "")
    assert again == fresh
    idle, expected = was.pop("idle"), fresh.pop("idle")
    assert (idle["gpu_hours"], list(idle["hosts"])) == (expected["gpu_hours"], ["n1"])
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


def test_the_folder_that_a_run_was_begun_in_names_it_too() -> None:
    folder = Path("monday")
    folder.mkdir()
    a_run(SCENE, str(folder / "hpcsched-run"))
    text = shown("--run", str(folder))
    assert text.splitlines()[0].startswith(f"run {folder.absolute() / 'hpcsched-run'}: 4 jobs")


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
    text = shown("--run", "--gpus-per-node", 3, "--nodes", 2)
    assert text.splitlines()[0].endswith("4 jobs on 2 hosts with 3 GPUs each; as it was on 4")
    assert [result["gpus"] for result in page("--run", "--gpus-per-node", 3, "--nodes", 2)] == [4, 6]
    a_run(Scene(jobs=(a_job("wide", "b", 100, gpus=4),), profiles=PROFILES, gpus=4), "other")
    assert "job wide.gpus: 4 GPUs" in refused("--run", "other", "--gpus-per-node", 3)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ((), "3 hosts with 2 GPUs each"),
        (("--gpus-per-node", 4), "3 hosts with 4 GPUs each; as it was on 6"),
        (("--nodes", 2), "2 hosts with 2 GPUs each; as it was on 6"),
        (("--nodes", 1), "2 GPUs; as it was on 6"),
        (("--gpus-per-node", 4, "--nodes", 1), "4 GPUs; as it was on 6"),
    ],
)
def test_what_is_not_said_of_the_hosts_is_the_runs_own(words: tuple[object, ...], where: str) -> None:
    driver = Driver(a_job("x", "a", 100), gpus=2, hosts=3, profiles=PROFILES)
    driver.runs("x")
    driver.exits("x", 0, 100, 100)
    keep(driver)
    assert shown("--run", *words, "--policy", "marble,exclusive").splitlines()[0].endswith(f" on {where}")


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
    assert simulation.run.jobs[2].ended_s == 30.0
    assert all(job.state is JobState.COMPLETED for job in simulation.run.jobs.values())


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
    assert page("--run", "--gpus-per-node", 3)[1]["gpus"] == 6
    assert page("--run", "--gpus-per-node", 3, "--nodes", 1)[1]["gpus"] == 3


def test_bounds_of_the_whole_work_say_nothing_of_a_run_that_did_less() -> None:
    bounds = Bounds(1.0, 2.0)
    driver = a_mixed_run()
    result = result_of(driver.machine, bounds=bounds)
    assert (result.lower_bound_s, result.mean_jct_bound_s) == (None, None)
    whole = Simulation(JOBS, PROFILES, gpus=4).run()
    assert result_of(whole, bounds=bounds).lower_bound_s == 1.0


def test_gpus_that_are_left_bound_nothing_of_a_run_that_has_lost_others() -> None:
    machine = Simulation(JOBS, PROFILES, gpus=4).run()
    makespan_s = bounds_of(machine).makespan_s
    assert makespan_s is not None and makespan_s > 0
    machine.handle(ev.DeviceLost(at=machine.run.now, gpu=3, why="Xid 79"))
    assert bounds_of(machine) == (None, None)


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


@settings(max_examples=examples(40))
@given(scenes())
@pytest.mark.long
def test_the_same_policy_does_with_a_runs_past_what_it_did(scene: Scene) -> None:
    machine = Simulation(scene.jobs, scene.profiles, gpus=scene.gpus, policy=scene.policy).run()
    past = past_of(machine)
    assert not past.left_out and not past.rigid
    again = simulated(past.jobs, past.profiles, gpus=scene.gpus, policy=scene.policy, options={})
    was = result_of(machine)
    assert again.makespan_s == pytest.approx(was.makespan_s, rel=0.01)
    assert [job.end_s for job in again.jobs] == pytest.approx([job.end_s for job in was.jobs], rel=0.01)
