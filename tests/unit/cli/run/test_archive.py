"""What the database keeps of jobs that have ended, and of the throughput that runs have seen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpcsched.cli.run.archive import _finished, _learnt, _used
from hpcsched.core.model import Device, Kind
from hpcsched.store.job_use import JobUse, append
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job, a_profile


def a_run(gpus, profiles=()):
    """A run that has seen the model `new` do 2 steps a second on each GPU of so many."""
    driver = Driver(a_job("x", "new", 9000, gpus=gpus), gpus=gpus, profiles=profiles)
    driver.runs("x")
    driver.trains("x", 2.0 * gpus)
    return driver.machine


def kept(machine, known):
    return [(p.source, dict(p.throughput)) for p in _learnt(machine, "cpu", known)]


def test_counts_add_up_over_runs():
    (first,) = _learnt(a_run(1), "cpu", [])
    assert (first.device, first.throughput, first.spread.keys()) == ("cpu", {1: 2.0}, {1})
    (both,) = _learnt(a_run(4), "cpu", [first])
    assert both.throughput == {1: 2.0, 4: 8.0}
    assert both.spread.keys() == {1, 4}


def test_the_newest_rate_counts():
    old = replace(a_profile("new", {1: 99.0, 2: 50.0}), device="cpu", source="learned")
    assert kept(a_run(1), [old]) == [("learned", {1: 2.0, 2: 50.0})]


@pytest.mark.parametrize("source", ["measured", "published", "fitted"])
def test_what_somebody_put_there_stays(source):
    theirs = replace(a_profile("new", [99.0]), device="cpu", source=source)
    learnt = replace(theirs, source="learned")
    for known in ([theirs], [theirs, learnt], [learnt, theirs]):
        assert kept(a_run(1), known) == []
    assert kept(a_run(1), [replace(theirs, nodes=2)]) == [("learned", {1: 2.0})]


def test_a_corrected_profile_is_kept_whole():
    loaded = a_profile("new", [1.0, 2.0, 3.0, 4.0])
    ((source, rates),) = kept(a_run(4, [loaded]), [])
    assert source == "learned"
    assert rates[4] == pytest.approx(8.0, rel=1e-3)
    assert 1.0 < rates[1] < 2.5


def test_what_was_learnt_on_two_hosts_is_not_taken_for_one():
    theirs = replace(a_profile("new", [10.0, 20.0]), device="cpu")
    driver = Driver(a_job("x", "new", 9000, gpus=1, nodes=2), gpus=1, hosts=2, profiles=[theirs])
    driver.runs("x")
    driver.trains("x", 5.0)
    (found,) = _learnt(driver.machine, "cpu", [theirs])
    assert (found.nodes, round(found.throughput[1], 2)) == (2, 5.0)


def test_what_was_learnt_is_kept_by_type_of_gpu():
    old, new = (Device(index=i, host=f"n{i}", kind=kind, handle="0") for i, kind in enumerate(("old", "new")))
    driver = Driver(a_job("x", "m", 9000, gpus=1), gpus=1, kind="old")
    driver.start_agent(1, devices=(old, new))
    driver.submit(a_job("y", "m", 9000, gpus=1))
    driver.runs("x", "y")
    driver.trains("x", 2.0)
    driver.trains("y", 5.0)
    theirs = replace(a_profile("m", {2: 7.0}), device="new", source="learned")
    found = {p.device: p.throughput for p in _learnt(driver.machine, "old", [theirs])}
    assert found == {"old": {1: 2.0}, "new": {1: 5.0, 2: 7.0}}


def test_later_runs_estimate_from_what_earlier_ones_saw():
    learnt = replace(a_profile("new", {1: 2.0, 2: 3.5}), source="learned")
    driver = Driver(a_job("x", "new", 9000), gpus=8, profiles=[learnt])
    job = driver.job("x")
    assert driver.machine.estimates.profile(job) is learnt
    assert driver.machine.estimates.curve(job).rate(2) == pytest.approx(3.5, rel=0.01)
    assert driver.machine.estimates.curve(job).rate(8) > 1.5 * 3.5


@pytest.mark.parametrize(
    ("steps", "code", "kept"), [(None, 0, 400), (9000, 0, 9000), (9000, 1, 400), (None, 1, 400)]
)
def test_a_job_has_its_steps_or_where_it_was_given_epochs_or_did_not_complete_those_it_did(steps, code, kept):
    driver = Driver(a_job("x", steps=steps, kind=Kind.TRAINER, trainer="m:T", retries=0), gpus=1)
    driver.runs("x")
    driver.reports("x", 400, rate=2.0)
    driver.exits("x", code)
    life = SimpleNamespace(machine=driver.machine, speed=1.0, run=SimpleNamespace(id="r"))
    (found,) = _finished(life, {})
    assert (found.name, found.steps) == ("x", kept)


@pytest.mark.parametrize(("steps", "code"), [(None, 0), (100, 1)])
def test_a_program_that_tells_no_steps_has_none(steps, code):
    driver = Driver(a_job("x", steps=steps, retries=0), gpus=1)
    driver.runs("x")
    driver.exits("x", code)
    life = SimpleNamespace(machine=driver.machine, speed=1.0, run=SimpleNamespace(id="r"))
    (found,) = _finished(life, {})
    assert found.steps is None


def test_memory_is_that_of_the_job_alone_and_none_where_none_was_seen():
    driver = Driver(a_job("x"), a_job("y"), a_job("z"), gpus=3)
    driver.runs("x", "y", "z")
    for name in "xyz":
        driver.exits(name, 0)
    life = SimpleNamespace(machine=driver.machine, speed=1.0, run=SimpleNamespace(id="r"))
    seen = [JobUse(job=1, memory_mib=1.5), JobUse(job=2, cpu_over_s=20.0), JobUse(job=0, memory_mib=9.0)]
    finished = _finished(life, {(use.job, use.shared): use for use in seen})
    assert [job.max_rss_bytes for job in finished] == [3 * 2**19, None, None]


def test_a_run_whose_measurements_cannot_be_read_is_recorded_all_the_same(tmp_path, capsys):
    assert _used(tmp_path) == {}
    append(RunDir(tmp_path).job_use, [JobUse(job=1, cpu_over_s=20.0, memory_mib=2.0)])
    assert _used(tmp_path)[1, False].memory_mib == 2.0
    RunDir(tmp_path).job_use.unlink()
    RunDir(tmp_path).job_use.mkdir()
    assert _used(tmp_path) == {} and "has no MaxRSS" in capsys.readouterr().err
