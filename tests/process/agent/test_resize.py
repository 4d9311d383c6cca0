"""Real runs in which jobs are resized in place, and suspended into memory: what users see, what can fail."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import budget
import pytest
from livebench import Agent, Bench, job

from hpcsched.core import events as ev
from hpcsched.store import journal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAINERS = '''
import os, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Talking(torch.optim.SGD):
    """Its steps need the other ranks, if there are any."""

    def step(self, closure=None):
        if int(os.environ["WORLD_SIZE"]) > 1:
            torch.distributed.all_reduce(torch.ones(1))
        return super().step(closure)

class Slow(Trainer):
    """Goes slowly until the file `go` is there; writes down which samples each step was given."""

    def build(self, args):
        if os.environ.get("HPCSCHED_JOINING") and os.path.exists("broken"):
            if open("broken").read() == "hang":
                with open("joining.tmp", "w") as file:
                    file.write(str(os.getpid()))
                os.rename("joining.tmp", "joining")
                time.sleep(600)
            raise ZeroDivisionError("cannot be built")
        model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).double()
        x = torch.randn(50, 6, dtype=torch.float64)
        seen = open(f"seen.{os.environ['HPCSCHED_JOB_NAME']}.{os.getpid()}", "a", buffering=1)

        def loss(model, batch):
            self.calls += 1
            if self.calls > 1 or not os.environ.get("HPCSCHED_JOINING"):  # who joins rehearses first
                seen.write(" ".join(map(str, batch[2].tolist())) + "\\n")
            if not os.path.exists("go"):
                time.sleep(0.1)
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        optimizer = (Talking if os.path.exists("talking") else torch.optim.SGD)(
            model.parameters(), lr=0.1, momentum=0.9)
        return Parts(model=model, optimizer=optimizer,
                     dataset=(x, torch.randint(0, 3, (50,)), torch.arange(50)), global_batch=6, loss=loss)

    calls = 0
'''

STEPS = 400


@pytest.fixture
def place(bench: Bench) -> Bench:
    """Two CPU slots, on which a job of model `big` is fastest on both."""
    (bench.folder / "slow.py").write_text(TRAINERS)
    profile = {
        "model": "big",
        "device": "cpu",
        "throughput": {"1": 10.0, "2": 20.0},
        "unit": "step",
        "source": "measured",
    }
    page = json.dumps({"schema": 1, "profiles": [profile]})
    (bench.folder / "profiles.json").write_text(page)
    return bench


def slow(name: str, **keys: Any) -> str:
    return job(name, trainer="slow:Slow", steps=STEPS, **keys)


def start(place: Bench, *jobs: str, **words: str) -> Agent:
    options = [word for name, value in words.items() for word in (f"--{name}", value)]
    return place.start(
        place.set_of(*jobs),
        "--devices",
        "cpu:2",
        "--profiles",
        place.folder / "profiles.json",
        "--policy-option",
        "promote=always",
        *options,
    )


def samples(place: Bench, name: str) -> list[int]:
    """What all ranks of a job were given, in all."""
    files = place.folder.glob(f"seen.{name}.*")
    return sorted(int(word) for path in files for word in path.read_text().split())


def whole_stream() -> list[int]:
    from hpcsched.worker.session.sampler import Sampler

    return sorted(Sampler(50, 0).batch(0, STEPS * 6).tolist())


def happened(place: Bench, kind: type[ev.Event]) -> list[Any]:
    found = [event for event, _ in journal.read(place.rundir.journal)]
    return [event for event in found if isinstance(event, kind)]


def grew(place: Bench, agent: Agent, ended: str) -> Any:
    """Let `grows` train to its end: its first attempt has ended so, and nothing was lost or done twice."""
    go(place)
    assert agent.wait() == 0, agent.said
    machine, _ = place.replayed()
    grows = machine.run.jobs[machine.run.by_name["grows"]]
    assert [str(a.ended) for a in grows.attempts] == [ended, "completed"]
    assert (grows.suspensions, grows.failures, grows.repeated) == (int(ended == "suspended"), 0, 0)
    assert samples(place, "grows") == whole_stream()
    assert place.all_gone()
    return grows


def go(place: Bench) -> None:
    (place.folder / "go").touch()


@pytest.mark.parametrize("optimizer", ["plain", budget.slow("talking")])
def test_a_promotion_happens_while_the_job_trains(place: Bench, optimizer: str) -> None:
    (place.folder / optimizer).touch()
    agent = start(place, slow("short", gpus=1), slow("grows", model="big"))
    place.ready("short", "grows")
    assert place.listening() == set()
    assert place("cancel", "short").returncode == 0
    place.until(lambda: place.job("grows").get("gpus") == [1, 0] or len(place.job("grows")["gpus"]) == 2)
    place.until(lambda: place.job("grows")["attempt"] == 2, "resized")
    assert place.listening() == {"127.0.0.1"}
    grows = grew(place, agent, "resized")
    (resized,) = happened(place, ev.WorkersResized)
    assert resized.stopped_s is not None and resized.built_s is not None
    assert [len(a.gpus) for a in grows.attempts] == [1, 2]
    assert grows.attempts[0].end_s == grows.attempts[1].start_s
    told = place("explain", "grows").stdout
    assert "resized in place from 1 to 2 CPU slots" in told
    assert "stood still for" in told


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crash", "killed"])
def test_a_rank_that_cannot_join_leads_to_a_restart(place: Bench, how: str) -> None:
    (place.folder / "broken").write_text("crash" if how == "crash" else "hang")
    agent = start(place, slow("short", gpus=1), slow("grows", model="big"))
    place.ready("short", "grows")
    assert place("cancel", "short").returncode == 0
    if how == "killed":
        os.kill(joining(place), signal.SIGKILL)
    place.until(lambda: happened(place, ev.ResizeFailed), "the failure")
    place.until(
        lambda: place.job("grows")["state"] == "RUNNING" and len(place.job("grows")["gpus"]) == 2, "restarted"
    )
    grew(place, agent, "suspended")


def joining(place: Bench) -> int:
    """The process of a rank that is being built, and never will be."""
    told = place.folder / "joining"
    place.until(told.exists, "a joining rank")
    return int(told.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("command", ["suspend", "cancel", "drain"])
def test_what_else_is_wanted_of_a_job_goes_before_its_resize(place: Bench, command: str) -> None:
    (place.folder / "broken").write_text("hang")
    agent = start(place, slow("short", gpus=1), slow("grows", model="big"))
    place.ready("short", "grows")
    assert place("cancel", "short").returncode == 0
    rank = joining(place)
    words = [command] if command == "drain" else [command, "grows"]
    assert place(*words).returncode == 0
    if command == "suspend":
        place.until(lambda: place.job("grows")["state"] == "SUSPENDED", "suspended")
        assert not Path(f"/proc/{rank}").exists()
        (place.folder / "broken").unlink()
        go(place)
        assert place("resume", "grows").returncode == 0
    code = agent.wait()
    assert code == {"suspend": 0, "cancel": 0, "drain": 75}[command], agent.said
    assert place.all_gone()
    if command == "drain":
        (place.folder / "broken").unlink()
        go(place)
        assert place.start("--resume", "--devices", "cpu:2").wait() == 0
    if command != "cancel":
        assert samples(place, "grows") == whole_stream()


@pytest.mark.slow
def test_a_job_that_ends_while_a_rank_is_to_join_has_simply_ended(place: Bench) -> None:
    (place.folder / "broken").write_text("hang")
    agent = start(place, slow("short", gpus=1), slow("grows", model="big"))
    place.ready("short", "grows")
    assert place("cancel", "short").returncode == 0
    joining(place)
    go(place)
    assert agent.wait() == 0, agent.said
    assert [failed.error for failed in happened(place, ev.ResizeFailed)] == ["it ended first"]
    assert samples(place, "grows") == whole_stream()
    assert place.all_gone()


def test_a_suspend_is_into_memory_and_then_onto_disk(place: Bench) -> None:
    agent = start(place, slow("one", gpus=1), slow("other", gpus=1))
    place.ready("one", "other")
    folder = place.dir / "jobs" / "1"
    for times in (1, 2):
        place.until(lambda: (place.job("one")["step"] or 0) > 3 * times, "some steps")  # noqa: B023
        assert place("suspend", "one").returncode == 0
        place.until(lambda: place.job("one")["state"] == "SUSPENDED", "suspended")
        exited = happened(place, ev.WorkersExited)[-1]
        place.until(lambda: not list(folder.glob("held.*")), "durable")
        state = json.loads((folder / "STATE.json").read_text())
        assert state["step"] == exited.saved_step > 0
        assert place("resume", "one").returncode == 0
        place.ready("one")
    go(place)
    assert agent.wait() == 0, agent.said
    machine, _ = place.replayed()
    one = machine.run.jobs[1]
    assert (one.suspensions, one.repeated, one.failures) == (2, 0, 0)
    assert samples(place, "one") == samples(place, "other") == whole_stream()
    assert place.all_gone()


@pytest.mark.slow
def test_a_state_that_never_came_to_disk_is_lost_with_its_agent_and_counted(place: Bench) -> None:
    """The job goes on from the checkpoint before."""
    agent = start(place, slow("one", gpus=1), slow("other", gpus=1))
    place.ready("one", "other")
    assert place("suspend", "one").returncode == 0
    folder = place.dir / "jobs" / "1"
    place.until(lambda: (folder / "STATE.json").exists(), "the first checkpoint")
    place.until(lambda: not list(folder.glob("held.*")), "durable")
    saved = json.loads((folder / "STATE.json").read_text())["step"]
    assert place("resume", "one").returncode == 0
    place.ready("one")
    # From here on no checkpoint can be written.
    checkpoints = folder / "checkpoint"
    checkpoints.rename(folder / "kept")
    checkpoints.write_text("in the way")
    place.until(lambda: (place.job("one")["step"] or 0) > saved + 5, "more steps")
    assert place("suspend", "one").returncode == 0
    place.until(lambda: place.job("one")["state"] == "SUSPENDED", "suspended into memory")
    place.until(lambda: not list(folder.glob("held.*")), "given up")
    assert "could not be saved" in place.output()
    agent.kill()
    agent.wait()
    checkpoints.unlink()
    (folder / "kept").rename(checkpoints)
    held = happened(place, ev.WorkersExited)[-1].saved_step
    assert held > saved
    go(place)
    agent = place.start("--resume", "--devices", "cpu:2")
    place.until(lambda: place.status()["run"]["agent"]["pid"] == agent.pid, "the next agent")
    assert place("resume", "one").returncode == 0
    assert agent.wait() == 0, agent.said
    machine, _ = place.replayed()
    assert machine.run.jobs[1].repeated == held - saved
    assert machine.run.jobs[1].step == STEPS


@pytest.mark.slow
def test_ranks_join_on_several_hosts_at_once(place: Bench) -> None:
    """There the state travels over the network."""
    page = json.loads((place.folder / "profiles.json").read_text())
    page["profiles"][0]["nodes"] = 2
    (place.folder / "profiles.json").write_text(json.dumps(page))
    jobs = slow("short", gpus=1, nodes=2), slow("grows", model="big", nodes=2)
    agent = start(place, *jobs, hosts="n1,n2", launcher="local")
    place.ready("short", "grows")
    assert place("cancel", "short").returncode == 0
    place.until(lambda: place.job("grows")["attempt"] == 2, "resized")
    assert sorted(place.job("grows")["gpus"]) == [0, 1, 2, 3]
    grew(place, agent, "resized")
