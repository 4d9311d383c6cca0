"""The end of an attempt is told when what it had can be given on, whoever tells it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hiccups import Hiccups

from hpcsched.agent.attempts import Resizing, WatchedAttempt
from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.agent.gpu_memory import FREE_WITHIN_S, GpuMemory
from hpcsched.agent.node.held_back import HeldBack
from hpcsched.agent.node.workers import PartWatcher
from hpcsched.contract import files
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.state import State
from hpcsched.contract.words import Ready
from hpcsched.core import events as ev
from hpcsched.core.model import Device, JobState
from hpcsched.launch.base import Workers
from hpcsched.launch.remote import protocol
from hpcsched.launch.workers import LocalWorkers
from hpcsched.patience import PATIENCE_S
from hpcsched.testing.builders import Driver, a_job, a_profile
from hpcsched.testing.launch import FIRST_PID, FakeWorkers, Script

PROFILES = (a_profile("m", [1.0, 2.0]),)


class Memory:
    """Is asked for GPUs, and says what the test wants. `asked`: the GPUs and seconds of the last question."""

    def __init__(self) -> None:
        self.is_free = False
        self.asked: tuple[list[int], float] | None = None

    def free(self, who: Any, devices: Iterable[Device], left: Callable[[], int], *, within_s: float) -> bool:
        self.asked = [device.index for device in devices], within_s
        return self.is_free or not self.asked[0]

    def forget(self, who: Any) -> None:
        """It waits for nobody."""

    def fileno(self) -> int:
        return 0


class Head:
    """Jobs a and b run on GPUs 0 and 1, which this agent has started."""

    def __init__(self, folder: Path) -> None:
        self.run = Driver(a_job("a", gpus=1), a_job("b", gpus=1), gpus=2, profiles=PROFILES)
        self.run.runs("a", "b")
        self.memory = Memory()
        selector = SimpleNamespace(register=lambda *_: None)
        self.effects = Effects(
            machine=self.run.machine,
            launcher=cast(Any, SimpleNamespace(keeping=set, forget=lambda job: None)),
            site=cast(Any, SimpleNamespace()),
            clock=RunClock(),
            selector=cast(Any, selector),
            memory=cast(GpuMemory, self.memory),
        )
        self.attempts = {}
        for job, gpu in ((1, 0), (2, 1)):
            self.attempts[job] = self.effects._attempts[job] = WatchedAttempt(
                job_id=job,
                attempt=1,
                workers=cast(Workers, FakeWorkers([FIRST_PID + job], Script())),
                gpus=(gpu,),
                ranks=1,
                folder=folder,
                output=folder / "out",
                measured=False,
                ready=True,
            )

    def ends(self, job: int, code: int = 0) -> list[ev.Event]:
        self.attempts[job].workers.end(0, code)  # type: ignore[attr-defined]
        return self.effects._reap(self.attempts[job])

    def later(self) -> list[ev.Event]:
        return list(self.effects.collect())


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    yield head
    for attempt in head.attempts.values():
        attempt.close()


def test_the_end_waits_for_the_memory_of_its_gpus(head: Head) -> None:
    assert head.ends(1) == [] and head.memory.asked == ([0], FREE_WITHIN_S)
    assert head.later() == []
    head.memory.is_free = True
    (exited,) = head.later()
    assert isinstance(exited, ev.WorkersExited) and (exited.job_id, exited.code) == (1, 0)
    assert head.later() == [], "once"


def test_the_wait_is_no_time_of_the_attempt(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that fails at once would seem to have failed later, and would be tried again and again."""
    head.attempts[1].measured = True
    assert head.ends(1, 1) == []
    head.memory.is_free, now = True, time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + FREE_WITHIN_S)
    (exited,) = head.later()
    assert isinstance(exited, ev.WorkersExited)
    assert exited.lasted_s is not None and exited.lasted_s < FREE_WITHIN_S


def test_the_end_waits_for_a_record_that_cannot_be_read_yet(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / files.STATE).write_bytes(State(step=7, attempt=1).encode())
    hiccups, head.memory.is_free = Hiccups(tmp_path, monkeypatch), True
    hiccups.fails(2)
    assert head.ends(1, SUSPENDED) == []
    assert not any(isinstance(event, ev.WorkersExited) for event in head.later())
    (exited,) = (event for event in head.later() if isinstance(event, ev.WorkersExited))
    assert exited.saved_step == 7


