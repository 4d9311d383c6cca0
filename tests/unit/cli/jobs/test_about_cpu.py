"""Jobs on CPU cores as people see them while they run: status, top, explain, and what `run` tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpcsched.cli.jobs.columns import columns_of, table
from hpcsched.cli.jobs.explain import what_is_next
from hpcsched.cli.jobs.top import Screen
from hpcsched.cli.main import cli
from hpcsched.cli.run.live import sentences
from hpcsched.cli.run.live_table import table as live_table
from hpcsched.core.actions import Action
from hpcsched.core.mechanisms.cpu.layout import cores_of, counted
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.policy.cpu.dtconfig import MOST_CHANGES, ScalingMove, ScalingSearch
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import SnapshotWriter, cores_status
from hpcsched.store.status import Status, read_status
from hpcsched.testing.builders import Driver, a_core_job, a_job


def run(*specs: Any, cores: int = 8, **rest: Any) -> Driver:
    return Driver(*specs, gpus=rest.pop("gpus", 0), cores=range(cores), **rest)


def measured() -> Driver:
    """`a` has taken more cores and is measured to use half of what it has, `b` waits."""
    driver = run(a_core_job("a", 2, start=0.3, steps=1000), a_core_job("b", 4, start=1.0), cores=4)
    driver.runs("a", in_place=True)
    driver.reports("a", 100)
    return driver


def to_rest(driver: Driver, name: str) -> list[Action]:
    """A training that is as fast as it has cores, with a server and two workers, and slower with any other
    counts, goes on until nothing is left to try: what was asked for by then."""
    while True:
        seats = driver.job(name).current.seats
        rate = cores_of(seats) * (1.0 if counted(seats) == (1, 2) else 0.6)
        asked = driver.uses(name, rate)
        if not driver.job(name).resizing:
            return asked
        driver.resized(name, 10)


def written(driver: Driver, path: Path) -> RunDir:
    """The run directory that an agent would leave."""
    rundir = RunDir(path / "run")
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append(driver.events)
    journal.close()
    driver.machine.run.changed.update(driver.machine.run.jobs)
    SnapshotWriter(rundir, driver.machine, allocation={}, speed=1.0, user="me").write("STOPPED", driver.now)
    return rundir


def seen(driver: Driver, path: Path) -> Status:
    return read_status(written(driver, path))


def columns(status: Status, format_: str) -> list[list[str]]:
    return [line.split() for line in table(status.jobs, columns_of(format_), header=False).splitlines()]


def following(driver: Driver, job: str) -> list[str]:
    return what_is_next(driver.machine, driver.job(job))


def told(driver: Driver, actions: list[Action]) -> list[str]:
    return sentences(driver.machine, driver.events[-1], actions)


# --- status and top ---------------------------------------------------------------------------------


def test_status_shows_cores_where_others_have_gpus(tmp_path: Path) -> None:
    status = seen(measured(), tmp_path)
    assert columns(status, "%i %b %C %W %p %R") == [
        ["1", "0.6c", "0.6/2", "1+2", "cores", "n1"],
        ["2", "-", "0/4", "-", "-", "(NoCores)"],
    ]
    other = seen(run(a_job("g", gpus=1), gpus=1), tmp_path / "other")
    assert columns(other, "%i %b %C %W") == [["1", "0", "-", "-"]]


def test_the_snapshot_has_shares_by_kind_and_what_was_measured_in_the_same_order(tmp_path: Path) -> None:
    driver = run(a_core_job("a", 3.0, start=0.4, servers=2, workers=2))
    driver.runs("a", in_place=True)
    before = cores_status(driver.job("a"))
    assert before and (before.rate, before.cpu, before.net) == (None, None, None)
    seats = driver.job("a").current.seats
    joined_late = tuple(seats[rank] for rank in (0, 2, 3, 1))
    driver.job("a").current.seats = driver.machine.mechanism(Cpu).cores.of[1].seats = joined_late
    driver.uses("a", 4.0, [0.9, 0.5, 0.6, 0.8], full=0.25)
    rundir = written(driver, tmp_path)
    (raw,) = json.loads(rundir.status.read_bytes())["jobs"]
    assert raw["cores"] == {
        "budget": 3.0,
        "host": "n1",
        "servers": [0.3, 0.3],
        "workers": [0.3, 0.3],
        "rate": 4.0,
        "cpu": pytest.approx([0.27, 0.24, 0.15, 0.18]),
        "net": [0.25, 0.0, 0.0, 0.0],
    }


def test_jobs_on_gpus_say_nothing_of_cores_and_gpus_nothing_of_loans(tmp_path: Path) -> None:
    rundir = written(run(a_job("g", gpus=1), gpus=1), tmp_path)
    page = json.loads(rundir.status.read_bytes())
    assert "cores" not in page["jobs"][0]
    assert page["gpus"][0].keys() == {"index", "host", "job", "lane", "utilisation", "memory_mib"}


def test_the_time_left_goes_by_what_was_measured(tmp_path: Path) -> None:
    driver = measured()
    assert seen(driver, tmp_path / "before").jobs[0].eta_s is None
    driver.uses("a", 4.5, 1.0)
    assert driver.job("a").rate is None
    assert seen(driver, tmp_path / "after").jobs[0].eta_s == 200.0


def test_a_slot_on_loan_is_neither_free_nor_anybodys(tmp_path: Path) -> None:
    driver = Driver(a_job("g", gpus=1), a_core_job("a", 4, start=0.15), gpus=4, kind="cpu")
    status = seen(driver, tmp_path)
    assert [(gpu.job, gpu.lane, gpu.loan) for gpu in status.gpus] == [
        (1, "foreground", False),
        (None, "foreground", False),
        (None, "foreground", False),
        (None, "foreground", True),
    ]
    lines = Screen(width=100, height=None).lines(status)
    assert lines[1].startswith("1 of 4 CPU slots busy, 1 lent to jobs on CPU cores")
    assert any(line.split() == ["n1", "0:1", "1:-", "2:-", "3:lent"] for line in lines)
    assert any(line.split()[:5] == ["2", "a", "CF", "cores", "0.6c"] for line in lines if line)
    short = Screen(width=12, height=12).lines(status)
    assert max(map(len, short)) <= 12
    crowded = Screen(width=40, height=10).lines(seen(Driver(gpus=1, hosts=9), tmp_path / "many"))
    assert any("9 of 9 GPUs free" in line for line in crowded)


def test_slots_on_loan_do_not_count_as_free_where_hosts_are_too_many_to_list(tmp_path: Path) -> None:
    driver = Driver(a_core_job("a", 1, start=1.0), gpus=1, hosts=9, kind="cpu")
    lines = Screen(width=60, height=10).lines(seen(driver, tmp_path))
    assert any("8 of 9 CPU slots free" in line for line in lines)


# --- explain ----------------------------------------------------------------------------------------


def explained(driver: Driver, path: Path, job: str, *words: str) -> str:
    rundir = written(driver, path)
    done = CliRunner().invoke(cli, ["--dir", str(rundir.root), "explain", job, *words])
    assert done.exit_code == 0, (done.exception, done.output)
    return done.stdout


def test_explain_says_what_it_has_why_and_what_was_measured(tmp_path: Path) -> None:
    driver = measured()
    driver.uses("a", 4.5, [1.0, 0.5, 0.5], full=0.4)
    lines = explained(driver, tmp_path, "a").splitlines()
    has = "1 server x 0.2 + 2 workers x 0.2"
    assert lines[0] == f"job 1 (a) is RUNNING with {has} cores on n1"
    assert lines[1] == f"  because: starts with {has}, on 0.6 of the 2 cores that it may have"
    full = "the link was full of server 0 in 40% of the time"
    assert lines[2] == f"  now: 4.5 steps/s, 0.4 of its 0.6 cores used (67%); {full}"
    assert lines[3] == "  next: 900 of 1000 steps left at 4.5 steps/s: about 3:20"


def test_explain_json_has_cores_as_status_has_them(tmp_path: Path) -> None:
    driver = measured()
    driver.uses("a", 4.5)
    page = json.loads(explained(driver, tmp_path / "one", "a", "--json"))
    assert page["cores"] == json.loads((tmp_path / "one/run/status.json").read_bytes())["jobs"][0]["cores"]
    assert page["reason"]["code"] == "Seated" and page["gpus"] == []
    other = run(a_job("g", gpus=1), gpus=1)
    assert "cores" not in json.loads(explained(other, tmp_path / "two", "g", "--json"))


def test_a_waiting_job_is_told_who_is_before_it_and_what_it_needs(tmp_path: Path) -> None:
    big = a_core_job("b", 3, start=1.0)
    driver = run(a_core_job("a", 3, start=0.4), big, a_core_job("c", 2), cores=3)
    free = "1.8 of 3 CPU cores free on n1; it starts on"
    assert following(driver, "b") == [f"0 jobs before it; {free} 3 of the 3 that it may have"]
    assert following(driver, "c") == [f"1 job before it; {free} 0.3 of the 2 that it may have"]
    assert explained(driver, tmp_path, "b").splitlines()[1] == "  because: waits for CPU cores to start on"
    nowhere = run(a_core_job("a", 2), cores=0)
    assert "0 of 0 CPU cores free" in following(nowhere, "a")[0]


def test_slots_that_are_free_count_as_cores_that_can_be_had() -> None:
    driver = Driver(a_job("g", gpus=1), a_core_job("a", 3.3, start=1.0), gpus=4, kind="cpu")
    assert "; 3 of 4 CPU cores free on n1; it starts on 3.3 of the 3.3" in following(driver, "a")[0]


def test_where_the_search_stands_from_the_start_to_its_rest() -> None:
    driver = run(a_core_job("a", 8))
    assert following(driver, "a") == [
        "the first measurement comes once it is steady",
        "it has not said yet that it can be suspended: until it does it keeps these cores",
    ]
    driver.runs("a", in_place=True)
    assert following(driver, "a") == ["the first measurement comes once it is steady"]
    driver.uses("a", 2.0)
    prepared = "it goes on with 1 server x 0.6 + 2 workers x 0.6 cores without a restart, as soon as that is"
    assert following(driver, "a")[-1] == f"{prepared} prepared"
    driver.resized("a", 10)
    shape = "1 server x 0.6 + 2 workers x 0.6"
    assert following(driver, "a") == [
        f"tries more cores: {shape}, until it is measured and compared with 2 steps/s"
    ]
    to_rest(driver, "a")
    until = "its speed changes by 10%, or for 3 more measurements: then all is tried anew"
    assert following(driver, "a")[-1] == f"stays with these cores until {until}"
    rests = driver.machine.mechanism(Cpu).cores.of[1].memory
    assert isinstance(rests, ScalingSearch)
    driver.machine.mechanism(Cpu).cores.of[1].memory = replace(rests, changes=MOST_CHANGES)
    assert following(driver, "a")[-1] == "stays with these cores: it has been changed 60 times by now"


def test_a_job_that_would_take_more_cores_says_so() -> None:
    driver = run(a_core_job("a", 4, start=0.5), a_core_job("b", 2, start=1.0), cores=4)
    driver.runs("a", "b", in_place=True)
    driver.uses("a", 1.0)
    assert following(driver, "a")[-1] == "takes more cores as soon as no other job has or wants them"


def test_a_change_that_failed_is_not_promised() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    driver.uses("a", 2.0)
    driver.stays("a")
    memory = driver.machine.mechanism(Cpu).cores.of[1].memory
    assert (
        isinstance(memory, ScalingSearch) and memory.trial is ScalingMove.UP and not driver.job("a").resizing
    )
    assert following(driver, "a")[-1] == "what it tries next is decided with the next measurement"
    driver.uses("a", 2.001)
    assert "3 workers" in following(driver, "a")[-1]


def test_a_job_that_cannot_be_changed_in_place_starts_again() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a")
    asked = driver.uses("a", 2.0)
    seats = "1 server x 0.6 + 2 workers x 0.6 cores"
    assert following(driver, "a") == [f"it starts again with {seats} as soon as it has saved"]
    (line,) = told(driver, asked)
    assert line.startswith(
        f"job 1 (a) is asked to save to go on with {seats}: more cores, from 1 server x 0.4"
    )
    (line,) = [line for line in told(driver, driver.leaves("a", 50)) if "resumes" in line]
    assert line == f"job 1 (a) resumes at step 50 with {seats}"


def test_what_another_policy_remembers_is_left_alone() -> None:
    driver = run(a_core_job("a", 8))
    driver.runs("a", in_place=True)
    for memory in (None, "nodes", {"servers": 1}):
        driver.machine.mechanism(Cpu).cores.of[1].memory = memory
        assert following(driver, "a") == []
    driver.exits("a", 0, step=100_000, saved=100_000)
    assert following(driver, "a") == []


# --- what `run` tells -------------------------------------------------------------------------------


def test_each_change_is_told_with_its_reason_and_when_it_is_done() -> None:
    driver = run()
    started = driver.submit(a_core_job("a", 2))
    assert told(driver, started) == ["job 1 (a) starts with 1 server x 0.1 + 2 workers x 0.1 cores"]
    driver.runs("a", in_place=True)
    asked = driver.uses("a", 2.0)
    (line,) = told(driver, asked)
    assert line.startswith("job 1 (a): more cores, from 1 server x 0.1 + 2 workers x 0.1 to 1 server x 0.15")
    done = told(driver, driver.resized("a", 12, stopped_s=0.041))
    assert done == [
        "job 1 (a) has 1 server x 0.15 + 2 workers x 0.15 since step 12; training stood still for 0.04 s"
    ]


def test_it_is_told_once_when_a_search_is_over() -> None:
    driver = run(a_core_job("a", 4), cores=8)
    driver.runs("a", in_place=True)
    (line,) = told(driver, to_rest(driver, "a"))
    assert line.startswith("job 1 (a) stays with 1 server x")
    driver.now += 600
    assert told(driver, driver.uses("a", 3.99)) == []


def test_the_table_on_a_terminal_has_cores() -> None:
    driver = Driver(
        a_job("g", gpus=1), a_core_job("a", 4, start=0.15), gpus=4, kind="cpu", cores=range(10, 12)
    )
    text = live_table(driver.machine, 0.0, 160)
    assert "3 of 4 CPU slots, 4.4 of 6 CPU cores free" in text[0]
    assert any("0.6c" in line and "cores" in line for line in text)
    assert "; 7.7 of 8 CPU cores free" in live_table(run(a_core_job("a", 2)).machine, 0.0, 80)[0]
