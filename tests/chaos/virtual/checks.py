"""What must be true of a run that is over, by the ledger of its programs, its users' memory and its files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.policy import make_policy
from hpcsched.store.replay import replay
from hpcsched.store.status import read_status

from .world import World

ALMOST_S = 1e-6
HEARD_S = 3.0
"""Time in which an agent notes how far an attempt was that has ended."""
CLOCK_S = 30.0
"""By so much the run's clock may be wrong: short stops are not noticed."""


def violations(world: World, machine: Machine) -> list[str]:
    """What is wrong, each in a line; empty if nothing is."""
    found = [
        *_states(world, machine),
        *_trainings(world),
        *_counts(world, machine),
        *_commands(world, machine),
        *_records(world, machine),
        *_left(world),
        *world.unsaved,
    ]
    return list(dict.fromkeys(found))


def _states(world: World, machine: Machine) -> Iterator[str]:
    for job in machine.run.jobs.values():
        name, finished = job.spec.name, world.ledger.finished.get(job.spec.name, 0)
        if not job.state.final:
            yield f"{name} is {job.state} at the end"
        if job.state is JobState.COMPLETED and not finished:
            yield f"{name} is COMPLETED, and has not come to its end"
        if job.state is JobState.COMPLETED and job.step != job.spec.steps:
            yield f"{name} is COMPLETED after step {job.step}"
        if job.state is JobState.FAILED and (lost := world.ledger.failures(name)) <= job.spec.retries:
            yield f"{name} is FAILED after {lost} failures of its program, with {job.spec.retries} retries"


def _trainings(world: World) -> Iterator[str]:
    """Each step once, or again from the newest state that was saved; never two attempts at once."""
    anew = world.schedule.begun_anew
    for name in world.schedule.habits:
        trained = world.ledger.of(name)
        for before, after in pairwise(trained):
            ended = before.ended
            if ended is None or after.began < ended - ALMOST_S:
                yield f"{name}: attempts {before.attempt} and {after.attempt} trained at once"
            if after.attempt < before.attempt:  # the same one, where no agent has heard that it had begun
                yield f"{name}: attempt {after.attempt} came after attempt {before.attempt}"
            states = (before.saved, before.held, before.end)
            goes_on = before.saved <= after.begin and after.begin in states
            if not goes_on and not (after.begin == 0 and name in anew):
                yield f"{name}: attempt {after.attempt} began at step {after.begin}, saved was {before.saved}"
        if trained and trained[0].begin:
            yield f"{name} began at step {trained[0].begin}"


def _counts(world: World, machine: Machine) -> Iterator[str]:
    anew = world.schedule.begun_anew
    if machine.run.now > world.lived_s + CLOCK_S:
        yield f"{machine.run.now:.0f} s have run, and agents lived for {world.lived_s:.0f} s"
    for job in machine.run.jobs.values():
        trained = world.ledger.of(job.spec.name)
        again = sum(one.end - one.begin for one in trained) - job.step
        if job.repeated > again:
            yield f"{job.spec.name}: {job.repeated} steps are told to be repeated, {again} were"
        heard = sum(
            max(0, before.told - after.begin)
            for before, after in pairwise(trained)
            if before.ended and world.undisturbed(before.told_at, before.ended + HEARD_S)
        )
        if job.repeated < heard and job.spec.name not in anew:
            yield f"{job.spec.name}: {job.repeated} steps are told to be repeated, at least {heard} were"


def _commands(world: World, machine: Machine) -> Iterator[str]:
    """What was acknowledged has happened; what was not may have."""
    names = machine.run.by_name
    for sent, answer in world.answers.items():
        command = world.sent[sent]
        if sent in world.to_refuse:
            if not answer.error and all(answer.done):
                yield f"{command.command} was taken for good"
        elif answer.error:
            asked = [spec.name for spec in command.jobs if spec.name in names]
            if asked:
                yield f"the submit of {asked} was refused ({answer.error}), and it is there"
        elif command.command == "submit":
            for spec in command.jobs:
                if spec.name not in names:
                    yield f"the submit of {spec.name} was acknowledged, and it is not there"
                elif not all(answer.done):
                    yield f"who submitted {spec.name} was told {answer.outcomes}"
        elif command.command == "cancel" and all(answer.done):
            for target in command.targets:
                if not machine.run.jobs[target].state.final:
                    yield f"the cancel of job {target} was acknowledged, and it goes on"
    for sent in world.must_answer.keys() - world.answers.keys():
        yield f"the {world.sent[sent].command} of {world.must_answer[sent]:.3f} was never answered"
    for sent, command in world.sent.items():
        if (world.rundir.inbox / "new" / sent).exists():
            yield f"{command.command} still waits in the inbox"
    for spec in world.schedule.jobs:
        if spec.name not in names:
            yield f"{spec.name} is lost"


def _records(world: World, machine: Machine) -> Iterator[str]:
    """The journal leads to the state that the last agent had, and the snapshot shows it."""
    again = replay(world.rundir.journal, make_policy).machine
    shown = {job.id: job for job in read_status(world.rundir).jobs}
    for job in machine.run.jobs.values():
        other = again.run.jobs.get(job.id)
        for what in ("state", "step", "attempt", "saved_step", "failures", "repeated", "held"):
            if other is None or getattr(other, what) != getattr(job, what):
                there = None if other is None else getattr(other, what)
                yield f"{job.spec.name}: {what} is {getattr(job, what)}, of the journal's replay {there}"
        if job.id not in shown:
            yield f"{job.spec.name} is not in the snapshot"
        elif (seen := shown[job.id].state) != job.state:
            yield f"{job.spec.name} is {job.state}, in the snapshot {seen}"


def _left(world: World) -> Iterator[str]:
    for program in world.living:
        yield f"{program.job}: processes of attempt {program.attempt} are left"
    for path in world.rundir.root.rglob("*.tmp"):
        yield f"{path.relative_to(world.rundir.root)} is left"
