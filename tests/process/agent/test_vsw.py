"""Real runs of adaptive jobs: they grow and shrink by what they measure, and people see how it goes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from livebench import Bench, job

from hpcsched.core import events as ev
from hpcsched.store import journal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAINER = '''
import os, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Slow(Trainer):
    """A sample takes two milliseconds, which no two ranks share, until the file `go` is there."""

    calls = 0

    def build(self, args):
        model = nn.Linear(6, 3).double()
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(240, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 3, (240,), generator=generator)
        seen = open(f"seen.{os.getpid()}", "a", buffering=1)

        def loss(model, batch):
            self.calls += 1
            if self.calls > 1 or not os.environ.get("HPCSCHED_JOINING"):  # who joins rehearses first
                seen.write(" ".join(map(str, batch[2].tolist())) + "\\n")
            if not os.path.exists("go"):
                time.sleep(0.002 * len(batch[0]))
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Parts(model=model, optimizer=optimizer, dataset=(x, y, torch.arange(240)), global_batch=12,
                     loss=loss)
'''

STEPS = 1200
STRATEGY = {
    "kind": "vsw",
    "local_batch": 2,
    "global_batch": [12, 48],
    "similarity": 0.99,
    "every": 10,
    "rate": 0.2,
}


@pytest.fixture
def place(bench: Bench) -> Bench:
    (bench.folder / "slow.py").write_text(TRAINER)
    bench.env["HPCSCHED_WARM"] = "off"  # for so few ranks, warm processes cost more than they save
    return bench


def adaptive(**keys: Any) -> str:
    return job("x", trainer="slow:Slow", steps=STEPS, strategy=STRATEGY, **keys)


def go(place: Bench) -> None:
    (place.folder / "go").touch()


def samples(place: Bench) -> list[int]:
    """What all ranks were given, in all."""
    files = place.folder.glob("seen.*")
    return sorted(int(word) for path in files for word in path.read_text().split())


EACH_ONCE = sorted(list(range(240)) * (STEPS * 12 // 240))


def test_a_job_grows_by_what_it_has_measured_and_gives_way_to_the_next_one(place: Bench) -> None:
    agent = place.start(place.set_of(adaptive()), "--devices", "cpu:2")
    place.until(lambda: len(place.job("x").get("gpus", [])) == 2, "grown")
    batching = place.until(
        lambda: (
            len((place.job("x").get("batching") or {}).get("workers", [])) == 2 and place.job("x")["batching"]
        )
    )
    assert batching["local_batch"] == 2
    assert place.listening() == {"127.0.0.1"}
    assert sum(batching["workers"]) * 2 == batching["global_batch"] >= 12
    assert place("submit", place.set_of(job("next", "sleep 1", gpus=1), name="next.toml")).returncode == 0
    place.until(lambda: place.states().get("next") == "RUNNING", "the next one runs")
    assert len(place.job("x")["gpus"]) == 1
    place.until(lambda: place.states().get("next") == "COMPLETED", "the next one is done")
    place.until(lambda: len(place.job("x")["gpus"]) == 2, "grown again")
    go(place)
    assert agent.wait() == 0, agent.said
    assert samples(place) == EACH_ONCE
    told = place("explain", "x").stdout
    assert "proposes 2 CPU slots (it has 1) for its next epoch" in told
    assert "grown from 1 to 2 CPU slots, as nothing waits" in told
    assert "shrunk from 2 to 1 CPU slot, which it had before nothing waited" in told
    machine, _ = place.replayed()
    assert str(machine.run.jobs[1].state) == "COMPLETED"
    proposals = [e for e, _ in journal.read(place.rundir.journal) if isinstance(e, ev.ScalingProposed)]
    assert proposals[0].rates[2] > 1.3 * proposals[0].rates[1]
    assert proposals[0].batch >= 12


@pytest.mark.slow
def test_status_shows_batch_similarity_and_workers(place: Bench) -> None:
    agent = place.start(place.set_of(adaptive(gpus=1)), "--devices", "cpu:1")
    place.until(lambda: (place.job("x").get("batching") or {}).get("global_batch", 0) > 12, "a larger batch")
    table = place("status", "-o", "%i %B %W %y").stdout.splitlines()
    assert table[0].split() == ["JOBID", "BATCH", "WORKERS", "SIMILARITY"]
    _, batch, workers, similarity = table[1].split()
    assert int(batch) > 12
    assert workers == f"{int(batch) // 2}x2"
    assert -1 <= float(similarity) <= 1
    shown = place("explain", "x").stdout
    assert "now: a global batch of" in shown
    assert "workers with 2 samples" in shown
    go(place)
    assert agent.wait() == 0, agent.said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drained", "killed"])
def test_the_batch_goes_on_where_it_was(place: Bench, how: str) -> None:
    """After a stop and a new agent, and after the death of a rank."""
    agent = place.start(place.set_of(adaptive(gpus=1, checkpoint_every=0.2)), "--devices", "cpu:1")
    place.until(lambda: (place.job("x").get("batching") or {}).get("global_batch", 0) >= 24, "a larger batch")
    if how == "drained":
        agent.kill(signal.SIGTERM)
        assert agent.wait() == 75
        agent = place.start("--resume", "--devices", "cpu:1")
    else:
        (pid,) = [process for process in place.live_workers() if _is_rank(process)]
        os.kill(pid, signal.SIGKILL)
    place.until(
        lambda: place.job("x").get("attempt") == 2 and place.job("x").get("batching"), "the next attempt"
    )
    go(place)
    assert agent.wait() == 0, agent.said
    lines = (place.dir / "jobs" / "1" / "batches.jsonl").read_text().splitlines()
    again = [line for line in map(json.loads, lines) if line["attempt"] == 2]
    assert again[0]["global_batch"] >= 20
    state = json.loads((place.dir / "jobs" / "1" / "STATE.json").read_text())
    assert (state["step"], state["samples"]) == (STEPS, STEPS * 12)
    if how == "drained":
        assert samples(place) == EACH_ONCE


def _is_rank(pid: int) -> bool:
    try:
        return b"HPCSCHED_RANK=0" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({**STRATEGY, "global_batch": [48, 12]}, "strategy.global_batch: [48, 12]"),
        ({**STRATEGY, "local_batch": 0}, "strategy.local_batch: 0"),
        ({"kind": "vsw"}, "strategy.local_batch: not given"),
        ({**STRATEGY, "evry": 3}, "strategy.evry: unknown option"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    place: Bench, strategy: dict[str, Any], message: str
) -> None:
    path = place.set_of(job("x", trainer="slow:Slow", steps=10, strategy=strategy))
    done = place("run", path, "--devices", "cpu:1")
    assert done.returncode == 2
    assert message in done.stderr
    assert not place.dir.exists()


ENDS = '''
import os
from slow import Slow as Usual

class Slow(Usual):
    """Says at the end where each rank was, and what was learnt."""

    def build(self, args):
        parts = super().build(args)
        told = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
        with open(f"ranks.{os.environ['HPCSCHED_JOB_NAME']}", "a") as file:
            file.write(" ".join([*told, os.environ["WORLD_SIZE"]]) + "\\n")
        parts.evaluate = lambda model: {f"w{i}": x for i, x in enumerate(model.weight.flatten().tolist())}
        return parts
'''


def wide_and_one(place: Bench) -> Path:
    """A set in which `wide` finds one slot free on the first of two hosts with three, and three on the other;
    then the same is trained on one slot."""
    (place.folder / "wide.py").write_text(ENDS)
    about = {"trainer": "wide:Slow", "steps": 200, "strategy": {"kind": "vsw", "local_batch": 2}}
    return place.set_of(
        job("other", "until test -e go; do sleep 0.05; done", gpus=2),
        job("wide", gpus=2, nodes=2, checkpoint_every=0.2, **about),
        job("one", gpus=1, after=["wide"], **about),
    )


TWO_HOSTS = ("--hosts", "a,b", "--launcher", "local")


def learnt_the_same(place: Bench) -> None:
    wide, one = (place.job(name)["metrics"] for name in ("wide", "one"))
    assert wide.keys() == one.keys() and len(wide) == 18
    assert all(abs(wide[name] - one[name]) < 1e-12 for name in one), (wide, one)
    assert samples(place) == sorted(list(range(240)) * (2 * 200 * 12 // 240)), "each job each once an epoch"
    machine, _ = place.replayed()
    assert {str(job.state) for job in machine.run.jobs.values()} == {"COMPLETED"}


UNEVEN = ["0 0 1 0 4", "1 0 3 1 4", "2 1 3 1 4", "3 2 3 1 4"]
"""Rank, local rank, ranks on its host, host, and all ranks."""


def ranks_of(place: Bench) -> list[str]:
    return (place.folder / "ranks.wide").read_text().splitlines()


@pytest.mark.slow
def test_hosts_give_it_unequally_many_slots_and_it_learns_the_same(place: Bench) -> None:
    agent = place.start(wide_and_one(place), "--devices", "cpu:3", *TWO_HOSTS)
    place.until(lambda: place.job("wide").get("batching"), "it trains")
    assert len(place.job("wide")["gpus"]) == 4
    go(place)
    assert agent.wait() == 0, agent.said
    assert sorted(ranks_of(place)) == UNEVEN
    told = place("explain", "wide").stdout
    assert "its hosts have unequally many CPU slots free: it gets 1 on a, 3 on b" in told
    learnt_the_same(place)


@pytest.mark.slow
def test_it_goes_on_where_hosts_give_equally_many(place: Bench) -> None:
    agent = place.start(wide_and_one(place), "--devices", "cpu:3", *TWO_HOSTS)
    place.until(lambda: (place.job("wide").get("step") or 0) > 3, "it trains")
    agent.kill(signal.SIGTERM)
    assert agent.wait() == 75
    assert sorted(ranks_of(place)) == UNEVEN
    go(place)
    agent = place.start("--resume", "--devices", "cpu:2", *TWO_HOSTS)
    assert agent.wait() == 0, agent.said
    assert sorted(ranks_of(place)[4:]) == ["0 0 2 0 4", "1 1 2 0 4", "2 0 2 1 4", "3 1 2 1 4"]
    learnt_the_same(place)
