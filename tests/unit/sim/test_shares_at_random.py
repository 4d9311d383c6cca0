"""Shares of GPUs among random jobs, under all policies: what must hold whoever comes, goes, or fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from budget import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.mechanisms.sharing.shares import RESERVE
from hpcsched.core.model import Device, JobSpec, Role
from hpcsched.core.needs import Needs
from hpcsched.core.profile import Profile
from hpcsched.policy import POLICIES, make_policy
from hpcsched.policy.sharing import UNKNOWN
from hpcsched.sim.engine import Simulation
from hpcsched.sim.interference import Interference
from hpcsched.sim.under_way import UnderWay
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.testing.builders import a_job, a_profile, some_devices, state_of
from hpcsched.testing.invariants import check

MODELS = "wxyz"
TOTAL_MIB = 10_000.0
LATE_S = 100_000.0
"""Longer than any of these jobs takes."""


@dataclass(frozen=True)
class Scene:
    """`fails`: by job the number of its first attempts that run out of memory."""

    jobs: tuple[JobSpec, ...]
    known: tuple[Profile, ...]
    truth: tuple[Profile, ...]
    devices: tuple[Device, ...]
    policy: str
    fails: tuple[int, ...]
    happenings: tuple[ev.Event, ...]
    loss: float


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    truth, known = [], []
    for model in MODELS:
        busy, mib = draw(st.floats(0.05, 1.0)), draw(st.integers(500, 9_000))
        profile = a_profile(model, [10.0, 15.0], start_s=3.0, suspend_s=2.0, resume_s=2.0)
        truth.append(replace(profile, busy={1: busy}, memory_mib={1: float(mib)}))
        known.append(truth[-1] if draw(st.booleans()) else profile)
    gpus, hosts = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    jobs = tuple(draw(some_job(i, gpus)) for i in range(draw(st.integers(2, 9))))
    commands = [ev.CancelRequested, ev.SuspendRequested, ev.HoldRequested]
    again: dict[Any, Any] = {ev.SuspendRequested: ev.ResumeRequested, ev.HoldRequested: ev.ReleaseRequested}
    happenings: list[ev.Event] = []
    orders = st.tuples(st.integers(1, len(jobs)), st.sampled_from(commands), st.floats(0, 200))
    for job_id, command, at in draw(st.lists(orders, max_size=4)):
        happenings.append(command(at=at, job_id=job_id))
        if command in again:
            happenings.append(again[command](at=at + draw(st.floats(1, 60)), job_id=job_id))
    if draw(st.booleans()):
        happenings.append(ev.DrainRequested(at=draw(st.floats(1, 150))))
    return Scene(
        jobs=jobs,
        known=tuple(known),
        truth=tuple(truth),
        devices=tuple(replace(device, memory_mib=TOTAL_MIB) for device in some_devices(gpus, hosts)),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        fails=tuple(draw(st.lists(st.integers(0, 3), min_size=len(jobs), max_size=len(jobs)))),
        happenings=tuple(happenings),
        loss=draw(st.sampled_from([0.0, 0.03, 0.4])),
    )


@st.composite
def some_job(draw: st.DrawFn, number: int, most: int) -> JobSpec:
    share = draw(st.sampled_from([None, 0.0, 0.0, 0.2, 0.25, 0.5, 0.9]))
    asked = draw(st.none() | st.integers(300, 10_000).map(float))
    return a_job(
        f"j{number}",
        draw(st.sampled_from(MODELS)),
        draw(st.integers(10, 3_000)),
        gpus=draw(st.integers(1, most)) if share is None else 1,
        needs=None if share is None else Needs(share=share, gpu_memory_mib=asked),
        retries=draw(st.integers(0, 2)),
        submit_at=draw(st.sampled_from([0.0, 0.0, 20.0, 75.5])),
    )


class Failing(Simulation):
    """Workers that run out of memory half-way."""

    def __init__(self, scene: Scene, **rest: Any) -> None:
        super().__init__(
            scene.jobs,
            scene.known,
            truth=scene.truth,
            policy=scene.policy,
            options={"budget": 5} if scene.policy == "planner" else {},
            interference=Interference(sharing_loss=scene.loss),
            **rest,
        )
        self._devices, self._fails = scene.devices, scene.fails

    def _will_exit(
        self, job_id: int, run: UnderWay, at: float, code: int, step: int, *, saved: bool = True
    ) -> None:
        if code != 0 or run.leaves or run.attempt > self._fails[job_id - 1]:
            super()._will_exit(job_id, run, at, code, step, saved=saved)
            return
        at = max(self.machine.run.now, run.launched + (at - run.launched) / 2)
        super()._will_exit(job_id, run, at, 1, run.course.step_at(at - run.launched), saved=False)

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkersExited) and event.code == 1:
            event = replace(event, detail="torch.OutOfMemoryError: CUDA out of memory")
        super()._feed(event)


def check_memory(machine: Machine, actions: Sequence[Action]) -> int:
    """Those that came to others fit beside them, by all that was known then; how many came."""
    sharing, came = machine.mechanism(Sharing), 0
    for action in actions:
        if not isinstance(action, Launch) or action.role is not Role.SHARED:
            continue
        (gpu,) = action.gpus
        newcomer, members = machine.run.jobs[action.job_id], sharing.members(gpu)
        assert newcomer in members and len(members) > 1
        needs = [sharing.need_mib(job, gpu) for job in members]
        assert None not in [need for need, job in zip(needs, members, strict=True) if job is not newcomer]
        needed = sum(UNKNOWN * TOTAL_MIB if need is None else need for need in needs)
        assert needed <= RESERVE * TOTAL_MIB + 1e-6, (needed, members)
        came += 1
    return came


@pytest.mark.long
@settings(max_examples=examples(100))
@given(scenes())
def test_nothing_goes_wrong_whoever_shares(scene: Scene) -> None:
    """No decision is invalid, as the machine and the invariants say; nobody comes where there is no room by
    what is known; every job ends, in a second life if the first was drained; the journal gives the same."""
    came, lives = 0, 0
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = Journal(path)

        def watch(event: ev.Event, actions: list[Action], machine: Machine) -> None:
            nonlocal came, lives
            check(machine)
            came += check_memory(machine, actions)
            lives += isinstance(event, ev.AgentStarted)
            journal.append([event], sync=False)

        try:
            machine = Failing(scene, happenings=scene.happenings, watch=watch).run()
            if not machine.run.finished:
                again = ev.AgentStarted(
                    rules=ev.RULES,
                    at=machine.run.now,
                    wall=machine.run.now,
                    devices=scene.devices,
                    policy=scene.policy,
                )
                Failing(scene, machine=machine, happenings=[again], watch=watch).run()
        finally:
            journal.close()
        assert all(job.state.final for job in machine.run.jobs.values())
        assert machine.run.now < LATE_S
        replayed = replay(path, make_policy).machine
    assert state_of(replayed) == state_of(machine)
    assert replayed.mechanism(Sharing).shares == machine.mechanism(Sharing).shares
    event(f"came to others: {min(came, 5)}, lives: {lives}, {scene.policy}")