def test_but_not_for_ever(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hiccups, head.memory.is_free = Hiccups(tmp_path, monkeypatch), True
    hiccups.fails(10**9)
    assert head.ends(1) == []
    cast(Any, head.attempts[1].workers).record = State(step=9, attempt=1).encode()
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + PATIENCE_S)
    (exited,) = (event for event in head.later() if isinstance(event, ev.WorkersExited))
    assert (exited.code, exited.saved_step) == (0, 9), "what its host has told"


def test_a_checkpoint_whose_record_cannot_be_read_yet_is_told_later(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / files.STATE).write_bytes(State(step=7, attempt=1).encode())
    hiccups, attempt = Hiccups(tmp_path, monkeypatch), head.attempts[1]
    hiccups.fails(1)
    assert attempt.new_record() is None, "it cannot be looked at"
    hiccups.fails(1, after=1)
    assert attempt.new_record() is None, "nor be read"
    record = attempt.new_record()
    assert record is not None and record.step == 7 and attempt.new_record() is None


def test_how_long_an_attempt_of_another_agent_has_lasted_is_unknown(head: Head) -> None:
    head.attempts[1].measured = head.attempts[1].taken_over = True
    head.memory.is_free = True
    (exited,) = head.ends(1)
    assert isinstance(exited, ev.WorkersExited) and exited.lasted_s is None


@pytest.mark.parametrize(
    ("asked_after_s", "completed"), [(None, True), (5.0, True), (0.5, False), (-1.0, False)]
)
def test_who_has_ended_before_it_is_told_to_has_completed(
    head: Head, monkeypatch: pytest.MonkeyPatch, asked_after_s: float | None, completed: bool
) -> None:
    """Code 0 after our SIGTERM proves nothing, but for one that came while the end was held back."""
    attempt, now = head.attempts[1], time.monotonic()
    workers = FakeWorkers([FIRST_PID], Script(on_signal={}))
    attempt.workers = cast(Workers, workers)

    def at(after_s: float) -> None:
        monkeypatch.setattr("time.monotonic", lambda: now + after_s)

    def asked() -> None:
        if asked_after_s is not None:
            at(asked_after_s)
            for action in head.run.cancel("a"):
                head.effects.perform(action)

    if asked_after_s is not None and asked_after_s < 0:
        asked()
    at(0.0)
    workers.end(0, 0)
    assert attempt.ends()
    if asked_after_s is None or asked_after_s > 0:
        asked()
    head.memory.is_free = True
    at(FREE_WITHIN_S)
    (exited,) = head.later()
    assert isinstance(exited, ev.WorkersExited) and exited.unasked is completed
    head.run.machine.handle(exited)
    state = head.run.machine.run.jobs[1].state
    assert state is (JobState.COMPLETED if completed else JobState.CANCELLED)


def test_it_does_not_wait_for_a_gpu_that_another_one_still_uses(head: Head) -> None:
    head.attempts[2].gpus = (0,)  # in the background of a's
    assert [type(event) for event in head.ends(1)] == [ev.WorkersExited]
    assert head.memory.asked == ([], FREE_WITHIN_S)
    assert head.ends(2) == [] and head.memory.asked == ([0], FREE_WITHIN_S), "the last one does"


def test_two_that_have_ended_both_wait(head: Head) -> None:
    head.attempts[2].gpus = (0,)
    head.attempts[2].over = 0
    assert head.ends(1) == [] and head.memory.asked == ([0], FREE_WITHIN_S)


def test_nobody_waits_for_the_gpus_of_the_last_job(head: Head) -> None:
    head.memory.is_free = True
    (exited,) = head.ends(1)
    head.run.machine.handle(exited)
    head.memory.is_free, head.memory.asked = False, None
    assert [type(event) for event in head.ends(2)] == [ev.WorkersExited]
    assert head.memory.asked is None


def test_nobody_waits_in_a_drain_nor_for_a_lost_gpu(head: Head) -> None:
    head.run.lose(0)
    assert [type(event) for event in head.ends(1, 143)] == [ev.WorkersExited]
    assert head.memory.asked == ([], FREE_WITHIN_S)
    head.run.drain()
    head.ends(2)
    assert head.memory.asked == ([1], 0.0)


def test_a_job_that_shrinks_in_place_waits_for_the_gpus_that_it_leaves(head: Head) -> None:
    attempt = head.attempts[1]
    attempt.gpus, attempt.ranks = (0, 1), 2
    del head.effects._attempts[2]
    workers = FakeWorkers([FIRST_PID, FIRST_PID + 1], Script())
    attempt.workers = cast(Workers, workers)
    attempt.resizing = Resizing(2, (0,), 1, None)
    workers.ready = Ready(step=7).encode()
    assert list(head.effects._resized(attempt)) == [] and head.memory.asked is None, "nobody has left"
    workers.end(1, 0)
    assert list(head.effects._resized(attempt)) == [] and head.memory.asked == ([1], FREE_WITHIN_S)
    assert (attempt.attempt, attempt.gpus) == (1, (0, 1)), "it is what it was to all others"
    head.memory.is_free = True
    (resized,) = head.effects._resized(attempt)
    assert isinstance(resized, ev.WorkersResized) and attempt.attempt == 2


