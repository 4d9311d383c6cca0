"""status.json: what changed is written again, and only that; readers see all of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from hpcsched.cli.jobs.columns import columns_of, samples_of, table
from hpcsched.cli.jobs.status import silent_gpus
from hpcsched.core import events as ev
from hpcsched.core.needs import Needs
from hpcsched.core.plan import Plan
from hpcsched.core.reasons import Reason, Why
from hpcsched.errors import NoSuchRun, StoreError
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import SnapshotWriter
from hpcsched.store.status import NO_REASON, GpuStatus, Idle, MeasuredGpu, read_status
from hpcsched.testing.builders import Driver, a_job, a_profile

PROFILES = (a_profile("m", [1, 2, 3, 2.5]), a_profile("wide", [1, 2, 3, 4, 5, 6]))


@pytest.fixture
def rundir(tmp_path):
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    return rundir


class Watched:
    """A machine driven by hand whose snapshot is written after every step."""

    def __init__(self, rundir, *specs, **rest):
        self.driver = Driver(*specs, profiles=PROFILES, **rest)
        self._rundir = rundir
        self._writer = self.new_writer()

    def new_writer(self):
        return SnapshotWriter(
            self._rundir,
            self.driver.machine,
            allocation={"kind": "local", "id": None},
            speed=1.0,
            user="me",
        )

    def jobs(self):
        """The jobs in the file, by name; what was kept must be what would be written anew."""
        kept = self._read(self._writer)
        self.driver.machine.run.changed.update(self.driver.machine.run.jobs)
        fresh = self._read(self.new_writer()).jobs
        for old, new in zip(kept.jobs, fresh, strict=True):
            # The count of free GPUs in it is that of when it was first to wait.
            old.detail = new.detail if old.reason == "Resources" else old.detail
        assert kept.jobs == fresh
        return {job.name: job for job in kept.jobs}

    def _read(self, writer):
        writer.write("STOPPED", self.driver.now)
        return read_status(self._rundir)


def test_it_is_up_to_date_after_every_step(rundir):
    watched = Watched(rundir, a_job("a", "m"), a_job("b", "wide"), promote="always")
    driver = watched.driver
    driver.submit(a_job("c", "m", after=("a", "b")), a_job("d", "m", gpus=6), a_job("e", "m", submit_at=90.0))
    steps = [
        lambda: driver.runs("a", "b"),
        lambda: driver.reports("a", 10, rate=2.0),
        lambda: driver.hold("d"),
        lambda: driver.suspend("a"),
        lambda: driver.leaves("a", 20),
        lambda: driver.release("d"),
        lambda: driver.leaves("b", 5),
        lambda: driver.resume("a"),
        lambda: driver.runs("a", "b"),
        lambda: driver.exits("b", 0),
        lambda: driver.lose(5),
        lambda: driver.ring("arrival", "e"),
        lambda: driver.cancel("e"),
        lambda: driver.drain(),
        lambda: driver.start_agent(3, {1: 30}),
        lambda: driver.exits("a", 0) if driver.job("a").state.active else None,
    ]
    watched.jobs()
    for step in steps:
        driver.now += 1.0
        step()
        jobs = watched.jobs()
        assert list(jobs) == ["a", "b", "c", "d", "e"]
        for job in driver.machine.run.jobs.values():
            assert jobs[job.spec.name].state == job.state


def test_what_a_reader_sees_of_a_job(rundir):
    watched = Watched(rundir, a_job("a", "m", 100), a_job("b", "m", gpus=6), a_job("c", "m", submit_at=50.0))
    watched.driver.runs("a")
    watched.driver.now = 20.0
    watched.driver.reports("a", 40, rate=2.0)
    jobs = watched.jobs()
    a, b, c = jobs.values()
    assert (a.state, a.role, a.gpus, a.hosts) == ("RUNNING", "primary", [0, 1, 2], ["n1"])
    assert (a.step, a.steps, a.elapsed_s, a.eta_s, a.attempt, a.ready) == (40, 100, 20.0, 30.0, 1, True)
    assert (b.state, b.reason, b.gpus, b.step) == ("PENDING", "Resources", [], None)
    assert b.detail == "waits for GPUs: needs 6, 3 free"
    assert (c.reason, c.user, c.submit_s) == ("BeginTime", "me", 50.0)


def test_a_job_that_is_over_keeps_the_hosts_it_ran_on_and_has_a_reason(rundir):
    needs = Needs(time_s=5400.0)
    watched = Watched(rundir, a_job("a", "m", needs=needs), a_job("b", "m", nodes=2, gpus=6), hosts=2)
    watched.driver.runs("a")
    watched.driver.exits("a", 0)
    watched.driver.now += 1.0
    there = [replace(device, host="other") for device in watched.driver.machine.ledger.devices.values()]
    watched.driver.start_agent(0, devices=there)
    a, b = watched.jobs().values()
    assert (a.state, a.hosts, a.reason, a.why, a.gpus) == ("COMPLETED", ["n1"], NO_REASON, "", [])
    shown = table([a, b], columns_of("%j %l %D %R"), header=False).splitlines()
    assert [line.split()[:4] for line in shown] == [
        ["a", "1:30:00", "1", "n1"],
        ["b", "-", "2", f"({b.reason})"],
    ]


def test_how_busy_the_gpus_of_a_job_are(rundir):
    watched = Watched(rundir, a_job("a", "m", gpus=3), a_job("b", "m", gpus=1))
    seen = [
        GpuStatus(index=i, host="n1", job=None, lane="", utilisation=u, memory_mib=None)
        for i, u in enumerate((0.5, 0.9, None))
    ]
    text = table(list(watched.jobs().values()), columns_of("%j %U"), header=True, samples=samples_of(seen))
    assert [line.split() for line in text.splitlines()] == [["NAME", "UTIL"], ["a", "70%"], ["b", "-"]]


def test_the_reason_of_the_first_in_the_queue_moves_on(rundir):
    watched = Watched(rundir, a_job("a", "m"), a_job("b", "m", gpus=6), a_job("c", "m", gpus=6))
    assert [job.reason for job in watched.jobs().values()] == [None, "Resources", "Priority"]
    watched.driver.hold("b")
    assert [job.reason for job in watched.jobs().values()] == [None, "JobHeldUser", "Resources"]


def test_a_background_job_is_too_late_by_time_alone(rundir):
    watched = Watched(rundir, a_job("a", "m"), a_job("b", "m", background=True), gpus=1, deadline=1000.0)
    assert watched.jobs()["b"].reason == "NoLane"
    watched.driver.now = 950.0
    watched.driver.machine.run.advance(950.0)
    assert watched.jobs()["b"].reason == "WalltimeTooShort"


def test_one_that_is_set_aside_again_says_so(rundir):
    """Its story ends with that already."""
    specs = (a_job("a", "m"), a_job("b", "m", gpus=6), a_job("c", "m", gpus=6))
    watched = Watched(rundir, *specs, deadline=1000.0)
    machine, c = watched.driver.machine, watched.driver.job("c")
    for _ in range(2):
        assert watched.jobs()["c"].reason == "Priority"
        machine.waiting.set_aside(c, Reason(Why.WALLTIME_TOO_SHORT, {"need": 9.0, "left": 5.0}))
        assert watched.jobs()["c"].reason == "WalltimeTooShort"
        machine.waiting.late.clear()
        machine.waiting.enqueue(c)


def test_the_first_in_the_queue_is_told_how_many_gpus_are_free(rundir):
    watched = Watched(rundir, a_job("a", "m"), a_job("b", "m", gpus=2), a_job("c", "m", gpus=6))
    writer = watched.new_writer()
    for free in (1, 3):
        writer.write("STOPPED", 0.0)
        (c,) = (job for job in read_status(rundir).jobs if job.name == "c")
        assert c.detail == f"waits for GPUs: needs 6, {free} free"
        watched.driver.exits("b", 0) if free == 1 else None


def test_what_a_plan_keeps_waiting_is_told_so_as_long_as_gpus_are_free(rundir):
    specs = (
        a_job("a", "m", gpus=4),
        a_job("b", "m", gpus=6),
        a_job("c", "m", gpus=6),
        a_job("d", "m", gpus=2),
    )
    watched = Watched(rundir, *specs, policy="exclusive")
    machine = watched.driver.machine
    assert [job.reason for job in watched.jobs().values()] == [None, "Resources", "Priority", "Priority"]
    plan = Plan(at=0.0, rule="list", order=(2, 3, 4), caps={}, ends={}, slack_s={}, latest={}, news=0)
    machine.run.plan = plan
    assert [job.reason for job in watched.jobs().values()] == [None, "Resources", "Priority", "Plan"]
    watched.driver.lose(5)
    assert watched.jobs()["d"].reason == "Priority"  # one GPU is free
    machine.run.plan = replace(plan, order=(2, 3))
    assert watched.jobs()["d"].reason == "Priority"


def test_no_snapshot_and_a_broken_one(rundir):
    with pytest.raises(NoSuchRun):
        read_status(rundir)
    rundir.status.write_bytes(b'{"schema": 1')
    with pytest.raises(StoreError, match="cannot be understood"):
        read_status(rundir)


def test_a_lost_gpu_is_named(rundir):
    watched = Watched(rundir, a_job("a", "m"))
    watched.driver.tell(ev.DeviceLost, gpu=5, why="Xid 79")
    watched.jobs()
    status = read_status(rundir)
    assert status.run.lost_gpus == {"5": "Xid 79"}
    assert [gpu.index for gpu in status.gpus] == [0, 1, 2, 3, 4]
    assert [gpu.job for gpu in status.gpus] == [1, 1, 1, None, None]


def test_what_is_known_of_a_gpu_and_what_is_not(rundir):
    watched = Watched(rundir, a_job("a", "m"))
    writer = watched.new_writer()
    writer.samples = {
        0: MeasuredGpu(utilisation=0.5, memory_mib=1024.0),
        1: MeasuredGpu(sample_age_s=36.0),
        2: MeasuredGpu(sample_age_s=156.0, health="unknown"),
    }
    writer.write("STOPPED", 0.0)
    gpus = msgspec.json.decode(rundir.status.read_bytes())["gpus"]
    seen = [{key: gpu[key] for key in gpu.keys() - {"index", "host", "job", "lane"}} for gpu in gpus[:4]]
    assert seen == [
        {"utilisation": 0.5, "memory_mib": 1024.0},
        {"utilisation": None, "memory_mib": None, "sample_age_s": 36.0},
        {"utilisation": None, "memory_mib": None, "sample_age_s": 156.0, "health": "unknown"},
        {"utilisation": None, "memory_mib": None},
    ]
    found = read_status(rundir)
    assert [gpu.health for gpu in found.gpus[:3]] == ["ok", "ok", "unknown"]
    assert silent_gpus(found) == [
        "no sample of GPU 1 for 0:36: the driver does not answer",
        "no sample of GPU 2 for 2:36: the driver does not answer; its health is unknown",
    ]


def test_a_job_that_was_resized_in_place_says_so(rundir):
    watched = Watched(rundir, a_job("a", "m"), a_job("b", "wide", 1000), promote="always")
    watched.driver.runs("a", "b", in_place=True)
    assert [job.resizes for job in watched.jobs().values()] == [0, 0]
    watched.driver.exits("a", 0)
    watched.driver.resized("b", 40)
    b = watched.jobs()["b"]
    assert (b.resizes, b.suspensions, b.attempt) == (1, 0, 2)
    page = msgspec.json.decode(rundir.status.read_bytes())
    assert [job.pop("resizes") for job in page["jobs"]] == [0, 1], "also where there were none"
    rundir.status.write_bytes(msgspec.json.encode(page))
    assert [job.resizes for job in read_status(rundir).jobs] == [0, 0], "a page of 0.1.0 has no word of them"


def test_an_agent_is_not_idle_while_a_job_runs(rundir):
    watched = Watched(rundir)
    writer = watched.new_writer()
    writer.idle = Idle(since="2026-01-01T00:00:00Z", until=None)
    writer.write("RUNNING", 0.0)
    assert read_status(rundir).run.idle == writer.idle
    watched.driver.submit(a_job("a", "m"))
    writer.write("RUNNING", 1.0)
    assert read_status(rundir).run.idle is None
