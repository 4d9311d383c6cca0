"""A background job as a guest in its foreground's process; on the CPU only because it is asked for."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from test_worker_ranks import _SERVER, free_port, same

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DEADLINE_S = 60.0

TRAINING = '''
import os, random, signal, sys, time
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from hpcsched.worker import Parts, Trainer

class Noisy(Trainer):
    """Draws from every generator that a process has."""

    def build(self, args):
        self.args, self.seen = args, 0
        while "slow_build" in args and not os.path.exists(args["slow_build"]):
            time.sleep(0.01)
        if "default_dtype" in args:
            torch.set_default_dtype(torch.float64)
        self.x, self.y = torch.randn(50, 6), torch.randint(0, 3, (50,))
        width = 300 + random.randrange(3)
        model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True),
                              nn.Dropout(0.3), nn.Linear(width, 300), nn.ReLU(), nn.Dropout(0.3),
                              nn.Linear(300, 3))
        return Parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                     dataset=(self.x, self.y), global_batch=args.get("batch", 7), loss=self.loss, seed=3,
                     evaluate=lambda model: {"training": float(model.training)})

    def loss(self, model, batch):
        self.seen += 1
        args = self.args
        if "slow_until" in args and self.seen >= 5 and not os.path.exists(args["slow_until"]):
            time.sleep(0.1)  # a few steps, at which guests can come in, take as long as that needs
        if "say" in args and self.seen == 3:
            print(args["say"])
        if self.seen == args.get("raise_at"):
            raise ZeroDivisionError("the user's own")
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        x = batch[0] + 0.01 * noise * torch.rand_like(batch[0])
        return cross_entropy(model(x), batch[1], reduction="none")
'''


@dataclass
class Party:
    """A foreground and a background job in one run directory, on one device."""

    folder: Path
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "lanes_training.py").write_text(TRAINING)

    def dir(self, job: int) -> Path:
        return self.folder / "jobs" / str(job)

    def output(self, job: int) -> str:
        return (self.folder / f"output{job}").read_text()

    def final(self, job: int) -> dict[str, Any]:
        from hpcsched.worker import load_checkpoint

        return load_checkpoint(self.dir(job) / "checkpoint")

    def start(
        self, job: int, lane: str | None, *, steps: int = 12, attempt: int = 1, env: Any = None, **args: Any
    ) -> BaseProcess:
        self.dir(job).mkdir(parents=True, exist_ok=True)
        environ = {
            "HPCSCHED_RUN_ID": self.run,
            "HPCSCHED_JOB_ID": str(job),
            "HPCSCHED_ATTEMPT": str(attempt),
            "HPCSCHED_DEVICES": "0",
            "HPCSCHED_JOB_DIR": str(self.dir(job)),
            "HPCSCHED_RESUME": str(int(attempt > 1)),
            "HPCSCHED_NOTIFY_PID": "",
            "HPCSCHED_STEPS": str(steps),
            "HPCSCHED_TRAINER": "lanes_training:Noisy",
            "HPCSCHED_ARGS": json.dumps(args),
            "HPCSCHED_LANE": lane or "",
            "HPCSCHED_LANE_MODE": "streams",
            "MASTER_PORT": str(free_port()),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        process = _SERVER.Process(target=_be_rank, args=(str(self.folder), f"output{job}", environ))
        process.start()
        self.started.append(process)
        return process

    def alone(self, job: int, **options: Any) -> dict[str, Any]:
        """The final state of the same job in a process of its own, with nobody beside it."""
        assert code_of(self.start(job, None, **options)) == 0, self.output(job)
        return self.final(job)


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    found = Party(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.join()


def _be_rank(folder: str, output: str, env: dict[str, str]) -> None:
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if path := env.pop("OPEN_CONTROL", ""):
        env["HPCSCHED_CONTROL_FD"] = str(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    os.environ.update(env)
    torch.set_num_threads(1)
    from hpcsched.worker.__main__ import main
    from hpcsched.worker.lanes import proxy, stand

    stand.BUILT_WITHIN_S = float(env.get("TEST_BUILT_WITHIN_S", "60"))
    proxy.HOST_WITHIN_S = float(env.get("TEST_HOST_WITHIN_S", "20"))
    sys.exit(main())


def code_of(process: BaseProcess) -> int | None:
    process.join(DEADLINE_S)
    return process.exitcode


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def models_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(same(a[key], b[key]) for key in ("step", "samples", "model", "optimizer", "rng"))


def test_a_guest_changes_no_bit_of_the_foreground_and_is_what_it_would_be_alone(party: Party) -> None:
    front = party.start(1, "foreground", steps=300, slow_until=str(party.dir(2) / "ready.1"))
    back = party.start(2, "background", steps=40, say="from the guest")
    assert (code_of(front), code_of(back)) == (0, 0), party.output(1) + party.output(2)
    assert "from the guest" in party.output(2)
    assert "from the guest" not in party.output(1)
    assert json.loads((party.dir(2) / "STATE.json").read_text())["metrics"] == {"training": 0.0}
    together = party.final(1), party.final(2)
    assert models_same(together[0], party.alone(3, steps=300))
    assert models_same(together[1], party.alone(4, steps=40))


def test_suspending_a_guest_saves_it_and_lets_the_foreground_go_on(party: Party) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", steps=10**9)
    until((party.dir(2) / "ready.1").exists)
    assert back.pid is not None
    os.kill(back.pid, signal.SIGTSTP)
    assert code_of(back) == 75, party.output(2)
    state = json.loads((party.dir(2) / "STATE.json").read_text())
    assert state["attempt"] == 1 and Path(state["checkpoint"]).exists()
    again = party.start(2, "background", steps=state["step"] + 5, attempt=2)
    assert code_of(again) == 0, party.output(2)
    go_on.touch()
    assert code_of(front) == 0
    assert party.final(2)["step"] == state["step"] + 5
    assert models_same(party.final(1), party.alone(3, steps=300))
    assert models_same(party.final(2), party.alone(4, steps=state["step"] + 5))


def test_an_exception_of_the_guests_ends_only_the_guest_which_is_nobodys_guest_any_more(party: Party) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", raise_at=5)
    assert code_of(back) == 1
    assert "ZeroDivisionError: the user's own" in party.output(2)
    assert "ZeroDivisionError" not in party.output(1)
    again = party.start(2, "background", attempt=2)
    assert code_of(again) == 0
    assert "in a process of its own: it failed while it was a guest" in party.output(2)
    go_on.touch()
    assert code_of(front) == 0


def test_a_host_does_not_take_in_a_job_that_has_failed_there_even_if_the_job_has_forgotten(
    party: Party,
) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    assert code_of(party.start(2, "background", raise_at=5)) == 1
    (party.dir(2) / "never-a-guest").unlink()
    assert code_of(party.start(2, "background", attempt=2)) == 0
    assert "in a process of its own: it has failed as a guest before" in party.output(2)
    go_on.touch()
    assert code_of(front) == 0


def test_when_the_foreground_ends_its_guest_is_saved_and_goes_on_in_its_own_process(party: Party) -> None:
    env = {"TEST_HOST_WITHIN_S": "0.5"}
    front = party.start(1, "foreground", steps=300, slow_until=str(party.dir(2) / "ready.1"))
    back = party.start(2, "background", steps=400, env=env)
    assert code_of(front) == 0, party.output(1)
    assert code_of(back) == 0, party.output(2)
    assert "looking for another foreground" in party.output(2)
    assert models_same(party.final(2), party.alone(4, steps=400))


def test_a_guest_whose_foreground_is_killed_goes_on_by_itself_from_what_it_had_saved(party: Party) -> None:
    env = {"HPCSCHED_CHECKPOINT_EVERY_S": "0.05"}
    front = party.start(1, "foreground", steps=10**9)
    back = party.start(2, "background", steps=1000, env=env)
    until((party.dir(2) / "STATE.json").exists)
    front.kill()
    assert code_of(back) == 0, party.output(2)
    assert "the foreground's process died while this job was a guest in it" in party.output(2)
    assert models_same(party.final(2), party.alone(4, steps=1000))


def test_a_guest_finds_the_next_foreground_and_goes_on_there(party: Party) -> None:
    front = party.start(1, "foreground", steps=300, slow_until=str(party.dir(2) / "ready.1"))
    back = party.start(2, "background", steps=10**9)
    assert code_of(front) == 0, party.output(1)
    (party.dir(2) / "ready.1").unlink()
    party.start(3, "foreground", steps=10**9)
    until((party.dir(2) / "ready.1").exists)
    assert back.pid is not None
    os.kill(back.pid, signal.SIGTERM)
    assert code_of(back) == 75
    assert "in a process of its own" not in party.output(2)


def test_a_guest_that_changes_what_belongs_to_the_process_is_sent_away_before_it_does_harm(
    party: Party,
) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", default_dtype=1)
    assert code_of(back) == 0, party.output(2)
    assert "in a process of its own: torch.set_default_dtype is used" in party.output(2)
    go_on.touch()
    assert code_of(front) == 0
    assert models_same(party.final(1), party.alone(3, steps=300))


def test_a_guest_that_takes_long_to_build_is_sent_away_and_the_foreground_goes_on_meanwhile(
    party: Party,
) -> None:
    def step() -> int:
        path = party.dir(1) / "STATE.json"
        return int(json.loads(path.read_text())["step"]) if path.exists() else 0

    built = party.folder / "built"
    front = party.start(
        1,
        "foreground",
        steps=10**9,
        env={"TEST_BUILT_WITHIN_S": "0.5", "HPCSCHED_CHECKPOINT_EVERY_S": "0.05"},
    )
    until(step)
    back = party.start(2, "background", slow_build=str(built))
    back.join(2.0)  # the foreground has stood still once by now
    before = step()
    until(lambda: step() > before + 200)  # which a stand at each step would make 100 s
    built.touch()
    assert code_of(back) == 0, party.output(2)
    assert "building it takes longer than its foreground can stand still" in party.output(2)
    assert front.is_alive()


def test_a_guest_whose_own_process_is_killed_does_nothing_more(party: Party) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", steps=10**9)
    until((party.dir(2) / "ready.1").exists)
    back.kill()
    assert code_of(back) == -signal.SIGKILL
    assert code_of(party.start(3, "background", steps=12)) == 0  # the lane is free again
    assert "in a process of its own" not in party.output(3)
    assert not (party.dir(2) / "STATE.json").exists()
    go_on.touch()
    assert code_of(front) == 0


def test_a_guest_keeps_the_pace_it_is_told(party: Party) -> None:
    pipe = party.folder / "control"
    os.mkfifo(pipe)
    # Slow, and not for the guest's sake: else the feedback may keep the guest out for long on a busy machine.
    front = party.start(1, "foreground", steps=10**9, slow_until="for ever")
    order = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(order, b'{"pace": 0}\n')
    back = party.start(2, "background", steps=30, env={"OPEN_CONTROL": str(pipe)})
    until((party.dir(2) / "ready.1").exists)
    back.join(0.3)
    assert back.is_alive()  # at a share of nothing it does nothing
    os.write(order, b'{"pace": 1.0}\n')
    assert code_of(back) == 0, party.output(2)
    os.close(order)
    assert front.is_alive()


def test_a_training_in_a_process_of_its_own_keeps_the_pace_it_is_told_too(party: Party) -> None:
    pipe = party.folder / "control"
    os.mkfifo(pipe)
    order = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(order, b'{"pace": 0}\n')
    alone = party.start(1, None, steps=30, env={"OPEN_CONTROL": str(pipe)})
    until((party.dir(1) / "ready.1").exists)
    alone.join(0.5)
    assert alone.is_alive()
    os.write(order, b'{"pace": 1.0}\n')
    assert code_of(alone) == 0, party.output(1)
    os.close(order)


@pytest.mark.parametrize("reason", ["cwd", "strategy", "no host"])
def test_what_cannot_be_a_guest_runs_in_a_process_of_its_own(party: Party, reason: str) -> None:
    env = {"TEST_HOST_WITHIN_S": "0.3"}
    if reason == "cwd":
        env["PYTHONPATH"] = "/somewhere"
    elif reason == "strategy":
        env["HPCSCHED_STRATEGY"] = '{"kind": "ddp", "reproducible": true}'
    if reason != "no host":
        env.pop("TEST_HOST_WITHIN_S")
        party.start(1, "foreground", steps=10**9)
    assert code_of(party.start(2, "background", env=env, batch=16)) == 0, party.output(2)
    assert "in a process of its own" in party.output(2)


def test_on_cpu_slots_a_background_job_is_an_ordinary_process(party: Party) -> None:
    assert code_of(party.start(2, "background", env={"HPCSCHED_LANE_MODE": "auto"})) == 0
    assert party.output(2) == ""


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HPCSCHED_LANE", "middle", "HPCSCHED_LANE: 'middle'; accepted: 'foreground' or 'background'"),
        ("HPCSCHED_LANE_MODE", "fast", "accepted: auto, streams, green, mps, process"),
        ("HPCSCHED_LANE_MODE", "mps", "HPCSCHED_LANE_MODE: 'mps' without a GPU"),
    ],
)
def test_bad_words_in_the_environment_are_one_line(
    party: Party, variable: str, value: str, message: str
) -> None:
    assert code_of(party.start(2, "background", env={variable: value})) == 2
    assert message in party.output(2)
    assert party.output(2).count("\n") == 1