def test_who_ends_while_it_leaves_gpus_waits_once_and_not_for_ever(head: Head) -> None:
    """Else the driver would be asked for the run's life, and its next resize would not wait at all."""
    memory = GpuMemory(lambda device: False, tell=lambda line: None)
    head.effects._memory = memory
    attempt = head.attempts[1]
    attempt.gpus, attempt.ranks = (0, 1), 2
    del head.effects._attempts[2]
    devices = head.run.machine.ledger.devices
    devices |= {index: replace(device, memory_mib=81920.0) for index, device in devices.items()}
    workers = FakeWorkers([FIRST_PID, FIRST_PID + 1], Script())
    attempt.workers = cast(Workers, workers)
    attempt.resizing = Resizing(2, (0,), 1, None)
    workers.ready = Ready(step=7).encode()
    workers.end(1, 0)
    assert list(head.effects._resized(attempt)) == []
    workers.end(0, 0)
    assert head.effects._reap(attempt) == []
    head.run.drain()
    assert [type(event) for event in head.later()] == [ev.WorkersResized, ev.WorkersExited]
    for thread in threading.enumerate():
        if thread.name == "gpu-memory":
            thread.join(10.0)
            assert not thread.is_alive()
    memory.close()


# --- on other hosts ---------------------------------------------------------------------------------------


class Node:
    """A host with two GPUs; part 1 has both, part 2 the first one, in the background."""

    def __init__(self, folder: Path) -> None:
        self.memory = Memory()
        self.parts = {number: self._part(number, devices, folder) for number, devices in ((1, (0, 1)),)}
        self._folder = folder
        inventory = [Device(index=i, host="n1", kind="fake", handle=str(i)) for i in range(2)]
        self.held_back = HeldBack(cast(GpuMemory, self.memory), inventory, self.parts.values())

    def _part(self, number: int, devices: tuple[int, ...], folder: Path) -> PartWatcher:
        order = protocol.Launch(
            part=number,
            job_id=number,
            attempt=1,
            argv=(),
            env={},
            cwd="/",
            folder=str(folder),
            output="",
            devices=devices,
            per_rank=True,
            first_rank=0,
            world_size=2,
            address="",
            port=None,
        )
        workers = SimpleNamespace(left=lambda: 0, ended=[1])
        return PartWatcher(order, cast(LocalWorkers, workers), 0.0)

    def comes(self, number: int, devices: tuple[int, ...]) -> None:
        self.parts[number] = self._part(number, devices, self._folder)

    def told(self) -> list[protocol.NodeMessage]:
        found = [message for _, message in self.held_back.free(FREE_WITHIN_S)]
        self.after_s = [message.after_s for message in found if isinstance(message, protocol.Exited)]
        return [
            msgspec.structs.replace(message, after_s=0.0) if isinstance(message, protocol.Exited) else message
            for message in found
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_node_agent_holds_back_who_has_ended(node: Node) -> None:
    end = protocol.Exited(1, 0)
    node.held_back.add(node.parts[1], end)
    assert node.told() == [] and node.memory.asked == ([0, 1], FREE_WITHIN_S)
    assert node.held_back.over(node.parts[1]) and node.held_back
    node.comes(2, (0,))
    assert node.told() == [] and node.memory.asked == ([1], FREE_WITHIN_S), "the other has somebody"
    node.memory.is_free = True
    assert node.told() == [end] and not node.held_back
    assert node.after_s[0] > 0.0, "it has ended before that"


def test_a_node_agent_holds_back_that_a_rank_has_left(node: Node) -> None:
    node.held_back.add(node.parts[1], protocol.Living(1, 1))
    assert node.told() == [] and node.memory.asked == ([1], FREE_WITHIN_S)
    assert not node.held_back.over(node.parts[1])
    end = protocol.Exited(1, 0)
    node.held_back.add(node.parts[1], end)
    node.memory.is_free = True
    assert node.told() == [protocol.Living(1, 1), end], "in order"


def test_a_launcher_that_starts_the_ranks_itself_gives_back_all_or_nothing(node: Node) -> None:
    part = node.parts[1]
    part.order = msgspec.structs.replace(part.order, per_rank=False)
    node.held_back.add(part, protocol.Living(1, 1))
    assert node.told() == [protocol.Living(1, 1)]
