"""Background jobs as people see them: status, top, explain, simulate, charts; and at the door."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulatebench import make_place, measures, page, refused, shown, write_set

from hpcsched import jobfile
from hpcsched.agent.admission import Admission
from hpcsched.agent.inbox import Command
from hpcsched.cli.jobs.explain import what_is_next
from hpcsched.cli.jobs.top import Screen
from hpcsched.cli.run.live import sentences
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.model import Progress
from hpcsched.errors import ConfigError
from hpcsched.policy import make_policy
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import SnapshotWriter
from hpcsched.store.status import read_status
from hpcsched.testing.builders import Driver, a_job, a_profile

FRONT = a_profile("front", [10.0], start_s=1.0, suspend_s=1.0)
BACK = a_profile("back", [10.0], start_s=1.0, suspend_s=1.0)


def back(name="b", **rest):
    return a_job(name, "back", 1000, gpus=1, background=True, **rest)


@pytest.fixture
def shared():
    """f and b share GPU 0; GPU 1 has c in its background alone."""
    driver = Driver(gpus=2, profiles=[FRONT, BACK])
    driver.submit(a_job("f", "front", 100_000, gpus=1))
    driver.runs("f")
    driver.submit(back("c"), back("b"), back("d"))
    driver.runs("c", "b")
    return driver


def trains(driver, seconds, rate):
    job, step = driver.job("f"), driver.job("f").step
    events = []
    for _ in range(round(seconds / 10)):
        driver.now += 10
        step += round(10 * rate)
        news = Progress(job_id=job.id, attempt=job.attempt, step=step, done_s=driver.now)
        event = ev.ProgressObserved(at=driver.now, progress=(news,))
        events += sentences(driver.machine, event, driver.handle(event))
    return events


# --- while it runs ----------------------------------------------------------------------------------


def test_status_has_an_entry_for_each_lane_that_is_taken(shared, tmp_path):
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    shared.machine.run.changed.update(shared.machine.run.jobs)
    writer = SnapshotWriter(rundir, shared.machine, allocation={}, speed=1.0, user="me")
    writer.write("RUNNING", shared.now)
    status = read_status(rundir)
    assert [(gpu.index, gpu.lane, gpu.job) for gpu in status.gpus] == [
        (0, "foreground", 1),
        (0, "background", 3),
        (1, "foreground", None),
        (1, "background", 2),
    ]
    assert [job.role for job in status.jobs] == ["primary", "background", "background", None]
    assert status.jobs[3].reason == "NoLane"
    lines = Screen(width=100, height=None).lines(status)
    assert "2 of 2 GPUs busy" in lines[1]
    assert any(line.split() == ["n1", "0:1+3", "1:-+2"] for line in lines)


def test_explain_says_whose_gpu_it_is_and_what_that_costs(shared):
    assert what_is_next(shared.machine, shared.job("b"))[1:] == [
        "it has the background of GPU 0, beside job 1 (f); at its own speed",
        "job 1 (f) is not measured yet; at most 5% is tolerated",
    ]
    assert what_is_next(shared.machine, shared.job("c"))[1:] == [
        "it has the background of GPU 1, which no other job has; at its own speed"
    ]
    assert what_is_next(shared.machine, shared.job("d")) == [
        "not on GPU 0: its background lane has job 3",
        "not on GPU 1: its background lane has job 2",
    ]
    trains(shared, 50, 9.8)
    assert what_is_next(shared.machine, shared.job("f"))[-2:] == [
        "job 3 (b) is in the background of GPU 0; at its own speed",
        "job 1 (f) is 2.0% slower than alone; at most 5% is tolerated",
    ]


def test_what_people_hear_of_paces_are_those_that_have_a_reason(shared):
    """Pauses for a measurement come every ten minutes, and are nothing to tell."""
    said = trains(shared, 40, 9.0)
    assert said == []
    assert shared.machine.mechanism(Background).lanes.guests[3].paused_s is not None
    assert (
        "it pauses, for the speed without it to be measured"
        in what_is_next(shared.machine, shared.job("b"))[-2]
    )
    assert trains(shared, 40, 10.0) == []
    assert trains(shared, 40, 9.0) == [
        "job 3 (b) goes at 0.5 of its speed: it slows job 1 (f) down by 10.0%, of at most 5%"
    ]


# --- what if ----------------------------------------------------------------------------------------


SET = ("jobs.toml", "--gpus-per-node", 2, "--profiles", "p.json")
JOBS = """
schema = 1
[defaults]
replay = true
model = "a"
[[job]]
name = "front"
gpus = 2
steps = 18000
[[job]]
name = "behind"
steps = 2500
background = true
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    place = make_place(tmp_path, monkeypatch)
    (place / "jobs.toml").write_text(JOBS)
    return place


