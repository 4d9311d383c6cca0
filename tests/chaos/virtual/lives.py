"""A schedule played: agents begin, die and begin again until the run is over; then it is checked."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from hpcsched.agent import compacting, recovery, start
from hpcsched.agent.allocation.watch import AllocationWatch, EndTimeAnswer
from hpcsched.agent.hosts import Hosts
from hpcsched.agent.loop import Agent, RunOutcome
from hpcsched.agent.request import RunRequest
from hpcsched.core import events as ev
from hpcsched.core.actions import Action
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, HostCores
from hpcsched.core.profile import Profile
from hpcsched.devices.base import Sample
from hpcsched.errors import HpcschedError
from hpcsched.patience import PASSING
from hpcsched.store import compaction
from hpcsched.store.rundir import SNAPSHOT_PERIOD_S
from hpcsched.testing.invariants import check

from .checks import untrue_reasons
from .clock import VirtualSelector
from .disk import Died
from .schedule import Schedule
from .world import HOST, VirtualBatch, World

MOST_LIVES = 40
LOOKS_EVERY_S = 2.0
"""How often the snapshot is looked at, when nothing has changed since it was written."""
TOLD_WITHIN_S = SNAPSHOT_PERIOD_S + 1.0
"""After so long it says what has changed by the time alone."""


class _Samples:
    """`Monitor` without a thread."""

    world: World
    age_s, interval_s = 0.0, 5.0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._due = 0.0

    def take(self) -> Sequence[Sample] | None:
        if self.world.clock.monotonic < self._due:
            return None
        self._due = self.world.clock.monotonic + self.interval_s
        lost = self.world.lost_gpus
        return [
            Sample(gpu=gpu, healthy=gpu not in lost, why="it fell off the bus" if gpu in lost else "")
            for gpu in range(self.world.schedule.gpus)
        ]

    def close(self) -> bool:
        return True


class _Watch(AllocationWatch):
    """Asks by the virtual clock, without a thread."""

    world: World

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch("threading.Thread"):
            super().__init__(*args, **kwargs)
        self._asks_why = False
        self.kill_wait_s = self._batch.kill_wait()
        self._regular()

    def ask_now(self) -> None:
        self.world.clock.after(0.2, lambda: self._answers.put(self._end()))

    def ask_why(self) -> None:
        def ask() -> None:
            at, reason = self.world.clock.monotonic, self._reason()
            self._answers.put(EndTimeAnswer(reason=reason, of_end=False, asked_at=at))
            self._answers.put(self._end())

        self.world.clock.after(0.2, ask)

    def _regular(self) -> None:
        def ask() -> None:
            if not self._stopped:
                self._answers.put(self._end())
                self._regular()

        self.world.clock.after(20.0, ask)


class _Checks:
    """An observer that checks the invariants after every so many events, as a check looks at all jobs, and
    what the snapshot says."""

    def __init__(self, world: World, machine: Machine, every: int) -> None:
        self._world, self._machine, self._every, self._say = world, machine, every, world.said.append
        self._events = 0
        self._looks_at, self._untrue = world.clock.monotonic, dict[str, float]()

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        self._events += 1
        if self._events % self._every == 0:
            check(self._machine)
        if isinstance(event, ev.EventVoided):
            raise AssertionError(f"an event was voided: {event}")

    def tick(self, now: float) -> None:
        clock = self._world.clock.monotonic
        if self._machine.run.changed or clock < self._looks_at:
            return
        self._looks_at = clock + LOOKS_EVERY_S
        if not self._world.undisturbed(clock - LOOKS_EVERY_S):
            return
        with self._world.disk.not_the_agent():
            found = untrue_reasons(self._world, self._machine)
            self._untrue = {line: self._untrue.get(line, clock) for line in found}
        self._world.wrong += [line for line, at in self._untrue.items() if clock - at > TOLD_WITHIN_S]

    def message(self, text: str, *, about: str = "") -> None:
        self._say(text)
        if text.startswith("no plan could be made"):
            raise AssertionError(text)


@contextmanager
def _no_descriptor_left() -> Iterator[None]:
    """Close what an agent that died has left open, as its process would."""
    before = _descriptors()
    try:
        yield
    finally:
        for fd in _descriptors() - before:
            with suppress(OSError):  # the one by which they were listed
                os.close(fd)


def _descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def play(world: World, *, check_every: int = 1) -> Machine:
    """Play the schedule to the end of the run; the machine of the last agent.

    `check_every`: after how many events the invariants are checked.
    """
    schedule, disk = world.schedule, world.disk
    devices = tuple(Device(index=i, host=HOST, kind="cpu", handle=str(i)) for i in range(schedule.gpus))

    def hosts(*_: Any) -> Hosts:
        return Hosts(
            kind="cpu",
            speed=1.0,
            inventory=devices,
            launcher=world,
            sample=list,
            close=lambda: None,
            cores=(HostCores(host=HOST, own=(4, 5, 6, 7)),),
        )

    def abandon(agent: Agent) -> object:
        if disk.dead:  # a process that was killed asks nobody to save
            raise Died
        if disk.failing in PASSING:
            raise AssertionError("a hiccup of the file system ends the agent")
        return own_abandon(agent)

    own_abandon = Agent._abandon
    selector = type("Selector", (VirtualSelector,), {"clock": world.clock})
    samples = type("Samples", (_Samples,), {"world": world})
    watch = type("Watch", (_Watch,), {"world": world})
    instead: dict[Any, dict[str, Any]] = {
        Agent: {"_abandon": abandon},
        start: {
            "_here": hosts,
            "Monitor": samples,
            "AllocationWatch": watch,
            "alongside": lambda *_, compacting, **__: [compacting.look],
            "register": lambda *_: "",
            "without_exec": lambda batch: False,
        },
        selectors: {"DefaultSelector": selector},
        compacting: {"COMPACTED_BYTES": schedule.compacted_bytes, "_start": world.compacts},
        compaction: {"COMPACTED_BYTES": schedule.compacted_bytes},
        recovery: {
            "find_orphans": world.find_orphans,
            "end_processes": world.end_processes,
            "marked": lambda *_: set(),
        },
    }
    with ExitStack() as stack:
        for module, names in instead.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        stack.enter_context(world.clock.instead_of_time())
        stack.enter_context(disk.instead_of_os())
        for life in range(MOST_LIVES):
            if (machine := _live(world, resume=life > 0, check_every=check_every)) is not None:
                return machine
            soon = world.random.choice((0.0, 0.1, 0.5, 3.0, 20.0))
            world.clock.sleep(soon if life < MOST_LIVES // 2 else 20.0)  # what is left may need more time
    raise AssertionError(f"no end after {MOST_LIVES} lives")


def profiles_of(schedule: Schedule, models: Iterable[str]) -> tuple[Profile, ...]:
    """What was measured of the models of a schedule's jobs."""
    return tuple(
        Profile(
            model=model,
            device="cpu",
            throughput={gpus: schedule.habits[model].rate * gpus for gpus in range(1, schedule.gpus + 1)},
        )
        for model in sorted(models)
    )


