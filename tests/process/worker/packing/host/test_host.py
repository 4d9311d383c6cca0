"""Packed jobs as members in one process: real processes, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from budget import slow
from forkserver import SERVER
from rankjobs import free_port, same

from hpcsched.launch.orphans import find_orphans
from hpcsched.launch.proc import stat

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DEADLINE_S = 60.0
LINGER_S = 0.5

TRAINING = '''
import os, time, weakref
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from hpcsched.worker import Parts, Trainer

HERE = weakref.WeakSet()

class Digits(Trainer):
    """A small one that does what its arguments say at its steps; the data are the same for all."""

    def build(self, args):
        self.args, self.seen = args, 0
        HERE.add(self)
        if args.get("build") == "no room":
            raise torch.OutOfMemoryError("there is no room")
        if args.get("build") == "dtype":
            torch.set_default_dtype(torch.float64)
        generator = torch.Generator().manual_seed(7)
        data = torch.randn(300, 64, generator=generator), torch.randint(0, 10, (300,), generator=generator)
        layers = [nn.Linear(64, 16), nn.ReLU(), nn.Dropout(args.get("dropout", 0.0)), nn.Linear(16, 10)]
        model = nn.Sequential(*layers)
        if args.get("optimizer") == "adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=args.get("lr", 0.01))
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=args.get("lr", 0.1), momentum=0.9)
        return Parts(model=model, optimizer=optimizer, dataset=data, global_batch=args.get("batch", 20),
                     loss=self.loss, seed=3, evaluate=self.evaluate)

    def evaluate(self, model):
        return {"training": float(model.training), "noise": float(torch.rand(()))}

    def loss(self, model, batch):
        self.seen += 1
        args = self.args
        if "hold_until" in args and self.seen >= 5 and not os.path.exists(args["hold_until"]):
            time.sleep(0.2)  # slowly, so that others can come in
        time.sleep(args.get("slow", 0))
        if self.seen == 3 and "say" in args:
            print(args["say"])
        if self.seen == args.get("raise_at"):
            raise ZeroDivisionError("the user's own")
        if self.seen == args.get("exit_at"):
            raise SystemExit(3)
        if self.seen == args.get("kill_at"):
            os.kill(os.getpid(), 9)
        if len(HERE) > args.get("room", 99):
            raise torch.OutOfMemoryError("there is no room")
        if self.seen == args.get("hang_at"):
            open(args["hang_until"] + ".waits", "w").close()
            while not os.path.exists(args["hang_until"]):
                time.sleep(0.01)
        losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses * float("nan") if self.seen == args.get("nan_at") else losses
'''


@dataclass
class Packs:
    """Packed jobs in one run directory, all on one device."""

    folder: Path
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "packed_training.py").write_text(TRAINING)

    def dir(self, job: int) -> Path:
        return self.folder / "jobs" / str(job)

    def output(self, job: int) -> str:
        return (self.folder / f"output{job}").read_text()

    @property
    def log(self) -> str:
        path = self.folder / "packs" / "0.log"
        return path.read_text() if path.exists() else ""

    def final(self, job: int) -> dict[str, Any]:
        from hpcsched.worker import load_checkpoint

        return load_checkpoint(self.dir(job) / "checkpoint")

    def record(self, job: int) -> dict[str, Any]:
        return json.loads((self.dir(job) / "STATE.json").read_text())

    def start(self, job: int, **options: Any) -> BaseProcess:
        """The job's own process, which has torch at hand."""
        environ = self.environ(job, **options)
        process = SERVER.Process(target=_be_job, args=(str(self.folder), f"output{job}", environ))
        process.start()
        self.started.append(process)
        return process

    def spawn(self, job: int, **options: Any) -> subprocess.Popen[bytes]:
        """The same from nothing, as an agent starts it."""
        environ = {**os.environ, **self.environ(job, **options)}
        with (self.folder / f"output{job}").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "hpcsched.worker"],
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def environ(
        self, job: int, *, steps: int = 40, attempt: int = 1, env: Any = None, mode: str = "loop", **args: Any
    ) -> dict[str, str]:
        self.dir(job).mkdir(parents=True, exist_ok=True)
        return {
            "HPCSCHED_RUN_ID": self.run,
            "HPCSCHED_RUN_DIR": str(self.folder),
            "HPCSCHED_PACK": "device 0",
            "HPCSCHED_JOB_ID": str(job),
            "HPCSCHED_ATTEMPT": str(attempt),
            "HPCSCHED_DEVICES": "0",
            "HPCSCHED_JOB_DIR": str(self.dir(job)),
            "HPCSCHED_RESUME": str(int(attempt > 1)),
            "HPCSCHED_NOTIFY_PID": "",
            "HPCSCHED_STEPS": str(steps),
            "HPCSCHED_TRAINER": "packed_training:Digits",
            "HPCSCHED_ARGS": json.dumps(args),
            "HPCSCHED_STRATEGY": json.dumps({"kind": "packed", "mode": mode}),
            "MASTER_PORT": str(free_port()),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }

    def alone(self, job: int, **options: Any) -> dict[str, Any]:
        """The final state of the same job in a process of its own."""
        env = {"HPCSCHED_PACK": "", "HPCSCHED_STRATEGY": '{"kind": "ddp"}'}
        assert code_of(self.start(job, env=env, **options)) == 0, self.output(job)
        return self.final(job)

    def ready(self, job: int, attempt: int = 1) -> None:
        until((self.dir(job) / f"ready.{attempt}").exists)

    def hosts(self) -> list[int]:
        """The processes of packs that live."""
        pids = [int(line.split()[2]) for line in self.log.splitlines() if line.endswith("is here for a pack")]
        return [pid for pid in pids if (seen := stat(pid)) is not None and seen.state not in "ZX"]

    def host(self) -> int:
        """The process of the pack, once there is one."""
        until(self.hosts)
        return self.hosts()[0]


