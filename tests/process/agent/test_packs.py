"""Packed jobs under the real agent: one process trains them, and each stays a job of its own."""

from __future__ import annotations

import json
import os
import signal

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from livebench import Bench, job  # noqa: E402

from hpcsched.core.model import Role  # noqa: E402
from hpcsched.worker import load_checkpoint  # noqa: E402

TRAINER = """
import os, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Small(Trainer):
    def build(self, args):
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(60, 6, generator=generator), torch.randint(0, 3, (60,), generator=generator)
        model = nn.Sequential(nn.Linear(6, args.get("width", 12)), nn.ReLU(), nn.Dropout(0.2),
                              nn.Linear(args.get("width", 12), 3))

        def loss(model, batch):
            if os.path.exists(args.get("fails", "never")):
                raise RuntimeError("as was wished")
            if not os.path.exists("go"):
                time.sleep(0.02)
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        print("built with", args, flush=True)
        return Parts(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=args["lr"]),
                     global_batch=args.get("batch", 10), dataset=(x, y), loss=loss,
                     evaluate=lambda model: {"size": float(args.get("width", 12))})
"""


def jobs_of(kind: str, **more: object) -> list[str]:
    strategy: object = {"kind": "packed", "mode": "loop"} if kind == "packed" else kind
    args = [{"lr": 0.01}, {"lr": 0.003, "batch": 15}, {"lr": 0.02, "width": 20}]
    return [
        job(f"{kind}-{i}", trainer="small:Small", gpus=1, strategy=strategy, args={**some, **more}, steps=150)
        for i, some in enumerate(args)
    ]


def test_jobs_of_a_pack_are_suspended_cancelled_and_told_of_one_by_one(bench: Bench) -> None:
    (bench.folder / "small.py").write_text(TRAINER)
    agent = bench.start(bench.set_of(*jobs_of("packed")), "--devices", "cpu:1")
    for i in range(3):
        bench.ready(f"packed-{i}")
    assert bench.listening() == set()
    page = bench.status()
    roles = {j["name"]: j["role"] for j in page["jobs"]}
    assert roles == {"packed-0": "primary", "packed-1": "packed", "packed-2": "packed"}
    told = bench("explain", "packed-1").stdout
    assert "it shares CPU slot 0, where it trains as one with 1 (packed-0), 3 (packed-2)" in told
    bench.until(lambda: (bench.job("packed-1").get("step") or 0) > 3, "some steps")
    assert bench("suspend", "packed-0").returncode == 0  # who holds the GPU: another one inherits it
    bench.until(lambda: bench.states().get("packed-0") == "SUSPENDED", "suspended")
    assert bench("cancel", "packed-2").returncode == 0
    bench.until(lambda: bench.states().get("packed-2") == "CANCELLED", "cancelled")
    bench.until(lambda: bench.job("packed-1")["role"] == "primary", "inherited")
    (bench.folder / "go").touch()
    assert bench("resume", "packed-0").returncode == 0
    assert agent.wait() == 0, bench.output(1) + bench.output(2)
    assert bench.states() == {"packed-0": "COMPLETED", "packed-1": "COMPLETED", "packed-2": "CANCELLED"}
    assert "built with {'lr': 0.003" in bench.output(2), "each job has an output of its own"
    assert bench.job("packed-1")["metrics"] == {"size": 12.0}
    bench.all_gone()


@pytest.mark.slow
def test_who_rides_goes_to_a_gpu_that_nobody_waits_for(bench: Bench) -> None:
    (bench.folder / "small.py").write_text(TRAINER)
    packed = {"trainer": "small:Small", "gpus": 1, "strategy": {"kind": "packed", "mode": "loop"}}
    steps = {"long": 6000, "short": 20, "rider": 6000}
    jobs = [job(name, args={"lr": 0.01}, steps=count, **packed) for name, count in steps.items()]
    agent = bench.start(bench.set_of(*jobs), "--devices", "cpu:2")
    bench.until(lambda: bench.states().get("short") == "COMPLETED", "the short one done")
    bench.until(lambda: bench.job("rider")["role"] == "primary", "the rider has the other GPU")
    bench.ready("rider")
    assert (
        "leaves the 1 that it trains with on CPU slot 0 for a CPU slot that nobody has"
        in bench("explain", "rider").stdout
    )
    (bench.folder / "go").touch()
    assert agent.wait() == 0, bench.output(1) + bench.output(3)
    machine, _ = bench.replayed()
    rider = machine.run.jobs[3]
    assert [attempt.gpus for attempt in rider.attempts] == [(0,), (1,)]
    assert len(machine.run.jobs[1].attempts) == 1
    assert rider.steps_repeated == 0
    bench.all_gone()


@pytest.mark.slow
def test_what_is_trained_in_a_pack_is_what_is_trained_alone(bench: Bench) -> None:
    (bench.folder / "small.py").write_text(TRAINER)
    (bench.folder / "go").touch()
    agent = bench.start(bench.set_of(*jobs_of("packed"), *jobs_of("ddp")), "--devices", "cpu:1")
    assert agent.wait() == 0, agent.said
    machine, _ = bench.replayed()
    used = [attempt.role for j in machine.run.jobs.values() for attempt in j.attempts]
    assert used.count(Role.PACKED) == 2
    for i in range(3):
        packed, alone = (
            load_checkpoint(bench.dir / "jobs" / str(number) / "checkpoint")["model"]
            for number in (i + 1, i + 4)
        )
        for name, value in packed.items():
            assert torch.equal(value, alone[name]), (i, name)


@pytest.mark.slow
def test_one_that_fails_and_one_whose_agent_is_killed(bench: Bench) -> None:
    (bench.folder / "small.py").write_text(TRAINER)
    (bench.folder / "bad").touch()
    strategy = {"kind": "packed"}
    jobs = [
        job("good", trainer="small:Small", gpus=1, strategy=strategy, args={"lr": 0.01}, steps=120),
        job(
            "bad",
            trainer="small:Small",
            gpus=1,
            strategy=strategy,
            args={"lr": 0.01, "fails": "bad"},
            steps=120,
            retries=0,
        ),
    ]
    agent = bench.start(bench.set_of(*jobs), "--devices", "cpu:1")
    bench.until(lambda: bench.states().get("bad") == "FAILED", "failed")
    assert "as was wished" in bench.output(2)
    bench.until(lambda: (bench.job("good").get("step") or 0) > 3, "some steps")
    assert bench.replayed()[0].run.jobs[1].repeated == 0
    log = (bench.dir / "packs" / "0.log").read_text().splitlines()
    (host,) = (int(line.split()[2]) for line in log if line.endswith("is here for a pack"))
    os.kill(host, signal.SIGKILL)
    bench.until(lambda: bench.replayed()[0].run.jobs[1].repeated > 3, "from its newest checkpoint, in place")
    assert bench.replayed()[0].run.jobs[1].attempt == 1
    agent.kill()
    agent.wait()
    bench.until(lambda: not bench.live_workers(), "the pack's process ends with its agent", 40.0)
    (bench.folder / "go").touch()
    again = bench.start("--resume", "--devices", "cpu:1")
    assert again.wait() == 1, again.said
    assert bench.states() == {"good": "COMPLETED", "bad": "FAILED"}
    record = json.loads((bench.dir / "jobs" / "1" / "STATE.json").read_text())
    assert record["step"] == 120
