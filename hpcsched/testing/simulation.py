"""Crashes at will: a simulation that writes the real journal, and what a later agent makes of its remains.

The machine, the journal and the replay are the real ones; recovery follows `agent.recovery`: replay the
journal, look which steps are saved on disk, say AgentStarted, go on.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch
from hpcsched.core.invariants import check
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.core.profile import Profile
from hpcsched.policy import make_policy
from hpcsched.sim.engine import Simulation
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.testing.builders import some_devices


@dataclass(frozen=True)
class Scene:
    """What is to be run: jobs on GPUs, and the commands users will give, each at its time.

    A command stays in the inbox until its event is in the journal, as it does live.
    """

    jobs: tuple[JobSpec, ...]
    profiles: tuple[Profile, ...]
    gpus: int
    policy: str = "marble"
    options: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[ev.Event, ...] = ()

    def inbox(self, carried_out: set[str], now: float) -> list[ev.Event]:
        """The commands still to be carried out."""
        waiting = [(f"c{i}", command) for i, command in enumerate(self.commands)]
        return [
            replace(command, at=max(now, command.at), cause=f"inbox:{name}")
            for name, command in waiting
            if name not in carried_out
        ]


class _Saving(Simulation):
    """Workers that also save every `checkpoint_every_s`, at no cost in time."""

    def _launch(self, action: Launch) -> None:
        super()._launch(action)
        run, job = self._runs[action.job_id], self.machine.jobs[action.job_id]
        every_s, course = job.spec.checkpoint_every_s, run.course
        at = course.start_s + every_s
        while at < course.end_s:
            self._schedule(
                ev.CheckpointSaved(
                    at=run.launched + at, job_id=job.id, attempt=run.attempt, step=course.step_at(at)
                )
            )
            at += every_s

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.CheckpointSaved):
            run = self._runs.get(event.job_id)
            if run is None or run.attempt != event.attempt or run.course.steps < event.step:
                return
        super()._feed(event)


class Rehearsal:
    """A scene played once to the end with every event in a journal, to be cut off anywhere.

    `machine` is the end of that uncut run; `saved[k]` the step on disk by job after k records.
    """

    def __init__(self, scene: Scene, folder: Path) -> None:
        self._scene, self._folder = scene, folder
        path = folder / "whole.jsonl"
        self._journal = Journal(path)
        self._saved: dict[int, int] = {}
        self.saved: list[dict[int, int]] = [{}]
        self.ends = [0]
        self.machine = self._play(self._from_the_start(), Machine(make_policy))
        self._journal.close()
        self.data = path.read_bytes()
        for at, byte in enumerate(self.data):
            if byte == ord("\n"):
                self.ends.append(at + 1)
        self.events = len(self.ends) - 1

    def _from_the_start(self) -> list[ev.Event]:
        return [*self._first(Machine(make_policy), {}), *self._scene.inbox(set(), 0.0)]

    def _first(self, machine: Machine, saved: Mapping[int, int]) -> list[ev.Event]:
        """What an agent says first: that it is there, and the jobs that the run does not know yet."""
        scene, now = self._scene, machine.now
        lives = {job_id: saved[job_id] for job_id in machine.active if job_id in saved}
        first: list[ev.Event] = [
            ev.AgentStarted(
                at=now,
                wall=now,
                devices=some_devices(scene.gpus),
                policy=scene.policy,
                policy_options=scene.options,
                saved_steps=lives,
            )
        ]
        new = tuple(job for job in scene.jobs if job.name not in machine.by_name)
        if new:
            first += [
                ev.ProfilesLoaded(at=now, profiles=scene.profiles),
                ev.JobsSubmitted(at=now, first_id=len(machine.jobs) + 1, jobs=new),
            ]
        return first

    def _play(self, happenings: Iterable[ev.Event], machine: Machine) -> Machine:
        def watch(event: ev.Event, actions: Sequence[Action], machine: Machine) -> None:
            check(machine)
            self._journal.append([event], sync=False)
            if isinstance(event, (ev.CheckpointSaved, ev.WorkersExited)):
                step = event.step if isinstance(event, ev.CheckpointSaved) else event.saved_step
                if step is not None:
                    self._saved[event.job_id] = step
            self.saved.append(dict(self._saved))

        profiles = self._scene.profiles
        return _Saving((), profiles, machine=machine, happenings=happenings, watch=watch).run()

    def crash(self, records: int, *, torn: bool) -> tuple[Machine, Machine]:
        """Lose all but the first `records` records (`torn`: and half of the next), recover, go on.

        A torn record tells of something that has happened: what it says was saved is on disk.
        Returns the machine as it was just after the replay, and at the end.
        """
        keep = self.ends[records]
        if torn:
            keep += (self.ends[records + 1] - keep) // 2
        path = self._folder / "cut.jsonl"
        path.write_bytes(self.data[:keep])
        before = replay(path, make_policy).machine
        machine, length, count, carried_out = replay(path, make_policy)
        assert (length, count) == (self.ends[records], records)
        on_disk = self.saved[records + torn]
        first = self._first(machine, on_disk)
        inbox = self._scene.inbox(carried_out, machine.now)
        self._journal = Journal(path, length=length, records=count)
        self._saved = dict(on_disk)
        end = self._play([*first, *inbox], machine)
        self._journal.close()
        assert sum(1 for _ in path.open("rb")) > records
        return before, end

    def saved_at(self, records: int, job_id: int) -> int:
        """The step of a job's newest checkpoint on disk after so many records."""
        return self.saved[records].get(job_id, 0)

    def record_of(self, offset: int) -> int:
        """The number of the record that holds the byte at this offset."""
        return bisect.bisect_right(self.ends, offset)
