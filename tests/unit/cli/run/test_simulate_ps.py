"""`hpcsched simulate` with jobs on CPU cores: alone, beside jobs on GPUs, and of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulatebench import call, make_place, measures, page, refused, shown

from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.planning.ps.model import PsModel
from hpcsched.planning.ps.training import PsTraining
from hpcsched.policy import POLICIES
from hpcsched.sim.engine import Simulation
from hpcsched.sim.past_run import UNKNOWN, UNMODELLED, WAITING, past_of
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile
from hpcsched.testing.invariants import check

NET = {"model": "net", "batch_cpu_s": 10, "parameter_mib": 1, "weak": True, "staleness": 1}
TRAININGS = {
    "net": PsTraining(model=PsModel(batch_cpu_s=10.0, parameter_bytes=2**20, weak=True, staleness=1))
}
ON_GPUS = """
[[job]]
name = "gpu"
model = "a"
steps = 900
replay = true
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CPUS", "PS"):
        monkeypatch.delenv(f"HPCSCHED_{name}", raising=False)
    make_place(tmp_path, monkeypatch)
    (tmp_path / "net.json").write_text(json.dumps({"schema": 1, "models": [NET]}))
    write_trainings()
    return tmp_path


def write_trainings(
    model: str = "net", cpus: float = 20, steps: str = "steps = 2000", more: str = ""
) -> None:
    head = f'schema = 1\n[defaults]\nmodel = "{model}"\n{steps}\n'
    one = f'trainer = "x:Y"\nstrategy = {{ kind = "ps", cpus = {cpus} }}\n'
    jobs = [f'[[job]]\nname = "{name}"\n{one}' for name in ("first", "second", "third")]
    Path("ps.toml").write_text("\n".join([head, *jobs, more]))


SET = ("ps.toml", "--cpus", 20, "--ps", "net.json")


# -- job files -----------------------------------------------------------------------------------------


def test_jobs_on_cores_need_no_gpus() -> None:
    (result,) = page(*SET)
    assert (result["gpus"], result["gpu_hours"], result["lower_bound_s"]) == (0, 0.0, None)
    assert [job["state"] for job in result["jobs"]] == ["COMPLETED"] * 3
    assert [job["start_s"] for job in result["jobs"]] == [0.0] * 3
    for job in result["jobs"]:
        assert all(attempt["gpus"] == [] for attempt in job["attempts"])
        assert {attempt["ended"] for attempt in job["attempts"]} == {"resized", "completed"}
    assert page(*SET, "--gpus-per-node", 0) == [result]


def test_three_jobs_and_their_measures_on_a_screen() -> None:
    text = shown(*SET)
    assert all(name in text for name in ("first", "second", "third"))
    assert "makespan" in text and "GPU-hours" not in text
    text = shown(*SET, "--policy", ",".join(POLICIES))
    assert text.startswith("ps.toml: 3 jobs on 20 cores\n")
    assert len(measures(text)) > 4
    assert shown(*SET, "--nodes", 2, "--policy", "marble,equal").startswith(
        "ps.toml: 3 jobs on 2 hosts with 20 cores each\n"
    )


def test_each_host_has_cores_of_its_own() -> None:
    one, three = page(*SET)[0], page(*SET, "--nodes", 3)[0]
    assert three["makespan_s"] < one["makespan_s"]


def test_jobs_on_cores_beside_jobs_on_gpus() -> None:
    write_trainings(more=ON_GPUS)
    (result,) = page(*SET, "--gpus-per-node", 2, "--profiles", "p.json")
    jobs = {job["name"]: job for job in result["jobs"]}
    assert jobs["gpu"]["attempts"][0]["gpus"] == [0, 1]
    assert jobs["first"]["attempts"][0]["gpus"] == []
    assert [job["state"] for job in result["jobs"]] == ["COMPLETED"] * 4
    title = shown(
        *SET, "--gpus-per-node", 2, "--profiles", "p.json", "--policy", "marble,equal"
    ).splitlines()[0]
    assert title == "ps.toml: 4 jobs on 2 GPUs and 20 cores"


def test_shipped_models_are_there_without_being_named() -> None:
    write_trainings("ResNet-50")
    (named,), (unnamed,) = page("ps.toml", "--cpus", 50, "--ps", "nearchus-a"), page("ps.toml", "--cpus", 50)
    assert named == unnamed
    (faster,) = page("ps.toml", "--cpus", 50, "--ps", "nearchus-b")
    assert faster["makespan_s"] != named["makespan_s"]