@pytest.fixture
def packs(tmp_path: Path) -> Iterator[Packs]:
    found = Packs(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.join()
    until(lambda: not found.hosts())  # nothing is left over


def _be_job(folder: str, output: str, env: dict[str, str]) -> None:
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    torch.set_num_threads(int(env.get("TEST_THREADS", "1")))
    from hpcsched.worker.__main__ import main
    from hpcsched.worker.packing import job_process
    from hpcsched.worker.packing.host import connections, host

    host.LINGER_S = float(env.get("TEST_LINGER_S", LINGER_S))
    connections.STUCK_S = float(env.get("TEST_STUCK_S", connections.STUCK_S))
    job_process.ANSWERS_WITHIN_S = float(env.get("TEST_ANSWERS_WITHIN_S", job_process.ANSWERS_WITHIN_S))
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
    return all(same(_countable(a[key]), _countable(b[key])) for key in ("step", "model", "optimizer", "rng"))


def _countable(state: Any) -> Any:
    """The same without NaN, which equals nothing."""
    if isinstance(state, dict):
        return {key: _countable(value) for key, value in state.items()}
    return state.nan_to_num(1e9) if isinstance(state, torch.Tensor) else state


THREE: tuple[dict[str, Any], ...] = (
    {"lr": 0.1},
    {"lr": 0.01, "dropout": 0.3},
    {"optimizer": "adam", "batch": 30, "nan_at": 9},
)
"""Of different learning rates, optimizers and batch sizes; one draws, one comes to nothing."""


def test_members_of_one_process_are_what_they_would_be_alone(packs: Packs) -> None:
    everyone = str(packs.folder / "everyone is here")
    jobs = [packs.start(n, hold_until=everyone, say=f"job {n}", **args) for n, args in enumerate(THREE)]
    for n in range(3):
        packs.ready(n)
    host = packs.host()
    Path(everyone).touch()
    assert [code_of(job) for job in jobs] == [0, 0, 0], packs.log + packs.output(0)
    assert packs.hosts() in ([host], [])
    assert packs.log.count("is here for a pack") == 1
    for n, args in enumerate(THREE):
        assert packs.output(n) == f"job {n}\n"
        assert models_same(packs.final(n), packs.alone(10 + n, **args)), n
        assert packs.record(n)["metrics"] == packs.record(10 + n)["metrics"]
    assert "job 0\n" not in packs.log.splitlines()
    assert (packs.folder / "packs").stat().st_mode & 0o777 == 0o700
    assert (packs.folder / "packs" / "0.log").stat().st_mode & 0o777 == 0o600
    until(lambda: not packs.hosts())
    until(lambda: not find_orphans(packs.run, []))


@pytest.mark.slow
def test_jobs_that_were_started_from_nothing_start_the_packs_process_from_nothing(packs: Packs) -> None:
    members = [packs.spawn(n, **THREE[n]) for n in (0, 1)]
    alone = packs.spawn(2, env={"HPCSCHED_PACK": ""}, **THREE[1])
    for n, job in enumerate((*members, alone)):
        assert job.wait(DEADLINE_S) == 0, packs.output(n) + packs.log
        assert "hpcsched:" not in packs.output(n)
    assert packs.log.count("is here for a pack") == 1
    assert models_same(packs.final(1), packs.final(2))


def test_jobs_that_come_together_share_one_process_in_any_mode(packs: Packs) -> None:
    jobs = [packs.start(n, mode="auto", steps=200, lr=0.01 * (n + 1)) for n in range(4)]
    assert [code_of(job) for job in jobs] == [0] * 4, packs.log
    assert packs.log.count("is here for a pack") == 1
    for n in range(4):
        assert "hpcsched:" not in packs.output(n)
        weights, alone = (
            final["model"]["0.weight"]
            for final in (packs.final(n), packs.alone(10, steps=200, lr=0.01 * (n + 1)))
        )
        torch.testing.assert_close(weights, alone)


def test_the_next_job_finds_the_process_of_the_last_one_which_goes_when_it_is_told_to(packs: Packs) -> None:
    env = {"TEST_LINGER_S": str(DEADLINE_S)}
    assert code_of(packs.start(1, env=env)) == 0
    host = packs.host()
    assert code_of(packs.start(2, env=env, mode="auto")) == 0  # with nobody there it can be of any mode
    assert packs.host() == host
    os.kill(host, signal.SIGTERM)
    until(lambda: not packs.hosts())
    assert packs.log.count("is here for a pack") == 1
    assert packs.output(1) == packs.output(2) == ""


@pytest.mark.slow
def test_a_process_that_has_threads_does_not_fork_the_packs(packs: Packs) -> None:
    assert code_of(packs.start(1, env={"TEST_THREADS": "2"})) == 0, packs.output(1) + packs.log
    assert "hpcsched:" not in packs.output(1)
    assert "job 1 (attempt 1) leaves: {'exit': 0}" in packs.log


def test_a_member_that_is_suspended_goes_on_in_another_process(packs: Packs) -> None:
    other = packs.start(2, steps=10**9)
    job = packs.start(1, steps=10**9, **THREE[1])
    packs.ready(1)
    packs.ready(2)
    assert job.pid is not None and other.pid is not None
    until(lambda: "job 1 (attempt 1) trains here" in packs.log)
    os.kill(job.pid, signal.SIGTSTP)
    assert code_of(job) == 75, packs.output(1)
    os.kill(other.pid, signal.SIGTERM)
    assert code_of(other) == 75, packs.output(2)
    until(lambda: not packs.hosts())
    step = packs.record(1)["step"]
    assert code_of(packs.start(1, steps=step + 30, attempt=2, **THREE[1])) == 0, packs.output(1)
    assert packs.final(1)["step"] == step + 30
    assert models_same(packs.final(1), packs.alone(3, steps=step + 30, **THREE[1]))


def test_what_one_members_code_raises_ends_only_that_member(packs: Packs) -> None:
    go_on = packs.folder / "go on"
    job = packs.start(1, hold_until=str(go_on))
    packs.ready(1)
    assert code_of(packs.start(2, raise_at=5)) == 1
    assert "ZeroDivisionError: the user's own" in packs.output(2)
    assert code_of(packs.start(3, exit_at=5)) == 3
    assert code_of(packs.start(4, optimizer=None, batch=-1)) == 2
    assert "at least 1" in packs.output(4)
    go_on.touch()
    assert code_of(job) == 0
    assert "hpcsched:" not in packs.output(1)
    assert models_same(packs.final(1), packs.alone(5))


def test_a_member_whose_own_process_is_killed_does_nothing_more(packs: Packs) -> None:
    go_on = packs.folder / "go on"
    job = packs.start(1, hold_until=str(go_on))
    killed = packs.start(2, steps=10**9)
    packs.ready(1)
    packs.ready(2)
    host = packs.host()
    killed.kill()
    until(lambda: "job 2 (attempt 1) leaves: its own process has gone" in packs.log)
    assert not (packs.dir(2) / "STATE.json").exists()
    assert packs.host() == host
    go_on.touch()
    assert code_of(job) == 0


def test_when_their_process_is_killed_all_members_go_on_from_their_checkpoints(packs: Packs) -> None:
    env = {"HPCSCHED_CHECKPOINT_EVERY_S": "0.05"}
    go_on = packs.folder / "go on"
    jobs = [packs.start(n, steps=400, env=env, hold_until=str(go_on), **THREE[n]) for n in (0, 1)]
    for n in (0, 1):
        until((packs.dir(n) / "STATE.json").exists)
    os.kill(packs.host(), signal.SIGKILL)
    go_on.touch()
    for n in (0, 1):
        assert code_of(jobs[n]) == 0, packs.output(n) + packs.log
        assert "the process of its pack has died" in packs.output(n)
        assert "in a process of its own" not in packs.output(n)
        assert models_same(packs.final(n), packs.alone(10 + n, steps=400, **THREE[n]))


def test_a_member_that_kills_their_process_again_and_again_is_left_to_itself(packs: Packs) -> None:
    assert code_of(packs.start(1, kill_at=5)) == -signal.SIGKILL, packs.output(1)
    assert packs.log.count("is here for a pack") == 2
    assert "in a process of its own: the process of its pack has died again and again" in packs.output(1)


@pytest.mark.slow
def test_who_came_last_makes_room_and_completes_when_there_is_some(packs: Packs) -> None:
    go_on = packs.folder / "go on"
    first = packs.start(1, hold_until=str(go_on))
    packs.ready(1)
    assert code_of(packs.start(2, steps=10**9, room=1)) == 75, packs.output(2)
    assert (
        "hpcsched: out of memory in the pack (there is no room); saved and taken out of it" in packs.output(2)
    )
    step = packs.record(2)["step"]
    assert code_of(packs.start(3, build="no room")) == 75, packs.output(3)
    assert "hpcsched: out of memory in the pack; taken out of it as it was saved last" in packs.output(3)
    assert not (packs.dir(3) / "STATE.json").exists()
    go_on.touch()
    assert code_of(first) == 0
    assert code_of(packs.start(2, steps=step + 20, room=1, attempt=2)) == 0, packs.output(2)
    assert models_same(packs.final(2), packs.alone(4, steps=step + 20))
    assert code_of(packs.start(3, build="no room")) == 1  # there is nobody who could make room


@pytest.mark.slow
def test_a_member_that_does_not_answer_is_ended_with_their_process_and_the_others_go_on(
    packs: Packs,
) -> None:
    env = {"HPCSCHED_CHECKPOINT_EVERY_S": "0.05", "TEST_ANSWERS_WITHIN_S": "1"}
    never = str(packs.folder / "never")
    go_on = packs.folder / "go on"
    job = packs.start(1, steps=400, env=env, hold_until=str(go_on))
    until((packs.dir(1) / "STATE.json").exists)
    hanging = packs.start(2, env=env, hang_at=1, hang_until=never)
    until((packs.folder / "never.waits").exists)
    host = packs.host()
    assert hanging.pid is not None
    os.kill(hanging.pid, signal.SIGTSTP)
    hanging.join(1.5)
    assert hanging.is_alive()  # it is for the agent to say how long a save may take
    os.kill(hanging.pid, signal.SIGTERM)
    assert code_of(hanging) == 75, packs.output(2)
    assert "does not answer, and was ended" in packs.output(2)
    go_on.touch()
    assert code_of(job) == 0, packs.output(1)
    assert packs.hosts() != [host]
    assert models_same(packs.final(1), packs.alone(3, steps=400))


def test_a_process_that_is_stuck_with_nobody_waiting_for_it_ends(packs: Packs) -> None:
    job = packs.start(1, env={"TEST_STUCK_S": "1"}, hang_at=1, hang_until=str(packs.folder / "never"))
    until(lambda: "job 1 (attempt 1) trains here" in packs.log)
    job.kill()
    until(lambda: not packs.hosts())
    assert "in loss" in packs.log  # where it was stuck


@pytest.mark.slow
def test_a_member_that_blocks_and_whose_own_process_is_killed_does_not_hold_up_the_others(
    packs: Packs,
) -> None:
    env = {"HPCSCHED_CHECKPOINT_EVERY_S": "0.05", "TEST_STUCK_S": "1"}
    go_on = packs.folder / "go on"
    job = packs.start(1, steps=400, env=env, hold_until=str(go_on))
    until((packs.dir(1) / "STATE.json").exists)
    hanging = packs.start(2, env=env, hang_at=1, hang_until=str(packs.folder / "never"))
    until((packs.folder / "never.waits").exists)
    hanging.kill()
    go_on.touch()
    assert code_of(job) == 0, packs.output(1)
    assert "the process of its pack has died" in packs.output(1)
    assert models_same(packs.final(1), packs.alone(3, steps=400))


@pytest.mark.slow
def test_many_slow_steps_in_a_row_are_no_reason_to_end_their_process(packs: Packs) -> None:
    jobs = [packs.start(n, steps=3, env={"TEST_STUCK_S": "1"}, slow=1.0) for n in range(1, 5)]
    until(lambda: "job 4 (attempt 1) trains here" in packs.log)
    jobs[0].kill()  # as four seconds begin in which nobody is looked after
    assert [code_of(job) for job in jobs[1:]] == [0] * 3
    assert packs.log.count("is here for a pack") == 1


def test_a_process_that_is_told_to_end_has_its_members_saved_and_they_go_on_in_another(
    packs: Packs,
) -> None:
    job = packs.start(1, steps=10**9, **THREE[1])
    packs.ready(1)
    until(lambda: "job 1 (attempt 1) trains here" in packs.log)
    host = packs.host()
    os.kill(host, signal.SIGTERM)
    until(lambda: "looking for another one" in packs.output(1))
    until(lambda: packs.hosts() and packs.hosts() != [host])
    until(lambda: packs.log.count("job 1 (attempt 1) trains here") == 2)
    assert job.pid is not None
    os.kill(job.pid, signal.SIGTSTP)
    assert code_of(job) == 75
    step = packs.record(1)["step"]
    assert models_same(packs.final(1), packs.alone(3, steps=step, **THREE[1]))


@pytest.mark.parametrize("reason", [slow("environment"), "mode", slow("settings"), "no address"])
def test_what_cannot_be_a_member_trains_in_a_process_of_its_own(packs: Packs, reason: str) -> None:
    go_on = packs.folder / "go on"
    args: dict[str, Any] = {}
    if reason == "environment":
        args["env"] = {"OF_THE_USER": "1"}
    elif reason == "mode":
        args["mode"] = "auto"
    elif reason == "settings":
        args["build"] = "dtype"
    if reason == "no address":
        job = None
        (packs.folder / "packs").touch()  # not a folder: there can be no log
    else:
        job = packs.start(1, hold_until=str(go_on))
        packs.ready(1)
    assert code_of(packs.start(2, **args)) == 0, packs.output(2)
    assert "in a process of its own: " in packs.output(2)
    go_on.touch()
    if job is not None:
        assert code_of(job) == 0
        assert models_same(packs.final(1), packs.alone(3))


def test_by_itself_a_packed_job_is_an_ordinary_one(packs: Packs) -> None:
    job = packs.start(1, env={"HPCSCHED_PACK": ""}, mode="auto", steps=10**9, **THREE[1])
    packs.ready(1)
    assert job.pid is not None
    until(lambda: (packs.dir(1) / "ready.1").exists())
    os.kill(job.pid, signal.SIGTSTP)
    assert code_of(job) == 75
    step = packs.record(1)["step"] + 10
    again = packs.start(1, env={"HPCSCHED_PACK": ""}, attempt=2, steps=step, **THREE[1])
    assert code_of(again) == 0, packs.output(1)
    assert "hpcsched:" not in packs.output(1)
    assert not packs.hosts()
    assert models_same(packs.final(1), packs.alone(2, steps=step, **THREE[1]))


@pytest.mark.parametrize("pack", ["", "device 0"])
def test_a_bad_mode_is_refused_by_name(packs: Packs, pack: str) -> None:
    assert code_of(packs.start(1, mode="fast", env={"HPCSCHED_PACK": pack})) == 2
    accepted = 'accepted: "auto", "loop", "stacked" or "adapters"; on GPUs also'
    assert f"strategy packed: mode: 'fast'; {accepted}" in packs.output(1)
