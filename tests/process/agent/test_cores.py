"""Real runs of jobs on CPU cores: they start at once, grow while they train, and survive what happens to
them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from livebench import SAVES, Bench, job

from hpcsched.core.model import Ended
from hpcsched.core.reasons import Why

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAINER = '''
import os, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Slow(Trainer):
    """A step costs a few milliseconds of a core on each worker, until the file `go` is there."""

    def build(self, args):
        model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).double()
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(240, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 3, (240,), generator=generator)
        seen = open(f"seen.{os.environ['HPCSCHED_JOB_ID']}.{os.getpid()}", "a", buffering=1)

        def loss(model, batch):
            if not os.environ.get("HPCSCHED_JOINING") or getattr(self, "rehearsed", False):
                seen.write(" ".join(map(str, batch[2].tolist())) + "\\n")
            self.rehearsed = True
            end = time.process_time() + (0 if os.path.exists("go") else 0.004)
            while time.process_time() < end:
                pass
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return Parts(model=model, optimizer=optimizer, dataset=(x, y, torch.arange(240)), global_batch=12,
                     loss=loss)
'''

STEPS = 1200


@pytest.fixture
def place(bench: Bench) -> Bench:
    (bench.folder / "slow.py").write_text(TRAINER)
    return bench


def on_cores(name: str = "x", cpus: float = 2, **keys: Any) -> str:
    options = {key: keys.pop(key) for key in ("servers", "workers", "start", "staleness") if key in keys}
    strategy = {"kind": "ps", "cpus": cpus, **options}
    return job(name, trainer="slow:Slow", strategy=strategy, **{"steps": STEPS, **keys})


def go(place: Bench) -> None:
    (place.folder / "go").touch()


def samples(place: Bench, job_id: int = 1) -> list[int]:
    """What all workers of a job were given, in all."""
    files = place.folder.glob(f"seen.{job_id}.*")
    return sorted(int(word) for path in files for word in path.read_text().split())


def cores(place: Bench, name: str) -> float:
    told = place.job(name).get("cores") or {}
    return round(sum(told.get("servers", [])) + sum(told.get("workers", [])), 2)


def trains(place: Bench, steps: int) -> None:
    place.until(lambda: (place.job("x").get("step") or 0) > steps, "trains")


EACH_ONCE = sorted(list(range(240)) * (STEPS * 12 // 240))


@pytest.mark.slow
def test_three_jobs_start_at_once_and_grow_without_a_restart(place: Bench) -> None:
    jobs = [on_cores(name, steps=STEPS) for name in "abc"]
    agent = place.start(place.set_of(*jobs), "--devices", "cpu:2")
    place.ready("a", "b", "c")
    assert [place.job(name)["cores"]["budget"] for name in "abc"] == [2.0] * 3
    place.until(lambda: any(cores(place, name) > 0.4 for name in "abc"), "one has grown")
    table = place("status", "-o", "%i %b %C %W").stdout.split("\n")
    assert table[0].split() == ["JOBID", "GPUS", "CPUS", "WORKERS"]
    assert all(line.split()[1].endswith("c") and "1+" in line for line in table[1:4])
    assert place.listening() == {"127.0.0.1"}
    go(place)
    assert agent.wait() == 0, agent.said
    for job_id in (1, 2, 3):
        assert samples(place, job_id) == EACH_ONCE
    machine, _ = place.replayed()
    grown = [j for j in machine.run.jobs.values() if any(a.ended is Ended.RESIZED for a in j.attempts)]
    assert grown and all(j.suspensions == j.failures == 0 for j in machine.run.jobs.values())
    first, second, *_ = grown[0].attempts
    assert first.why is not None and first.why.why is Why.SEATED
    assert second.why is not None and str(second.why) in place("explain", grown[0].id).stdout
    assert first.usage is not None and first.usage.rate > 0


@pytest.mark.slow
def test_a_suspended_job_goes_on_with_what_it_had_found(place: Bench) -> None:
    agent = place.start(place.set_of(on_cores(start=0.5, workers=1)), "--devices", "cpu:2")
    place.ready("x")
    trains(place, 20)
    assert place("suspend", "x").returncode == 0
    place.until(lambda: place.states()["x"] == "SUSPENDED", "saved")
    place.until(lambda: all(gpu["job"] is None for gpu in place.status()["gpus"]), "slots are free")
    assert place("resume", "x").returncode == 0
    place.ready("x")
    go(place)
    assert agent.wait() == 0, agent.said
    assert samples(place) == EACH_ONCE
    machine, _ = place.replayed()
    assert machine.run.jobs[1].repeated == 0 and machine.run.jobs[1].suspensions == 1


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_step(place: Bench) -> None:
    agent = place.start(place.set_of(on_cores(start=0.5)), "--devices", "cpu:2")
    place.ready("x")
    trains(place, 20)
    machine, _ = place.replayed()
    pid, _ = machine.run.jobs[1].processes[2]
    os.kill(pid, signal.SIGKILL)
    place.until(lambda: place.job("x").get("attempt", 1) > 1 and place.job("x").get("ready"), "again")
    go(place)
    assert agent.wait() == 0, agent.said
    machine, _ = place.replayed()
    job = machine.run.jobs[1]
    assert [a.ended for a in job.attempts] == [Ended.FAILED, Ended.COMPLETED]
    assert job.attempts[1].from_step >= 20 and job.repeated <= 1


@pytest.mark.slow
def test_a_server_that_is_killed_costs_what_was_done_since_the_last_checkpoint(place: Bench) -> None:
    jobs = on_cores(start=0.5, servers=2, workers=1, checkpoint_every=1)
    agent = place.start(place.set_of(jobs), "--devices", "cpu:2")
    place.until(lambda: (place.dir / "jobs/1/STATE.json").exists(), "a checkpoint")
    machine, _ = place.replayed()
    pid, _ = machine.run.jobs[1].processes[1]
    os.kill(pid, signal.SIGKILL)
    place.until(lambda: place.job("x").get("attempt", 1) > 1 and place.job("x").get("ready"), "again")
    go(place)
    assert agent.wait() == 0, agent.said
    machine, _ = place.replayed()
    assert machine.run.jobs[1].attempts[1].from_step > 0 and machine.run.jobs[1].failures == 0


@pytest.mark.slow
def test_a_drained_run_goes_on_with_its_cores_in_the_next_life(place: Bench) -> None:
    jobs = place.set_of(on_cores(start=0.5))
    agent = place.start(jobs, "--devices", "cpu:2")
    place.ready("x")
    trains(place, 10)
    agent.kill(signal.SIGTERM)
    assert agent.wait() == 75, agent.said
    assert place.all_gone()
    go(place)
    again = place.start(jobs, "--devices", "cpu:2", "--resume")
    assert again.wait() == 0, again.said
    assert samples(place) == EACH_ONCE


SPINS = SAVES.format(pause=0).replace(
    "sleep 0;", 'i=0; [ -e "$OLDPWD/go" ] || while [ $i -lt 20000 ]; do i=$((i + 1)); done;'
)
"""Never waits for anything."""


def test_a_program_that_is_held_saves_when_it_is_asked_to_and_ends_with_its_agent(place: Bench) -> None:
    jobs = place.set_of(job("x", SPINS, steps=500, strategy={"kind": "cpu", "cpus": 0.3}))
    agent = place.start(jobs, "--devices", "cpu:2")
    place.ready("x")
    trains(place, 10)
    assert cores(place, "x") == 0.3 and "keeps these cores" in place("explain", "x").stdout
    assert place("suspend", "x").returncode == 0
    place.until(lambda: place.states()["x"] == "SUSPENDED", "saved")
    assert place("resume", "x").returncode == 0
    place.ready("x")
    go(place)
    agent.kill()  # nobody is left who would let it go on
    assert agent.wait() == -signal.SIGKILL
    again = place.start(jobs, "--devices", "cpu:2", "--resume")
    assert again.wait() == 0, again.said
    assert place.all_gone()
    machine, _ = place.replayed()
    (seats,) = {attempt.seats for attempt in machine.run.jobs[1].attempts}
    assert [seat.share for seat in seats] == [0.3]
    assert [a.ended for a in machine.run.jobs[1].attempts] == [Ended.SUSPENDED, Ended.LOST, Ended.COMPLETED]
    assert machine.run.jobs[1].attempts[1].from_step > 10


def test_what_cannot_be_is_refused_in_one_line(place: Bench) -> None:
    for options, told in (
        ({"cpus": 0.2}, "cpus"),
        ({"cpus": 100}, "cores to start with"),
        ({"staleness": -1}, "staleness"),
        ({"servers": 9, "workers": 9}, "at least 0.1 cores a process"),
    ):
        strategy = {"kind": "ps", "cpus": 1, **options}
        refused = place(
            "run", place.set_of(job("x", trainer="slow:Slow", strategy=strategy)), "--devices", "cpu:2"
        )
        assert refused.returncode == 2, refused.stderr
        assert told in refused.stderr and len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    assert not Path(place.dir / "journal.jsonl").exists()