def test_of_a_model_in_two_files_the_first_one_counts(place: Path) -> None:
    slow = {**NET, "batch_cpu_s": 20}
    (place / "slow.json").write_text(json.dumps({"schema": 1, "models": [slow]}))
    (fast,), (first,), (second,) = (
        page("ps.toml", "--cpus", 20, *words)
        for words in (
            ("--ps", "net.json"),
            ("--ps", "net.json", "--ps", "slow.json"),
            ("--ps", "slow.json", "--ps", "net.json"),
        )
    )
    assert first == fast
    assert second["makespan_s"] > 1.5 * fast["makespan_s"]


def test_what_cannot_be_simulated_is_refused_in_a_line() -> None:
    assert refused("ps.toml", "--ps", "net.json").startswith("--cpus: missing; accepted: cores of each node")
    assert refused("ps.toml", "--cpus", 20) == (
        "ps.toml: job first.model: 'net' on CPU cores; "
        "accepted: MobileNet, DenseNet-201, NasNetLarge, ResNet-50, Inception-V3"
    )
    assert "shipped models (nearchus-a, nearchus-b)" in refused("ps.toml", "--cpus", 20, "--ps", "none")
    assert refused("ps.toml", "--cpus", 2, "--ps", "net.json") == (
        "ps.toml: job first.strategy.cpus: 3 cores to start with; accepted: at most 2: so many are here"
    )
    write_trainings(steps="")
    assert refused(*SET).startswith("ps.toml: job first.steps: missing")
    write_trainings(more=ON_GPUS)
    assert refused(*SET, "--profiles", "p.json").startswith("--gpus-per-node: missing")
    assert "at most 0" in refused(*SET, "--profiles", "p.json", "--gpus-per-node", 0)
    assert "--gpus-per-node: missing" in refused("jobs.toml", "--cpus", 4)


# -- runs ----------------------------------------------------------------------------------------------


def a_training(name: str, steps: int | None = 500, **rest: Any) -> JobSpec:
    return replace(a_core_job(name, 10, **rest), model="net", steps=steps)


def a_run(*jobs: JobSpec, gpus: int = 0, cpus: int = 10, until: float = 1e9) -> Machine:
    """A run of these jobs that was simulated, in the default folder."""
    events = []

    def watch(event: object, actions: object, machine: Machine) -> None:
        events.append(event)
        check(machine)

    profiles = [a_profile("a", [2.0, 4.0])]
    simulation = Simulation(jobs, profiles, gpus=gpus, cpus=cpus, trainings=TRAININGS, watch=watch)
    machine = simulation.run(until=until)
    rundir = RunDir(Path("hpcsched-run"))
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append(events)
    journal.close()
    return machine


def test_of_a_run_only_jobs_on_gpus_are_simulated_unless_models_are_named() -> None:
    a_run(a_training("ps"), a_job("gpu", "a", 100), gpus=2)
    done = call("--run", "--policy", "exclusive")
    assert done.exit_code == 0, done.exception
    assert done.stderr == "hpcsched: left out: 1 on CPU cores without a model of their training (--ps)\n"
    _, again = page("--run", "--policy", "exclusive")
    assert [job["name"] for job in again["jobs"]] == ["gpu"]
    was, again = page("--run", "--ps", "net.json")
    assert [job["name"] for job in again["jobs"]] == ["ps", "gpu"]
    assert {**again["jobs"][0]} == {**was["jobs"][0]}


def test_a_run_of_such_jobs_alone() -> None:
    a_run(a_training("ps"))
    said = refused("--run")
    assert "no job to simulate (1 on CPU cores without a model of their training (--ps))" in said
    was, again = page("--run", "--ps", "net.json")
    assert (was["makespan_s"], was["gpus"]) == (again["makespan_s"], 0)
    _, more = page("--run", "--ps", "net.json", "--cpus", 5)
    assert more["makespan_s"] > was["makespan_s"]


def test_what_of_a_run_on_cores_can_be_simulated() -> None:
    """Of a completed one what it did, of another what it has to do."""
    machine = a_run(a_training("done", 100), a_training("open", 10**6, after=("done",)), until=4000.0)
    past = past_of(machine, trainings=TRAININGS)
    assert [(spec.name, spec.steps, spec.after) for spec in past.jobs] == [
        ("done", 100, ()),
        ("open", 10**6, ("done",)),
    ]
    assert (past.profiles, past.left_out, past.rigid, past.ids) == ((), {}, (), (1, 2))
    assert past_of(machine).left_out == {UNMODELLED: (1, 2)}


def test_a_training_of_unknown_work_is_left_out_with_those_that_wait_for_it() -> None:
    driver = Driver(a_training("open", None), a_training("next", after=("open",)), gpus=0, cores=range(10))
    assert past_of(driver.machine, trainings=TRAININGS).left_out == {UNKNOWN: (1,), WAITING: (2,)}
