"""Crashes at will: a simulation that writes the real journal, and what a later agent makes of its remains.

The machine, the journal and the replay are the real ones; recovery follows `agent.recovery`: replay the
journal, look which steps are saved on disk, say AgentStarted, go on. Where only the agent has died, the
workers on other hosts live on: the next agent adopts some of them, and has not heard of the hosts of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.core.profile import Profile
from hpcsched.policy import make_policy
from hpcsched.sim.engine import Simulation
from hpcsched.sim.under_way import UnderWay
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.testing.builders import some_devices
from hpcsched.testing.invariants import check


@dataclass(frozen=True)
class Scene:
    """A scene to be run: jobs on GPUs, and the commands users will give, each at its time.

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
        self._saves(action.job_id)

    def _goes_on(self, run: UnderWay, event: ev.WorkersResized) -> None:
        super()._goes_on(run, event)
        self._saves(event.job_id)

    def _saves(self, job_id: int) -> None:
        run, job = self._runs[job_id], self.machine.run.jobs[job_id]
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
        if isinstance(event, ev.AgentStarted):
            super()._feed(event)
            for job_id in event.adopted:
                self._saves(job_id)
            return
        if isinstance(event, ev.CheckpointSaved):
            run = self._runs.get(event.job_id)
            if run is None or run.attempt != event.attempt or run.course.steps < event.step:
                return
            done = run.course.step_at(event.at - run.launched)  # as others share its GPU, it may be slower
            event = replace(event, step=min(event.step, done))
        super()._feed(event)


class Rehearsal:
    """A scene played to the end with every event in a journal, to be cut off anywhere.

    `machine` is the state at the end; `saved[k]` is, by job, the newest step on disk after k records.
    `started` is what the agent after the latest crash said first.
    """

    started: ev.AgentStarted

    def __init__(self, scene: Scene, folder: Path) -> None:
        self._scene = scene
        self._path, self._cut = folder / "whole.jsonl", folder / "cut.jsonl"
        first = [*self._first(Machine(make_policy), {}), *scene.inbox(set(), 0.0)]
        self.saved: list[dict[int, int]] = [{}]
        self.machine = self._play(Machine(make_policy), first, Journal(self._path), self.saved)
        self._load()

    def _load(self) -> None:
        self._data = self._path.read_bytes()
        self._ends = [0, *(at + 1 for at, byte in enumerate(self._data) if byte == ord("\n"))]

    @property
    def records(self) -> int:
        """The number of records of the whole journal."""
        return len(self._ends) - 1

    def crash(self, records: int, *, torn: bool, takes_over: Random | None = None) -> tuple[Machine, Machine]:
        """Lose all but the first `records` records (`torn`: and half of the next), recover, go on.

        `takes_over`: only the agent has died, and chances are even for each attempt to be adopted; else its
        processes are over, or its host has not been heard of.
        A torn record tells of something that has happened: what it says was saved is on disk.
        Returns the state just after the replay, and that at the end.
        """
        keep = self._ends[records]
        if torn:
            keep += (self._ends[records + 1] - keep) // 2
        self._cut.write_bytes(self._data[:keep])
        before = replay(self._cut, make_policy).machine
        machine, length, count, carried_out, _ = replay(self._cut, make_policy)
        assert (length, count) == (self._ends[records], records)
        on_disk = self.saved[records + torn]
        first = [
            *self._first(machine, on_disk, takes_over),
            *self._scene.inbox(carried_out, machine.run.now),
        ]
        journal = Journal(self._cut, length=length, records=count)
        self._saved_after_crash = [*self.saved[:records], dict(on_disk)]
        return before, self._play(machine, first, journal, self._saved_after_crash)

    def replayed(self) -> Machine:
        """The state that the journal of the latest crash leads to."""
        return replay(self._cut, make_policy).machine

    def keep_crash(self) -> None:
        """The run with the latest crash in it is the one that is cut off from now on."""
        self._cut.replace(self._path)
        self.saved = self._saved_after_crash
        self._load()

    def _first(
        self, machine: Machine, saved: Mapping[int, int], takes_over: Random | None = None
    ) -> list[ev.Event]:
        """What an agent says first: that it is there, and the jobs that the run does not know yet."""
        scene, now = self._scene, machine.run.now
        adopted: tuple[int, ...] = ()
        unsure: dict[int, float] = {}
        if takes_over:
            adopted = tuple(job_id for job_id in machine.adoptable() if takes_over.random() < 0.5)
            over = [job_id for job_id in machine.run.active if job_id not in adopted]
            unsure = {i: now + takes_over.uniform(1.0, 60.0) for i in over if takes_over.random() < 0.5}
        self.started = ev.AgentStarted(
            rules=ev.RULES,
            at=now,
            wall=now,
            devices=some_devices(scene.gpus),
            policy=scene.policy,
            policy_options=scene.options,
            saved_steps={i: saved[i] for i in machine.run.active if i in saved and i not in adopted},
            adopted=adopted,
            unsure=unsure,
            epoch=len(machine.run.lives) + 1,
        )
        first: list[ev.Event] = [self.started]
        new = tuple(job for job in scene.jobs if job.name not in machine.run.by_name)
        if new:
            first += [
                ev.ProfilesLoaded(at=now, profiles=scene.profiles),
                ev.JobsSubmitted(at=now, first_id=len(machine.run.jobs) + 1, jobs=new),
            ]
        return first

    def _play(
        self, machine: Machine, first: Iterable[ev.Event], journal: Journal, saved: list[dict[int, int]]
    ) -> Machine:
        def watch(event: ev.Event, actions: Sequence[Action], machine: Machine) -> None:
            check(machine)
            journal.append([event], sync=False)
            on_disk = dict(saved[-1])
            if isinstance(event, (ev.CheckpointSaved, ev.WorkersExited)):
                step = event.step if isinstance(event, ev.CheckpointSaved) else event.saved_step
                if step is not None:
                    on_disk[event.job_id] = step
            saved.append(on_disk)

        try:
            profiles = self._scene.profiles
            return _Saving((), profiles, machine=machine, happenings=first, watch=watch).run()
        finally:
            journal.close()