def test_simulate_tells_of_both_lanes(place):
    (result,) = page(*SET)
    front, behind = result["jobs"]
    assert {attempt["role"] for attempt in behind["attempts"]} == {"background"}
    assert result["makespan_s"] == front["end_s"]
    assert (result["background_total"], result["background_completed"]) == (1, 1)
    assert result["background_end_s"] == result["background_mean_jct_s"] == behind["end_s"]
    assert 0 < result["lower_bound_s"] <= result["makespan_s"]
    assert result["utilisation"] == 1.0
    text = shown(*SET)
    assert " 1b " in text
    assert measures(text)["background: last end(s)"] == [f"{behind['end_s']:.1f}"]


def test_what_sharing_costs_can_be_said(place):
    """Half its speed and 3 % by default."""
    (usual,) = page(*SET)
    (free,) = page(*SET, "--background-share", 1.0, "--foreground-slowdown", 0.0)
    front, behind = free["jobs"]
    assert front["end_s"] == pytest.approx(1005)
    assert behind["end_s"] < 0.6 * usual["jobs"][1]["end_s"]
    assert 1005 < usual["jobs"][0]["end_s"] < 1005 * 1.03
    for words in (("--background-share", 0), ("--foreground-slowdown", 1), ("--background-share", "half")):
        assert words[0] in refused(*SET, *words)


@pytest.mark.long
def test_the_chart_has_the_background_in_it(place):
    pytest.importorskip("matplotlib")
    shown(*SET, "--gantt", "chart.svg")
    text = (place / "chart.svg").read_text()
    assert "in the background" in text
    write_set([a_job("one", "a", 300)])
    shown(*SET, "--gantt", "chart.svg")
    assert "in the background" not in (place / "chart.svg").read_text()


def test_a_set_of_background_jobs_alone_is_measured_as_any_other(place):
    (place / "jobs.toml").write_text(JOBS.replace("gpus = 2", "background = true"))
    (result,) = page(*SET)
    assert result["makespan_s"] == result["background_end_s"] > 0
    assert result["mean_jct_s"] is not None


# --- at the door ------------------------------------------------------------------------------------


def test_a_job_file_says_who_runs_behind_and_what_others_tolerate(place):
    loaded = jobfile.load(place / "jobs.toml", workdir=place)
    front, behind = loaded.jobs
    assert (front.background, front.max_foreground_slowdown) == (False, 0.05)
    assert (behind.background, behind.gpus_min, behind.gpus_max) == (True, 1, 1)


@pytest.mark.parametrize(("needs", "fits"), [(90.0, True), (110.0, False), (None, True)])
def test_one_that_fits_into_no_gpu_is_refused_by_name(needs, fits):
    profile = replace(BACK, memory_mib=None if needs is None else {1: needs})
    admission = Admission(
        machine=Machine(make_policy),
        find_profiles=lambda models, gpu_type: (profile,),
        stand_ins=False,
        memory_mib=100.0,
    )
    if fits:
        assert admission.events([back()], at=0.0, gpus=1, where="submit")
        return
    with pytest.raises(ConfigError) as caught:
        admission.events([back()], at=0.0, gpus=1, where="submit")
    words = "submit: job 'b'.background: back needs 110 MiB on one GPU"
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    "odd", [{"gpus_max": 2}, {"gpus_max": None}, {"nodes": 2}, {"max_foreground_slowdown": 2.0}]
)
def test_what_no_job_file_can_say_is_refused_at_the_inbox_too(odd):
    admission = Admission(
        machine=Machine(make_policy), find_profiles=lambda models, gpu_type: (BACK,), stand_ins=False
    )
    command = Command(command="submit", jobs=[replace(back(), **odd)])
    with pytest.raises(ConfigError):
        admission.submitted(command, at=0.0, gpus=4, cause="inbox:1")