def _live(world: World, *, resume: bool, check_every: int) -> Machine | None:
    """One agent; the machine if the run is over."""
    schedule, disk = world.schedule, world.disk
    disk.living, disk.dead = True, False
    world.begins()
    with disk.not_the_agent():
        resume = resume and world.rundir.begun
    request = RunRequest(
        dir=world.rundir.root,
        devices=f"cpu:{schedule.gpus}",
        jobs=() if resume else schedule.jobs,
        policy=schedule.policy,
        policy_options=schedule.options,
        resume=resume,
        grace_s=schedule.grace_s,
        margin_s=8.0,
    )
    say = world.said.append
    say(f"--- a life begins at {world.clock.monotonic - 1000:.1f}")
    with _no_descriptor_left():
        died = False
        try:
            result = start.run(
                request,
                batch=VirtualBatch(world),
                find_profiles=lambda models, device: profiles_of(schedule, models),
                find_layers=lambda model, device: None,
                observe=lambda machine: _Checks(world, machine, check_every),
            )
        except Died:
            died = True
            say("died")
            return None
        except (HpcschedError, OSError) as error:
            if world.disk_was_well():
                raise
            say(f"ended: {error}")
            return None
        finally:
            disk.living = False
            world.ended(died=died)
            for program in world.programs:
                program.close()
    say(f"ended: {result.outcome}")
    return result.machine if result.outcome is RunOutcome.FINISHED else None
