"""What a quick suspend leaves in shared memory becomes a checkpoint, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from forkserver import SERVER
from places import ROOT

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.worker.checkpoint import saving  # noqa: E402
from hpcsched.worker.checkpoint.files import CheckpointStore  # noqa: E402
from hpcsched.worker.checkpoint.load import load_checkpoint  # noqa: E402
from hpcsched.worker.checkpoint.shared_memory import Arena  # noqa: E402
from hpcsched.worker.keeper import _save  # noqa: E402
from hpcsched.worker.process.contract import JobEnv  # noqa: E402

_DEADLINE_S = 300.0


def state(step: int) -> dict[str, Any]:
    return {"step": step, "samples": 10 * step, "model": {"w": torch.full((100_000,), float(step))}}


@dataclass
class Job:
    """A job whose attempt 3 has left, and the memory it has left its state in."""

    folder: Path
    descriptor: int
    arena: Arena

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HPCSCHED_JOB_ID": "1",
            "HPCSCHED_ATTEMPT": "3",
            "HPCSCHED_RANK": "0",
            "HPCSCHED_JOB_DIR": str(self.folder),
            "HPCSCHED_CHECKPOINT_DIR": str(self.folder / "checkpoint"),
            "HPCSCHED_KEEP": "2",
            "HPCSCHED_ARENA_FD": str(self.descriptor),
        }

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.folder / "checkpoint", keep=2)

    @property
    def held(self) -> Path:
        return self.folder / "held.3"

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "STATE.json").read_text())

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def leave(self, step: int) -> None:
        """What rank 0 does in a quick suspend."""
        self.arena.save(state(step))
        self.held.write_text(json.dumps({"step": step, "samples": 10 * step}))

    def save(self, step: int) -> None:
        """What rank 0 of the next attempt does now and then."""
        env = JobEnv.from_environ({**self.environment, "HPCSCHED_ATTEMPT": "4"})
        assert env is not None
        path = self.store.save(state(step))
        with self.arena.alone_with_state_file():
            env.write_state(step=step, samples=10 * step, checkpoint=path)

    def start(self, **options: Any) -> BaseProcess:
        arguments = (os.getpid(), self.descriptor, str(self.folder), self.environment)
        keeper = SERVER.Process(target=_be_keeper, args=arguments, kwargs=options)
        keeper.start()
        return keeper

    def keep(self, **options: Any) -> int | None:
        return ended(self.start(**options))

    def steps(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self.store.folder.glob("*.pt"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    descriptor = os.memfd_create("arena")
    arena = Arena.open(descriptor)
    assert arena is not None
    yield Job(tmp_path, descriptor, arena)
    arena.close()
    os.close(descriptor)


def _be_keeper(
    parent: int, descriptor: int, folder: str, env: dict[str, str], file_limit: int | None = None
) -> None:
    inherited = os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDWR)
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 2)
    os.environ.update(env)
    if env.get("HPCSCHED_ARENA_FD"):
        os.environ["HPCSCHED_ARENA_FD"] = str(inherited)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    from hpcsched.worker.keeper import main

    sys.exit(main())


def ended(process: BaseProcess) -> int | None:
    process.join(_DEADLINE_S)
    if process.is_alive():
        process.kill()
    return process.exitcode


def wait_for(path: Path, process: BaseProcess) -> None:
    while not path.exists():
        assert process.is_alive()
        time.sleep(0.002)


def test_a_keeper_of_its_own_makes_the_state_durable(job: Job) -> None:
    job.leave(5)
    done = subprocess.run(
        [sys.executable, "-m", "hpcsched.worker.keeper"],
        env={**os.environ, **job.environment, "PYTHONPATH": str(ROOT)},
        pass_fds=[job.descriptor],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not job.held.exists()
    path = job.store.newest()
    assert path is not None
    record = {"schema": 1, "step": 5, "samples": 50, "checkpoint": str(path), "attempt": 3}
    assert job.record == record
    assert torch.equal(load_checkpoint(path)["model"]["w"], state(5)["model"]["w"])


def test_the_newest_state_is_kept_and_the_older_checkpoint_stays(job: Job) -> None:
    job.store.save(state(2))
    job.leave(5)
    job.leave(7)
    assert job.keep() == 0
    assert job.steps() == [2, 7]
    assert job.record["step"] == 7


@pytest.mark.parametrize(("newer", "kept"), [([7], [5, 7]), ([6, 7], [6, 7])])
def test_what_is_newer_stays(job: Job, newer: list[int], kept: list[int]) -> None:
    job.leave(5)
    for step in newer:
        job.save(step)
    before = job.record
    assert job.keep() == 0
    assert job.steps() == kept
    assert job.record == before
    assert not job.held.exists()


def test_a_record_of_a_former_life_does_not(job: Job) -> None:
    job.save(400)
    job.store.set_aside("before-attempt-3")
    job.leave(5)
    assert job.keep() == 0
    assert (job.record["step"], job.steps()) == (5, [5])


@pytest.mark.parametrize("fault", ["no arena", "empty", "damaged", "no room"])
def test_a_failure_is_said_and_who_started_it_may_try_again(
    job: Job, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(1)
    job.leave(5)
    options = {}
    if fault == "no arena":
        monkeypatch.setattr(Job, "environment", {**job.environment, "HPCSCHED_ARENA_FD": ""})
    elif fault == "empty":
        job.arena.clear()
    elif fault == "damaged":
        os.pwrite(job.descriptor, b"\xff\xff\xff\xff", (2 << 40) + 1000)
    else:
        options["file_limit"] = 20_000
    assert job.keep(**options) == 74
    assert job.held.exists()
    assert "hpcsched: what was left in shared memory could not be saved: " in job.output.splitlines()[-1]
    assert (job.record["step"], job.steps()) == (1, [1])
    assert "Traceback" not in job.output


@pytest.mark.parametrize(("fault", "left"), [(errno.ENOENT, [1, 2, 5]), (errno.ENOSPC, [2, 5])])
def test_only_where_there_is_no_room_do_older_checkpoints_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int, left: list[int]
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        store.save(state(step))
    replace, faults = Path.replace, [OSError(fault, os.strerror(fault))]

    def fail_once(path: Path, target: Path) -> Path:
        if faults:
            raise faults.pop()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail_once)
    _save(store, state(5))
    assert sorted(int(path.stem.partition("-")[2]) for path in tmp_path.glob("*.pt")) == left


class Clock:
    """Time that passes by sleeping; then something may happen."""

    def __init__(self, then: Callable[[float], object]) -> None:
        self.now, self._then = 0.0, then

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._then(self.now)


@pytest.mark.parametrize(("until", "waited"), [(300, 300), (0, 60), (100, 160)])
def test_a_keeper_is_waited_for_as_long_as_somebody_says_that_it_works(
    job: Job, monkeypatch: pytest.MonkeyPatch, until: float, waited: float
) -> None:
    env = JobEnv.from_environ({**job.environment, "HPCSCHED_FROM_STEP": "5", "HPCSCHED_ATTEMPT": "4"})
    assert env is not None and env.from_step == 5
    job.held.touch()

    def touch(now: float) -> None:
        if now >= 300 and until == 300 and job.held.exists():
            job.store.save(state(5))
            job.held.unlink()
        elif now <= until:
            os.utime(job.held, (now, now))

    clock = Clock(touch)
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(saving, "_POLL_S", 5.0)
    saves = saving.Saves(env, None)
    assert saves.arena is not None
    saves._await_keeper(0)
    assert clock.now == waited
    saves.arena.close()


def test_what_a_rank_starts_does_not_inherit_its_descriptors(job: Job) -> None:
    orders, writer = os.pipe()
    for descriptor in (job.descriptor, orders):
        os.set_inheritable(descriptor, True)
    env = JobEnv.from_environ({**job.environment, "HPCSCHED_CONTROL_FD": str(orders)})
    saves = saving.Saves(env, None)
    assert saves.arena is not None
    saves.arena.close()
    assert not os.get_inheritable(job.descriptor) and not os.get_inheritable(orders)
    os.close(orders)
    os.close(writer)


def test_signals_do_not_stop_it(job: Job) -> None:
    job.leave(5)
    with job.arena.alone_with_state_file():  # so that it is still there when they come
        keeper = job.start()
        wait_for(job.store.folder / "step-000000000005.pt", keeper)
        for number in (signal.SIGTERM, signal.SIGTSTP, signal.SIGHUP, signal.SIGINT):
            os.kill(keeper.pid or 0, number)
    assert ended(keeper) == 0
    assert job.record["step"] == 5


def test_it_leads_a_session_of_its_own(job: Job) -> None:
    job.leave(5)
    with job.arena.alone_with_state_file():
        keeper = job.start()
        wait_for(job.store.folder / "step-000000000005.pt", keeper)
        assert os.getsid(keeper.pid or 0) == keeper.pid
    assert ended(keeper) == 0


def test_keepers_and_the_next_attempt_do_not_get_in_each_others_way(job: Job) -> None:
    job.leave(5)
    keepers = [job.start() for _ in range(3)]
    for step in range(6, 40):
        job.store.clear_leftovers()
        job.save(step)
    assert [ended(keeper) for keeper in keepers] == [0, 0, 0], job.output
    job.save(40)
    assert job.record["step"] == 40
    assert job.steps() == [39, 40]
