"""A worker says that it cannot use its GPU: how far its job is believed."""

from __future__ import annotations

import importlib.util
import json
import selectors
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.contract.driver import changed
from hpcsched.contract.exits import NO_GPU
from hpcsched.contract.variables import DRIVER_VARIABLES
from hpcsched.core.events import DeviceLost, WorkersExited
from hpcsched.core.model import JobSpec, Kind

WHY = "torch 9: no CUDA-capable device is detected"


class Ended:
    """The workers of an attempt that has ended."""

    progress_fd = record = ready = held = refused = None
    pidfds: tuple[int, ...] = ()
    told_after_s = 0.0
    oom = ""
    over_limit = False

    def __init__(self, code: int) -> None:
        self._code = code

    def reap(self) -> int:
        return self._code

    def failed_early(self) -> bool:
        return False

    def close(self) -> None: ...


class Agent:
    """An agent with jobs 1 to 3, each with a folder of its own."""

    def __init__(self, root: Path) -> None:
        self._root, self._attempts = root, 0
        job = SimpleNamespace(spec=JobSpec(name="a", kind=Kind.COMMAND, model="m"), saved_step=0)
        self.effects = Effects(
            machine=SimpleNamespace(run=SimpleNamespace(jobs=dict.fromkeys((1, 2, 3), job))),
            launcher=SimpleNamespace(),
            site=SimpleNamespace(),
            clock=RunClock(),
            selector=selectors.DefaultSelector(),
        )

    def runs(self, job: int, gpu: int, *, code: int = NO_GPU, ready: bool = False) -> WatchedAttempt:
        self._attempts += 1
        folder = self._root / str(job)
        folder.mkdir(exist_ok=True)
        attempt = WatchedAttempt(
            job_id=job,
            attempt=self._attempts,
            workers=Ended(code),
            gpus=(gpu,),
            ranks=1,
            folder=folder,
            output=folder / "out",
            measured=False,
            ready=ready,
        )
        self.effects._attempts[job] = attempt
        return attempt

    def accuses(self, job: int, gpu: int, **facts: Any) -> tuple[list[int], str]:
        """The GPUs that are lost by this, and what is said of the job's end."""
        attempt = self.runs(job, gpu)
        torch = importlib.util.find_spec("torch")
        if torch is None:
            pytest.skip("no torch")
        word = {"gpu": gpu, "why": WHY, "torch": torch.origin} | facts
        (attempt.folder / f"unusable.{attempt.attempt}").write_text(json.dumps(word))
        *lost, exited = self.effects._reap(attempt)
        assert isinstance(exited, WorkersExited) and all(isinstance(event, DeviceLost) for event in lost)
        return [event.gpu for event in lost], exited.detail


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def test_a_job_takes_out_one_gpu_at_most(agent: Agent) -> None:
    assert agent.accuses(1, 4) == ([4], WHY)
    for gpu in (5, 6):
        blamed = f"GPU {gpu} cannot be used: {WHY}; the job's own failure, as it could not use GPU 4 either"
        assert agent.accuses(1, gpu) == ([], blamed)
    assert agent.accuses(2, 5) == ([5], WHY), "another job is believed"


def test_a_program_that_has_changed_what_finds_the_driver_is_to_blame(agent: Agent) -> None:
    lost, said = agent.accuses(1, 4, changed=["CUDA_HOME", "LD_LIBRARY_PATH"])
    assert (lost, said) == (
        [],
        f"GPU 4 cannot be used: {WHY}; the job's own failure, as its program has changed CUDA_HOME,"
        " LD_LIBRARY_PATH",
    )
    assert agent.accuses(1, 4) == ([4], WHY), "what it was not believed does not count against it"


def test_a_gpu_that_another_job_works_on_can_be_used(agent: Agent) -> None:
    agent.runs(2, 4, ready=True)
    agent.runs(3, 5)
    lost, said = agent.accuses(1, 4)
    assert not lost and said.endswith("the job's own failure, as job 2 works on it")
    assert agent.accuses(1, 5) == ([5], WHY), "job 3 has yet to show that it can"


@pytest.mark.parametrize("told", [None, "", "[1]", "7", "{"])
def test_where_nobody_says_what_was_given_all_counts_as_changed(told: str | None) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "3", "HOME": "/h"}
    assert changed(env if told is None else env | {DRIVER_VARIABLES: told}) == ["CUDA_VISIBLE_DEVICES"]
