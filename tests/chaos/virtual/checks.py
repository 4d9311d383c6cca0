"""What must be true of a run that is over, by the ledger of its programs, its users' memory and its files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import PATIENCE
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Why
from hpcsched.policy import make_policy
from hpcsched.store.replay import replay
from hpcsched.store.status import read_status

from .world import Sent, World

ALMOST_S = 1e-6
HEARD_S = 3.0
"""Time in which an agent notes how far an attempt was that has ended."""
CLOCK_S = 30.0
"""By so much the run's clock may be wrong: short stops are not noticed."""
LEAVES_WITHIN_S = 8.0
"""Time in which a program that is told to end has ended, or was killed."""
FORGIVEN = 3
"""How often a program may leave unsaved in a row."""
NEVER = float("inf")


def violations(world: World, machine: Machine) -> list[str]:
    """What is wrong, each in a line; empty if nothing is."""
    world.looks_for_answers()  # the last agent may have given some as it ended
    found = [
        *_states(world, machine),
        *_trainings(world),
        *_counts(world, machine),
        *_commands(world, machine),
        *_records(world, machine),
        *_left(world),
        *world.wrong,
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
        if why := _wrongly(world, machine, job):
            yield f"{name} is {job.state}: {why}"


def _wrongly(world: World, machine: Machine, job: Job) -> str:
    """Why a job should not have ended so; empty if it may have."""
    name = job.spec.name
    match job.state:
        case JobState.CANCELLED:
            cancelled = any(one.command.command == "cancel" for one in _sent_for(world, {job.id}))
            others = [machine.run.jobs[machine.run.by_name[other]] for other in job.spec.after]
            if not cancelled and all(other.state is JobState.COMPLETED for other in others):
                return "nobody has cancelled it"
        case JobState.TIMEOUT if not (job.spec.needs and job.spec.needs.time_s):
            return "it may take as long as it likes"
        case JobState.OUT_OF_MEMORY:
            return "it takes no memory"
        case JobState.FAILED:
            failed, in_vain = world.ledger.failures[name], len(world.ledger.left_in_vain[name])
            if failed <= job.spec.retries and in_vain <= FORGIVEN:
                return (
                    f"its program has failed {failed} times, with {job.spec.retries} retries, and has left "
                    f"{in_vain} times unsaved"
                )
    return ""


def _sent_for(world: World, job_ids: Collection[int]) -> list[Sent]:
    """What was sent that may have done something to these jobs, or may still do so."""
    return [one for one in world.sent.values() if one.may_change(job_ids)]


def _trainings(world: World) -> Iterator[str]:
    """Each step once, or again from the newest state that was saved; never two attempts at once."""
    for name, spec in world.schedule.specs.items():
        trained = world.ledger.of(name)
        retried = [one.at for one in _sent_for(world, _brought_back_with(world, name)) if one.retries]
        cancelled = [one.at for one in _sent_for(world, _ids(world, {name})) if one.cancels]
        for before, after in pairwise(trained):
            ended = before.ended
            if ended is None or after.began < ended - ALMOST_S:
                yield f"{name}: attempts {before.attempt} and {after.attempt} trained at once"
            if after.attempt < before.attempt:  # the same one, where no agent has heard that it had begun
                yield f"{name}: attempt {after.attempt} came after attempt {before.attempt}"
            states = (before.saved, before.held, before.end)
            goes_on = before.saved <= after.begin and after.begin in states
            anew = after.begin == 0 and before.end == spec.steps and any(at < after.began for at in retried)
            if not goes_on and not anew:
                yield f"{name}: attempt {after.attempt} began at step {after.begin}, saved was {before.saved}"
            forgotten = any(at < after.began for at in (*retried, *cancelled))
            kept = before.in_memory and not forgotten and world.undisturbed(ended or 0.0, after.began)
            if kept and after.begin != before.end:
                yield f"{name}: attempt {after.attempt} began at step {after.begin}, {before.end} was held"
        if trained and trained[0].begin:
            yield f"{name} began at step {trained[0].begin}"


def _counts(world: World, machine: Machine) -> Iterator[str]:
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
        if job.repeated < heard:
            yield f"{job.spec.name}: {job.repeated} steps are told to be repeated, at least {heard} were"


def _commands(world: World, machine: Machine) -> Iterator[str]:
    """What was acknowledged has happened; what was not may have."""
    names = machine.run.by_name
    for sent in world.sent.values():
        command, answer = sent.command, sent.answer
        if answer is None:
            if sent.due is not None:
                yield f"the {command.command} of {sent.at:.3f} was never answered"
        elif sent.refused:
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
        else:
            for target in command.targets:
                if sent.may_change({target}):
                    yield from _obeyed(world, machine.run.jobs[target], sent)
    for name, sent in world.sent.items():
        if (world.rundir.inbox / "new" / name).exists():
            yield f"{sent.command.command} still waits in the inbox"
    for spec in world.schedule.jobs:
        if spec.name not in names:
            yield f"{spec.name} is lost"


def _obeyed(world: World, job: Job, sent: Sent) -> Iterator[str]:
    """A job does what was said to be done with it, until another command takes it back."""
    verb, name = sent.command.command, job.spec.name
    until = _taken_back(world, name, sent)
    launched = world.ledger.launched[name]
    if verb in ("cancel", "hold", "suspend"):
        for at in launched:
            if sent.answered < at < until:
                yield f"{name}: began {at - sent.answered:.2f} s after the answer to `{verb}`"
    if verb == "cancel" and until == NEVER and job.state is not JobState.CANCELLED:
        ended = max(world.ledger.finished[name], default=NEVER)
        within_s = LEAVES_WITHIN_S * (PATIENCE if job.spec.background else 1)
        late = ended > sent.answered + within_s and world.undisturbed(sent.answered, ended)
        if job.state is not JobState.COMPLETED or late:
            yield f"the cancel of {name} was acknowledged, and it is {job.state}"
    in_vain = job.reason is not None and job.reason.why is Why.DEPENDENCY_NEVER_SATISFIED
    if verb == "retry" and until == NEVER and not in_vain and not any(at >= sent.at for at in launched):
        yield f"the retry of {name} was acknowledged, and it has not begun again"


def _taken_back(world: World, name: str, sent: Sent) -> float:
    """When a command may be taken back at the earliest. What was answered before is carried out before; of
    others nobody knows the order."""
    verb = sent.command.command
    ids, back = _ids(world, {name}), _brought_back_with(world, name)
    later = [one for one in world.sent.values() if one.answered > sent.at and one is not sent]
    by = {"hold": ("release", "resume"), "suspend": ("release", "resume"), "retry": ("cancel",)}.get(verb, ())
    undone = [one.at for one in later if one.command.command in by and one.may_change(ids)]
    if verb != "retry":
        undone += [one.at for one in later if one.retries and one.may_change(back)]
    return min(undone, default=NEVER)


def _brought_back_with(world: World, name: str) -> set[int]:
    """The ids of a job and of all that it waits for: it is run again with them."""
    names, line = {name}, [name]
    for one in line:
        new = {*world.schedule.specs[one].after} - names
        names |= new
        line += new
    return _ids(world, names)


def _ids(world: World, names: Collection[str]) -> set[int]:
    """The ids of those that were there from the first."""
    return {number for number, spec in enumerate(world.schedule.jobs, 1) if spec.name in names}


def _records(world: World, machine: Machine) -> Iterator[str]:
    """The journal leads to the state that the last agent had, also by all that is archived of it, and the
    snapshot shows it."""
    path = world.rundir.journal
    replayed = [replay(path, make_policy, short_cut=short_cut).machine for short_cut in (True, False)]
    shown = {job.id: job for job in read_status(world.rundir).jobs}
    for job in machine.run.jobs.values():
        others = [again.run.jobs.get(job.id) for again in replayed]
        for what in ("state", "step", "attempt", "saved_step", "failures", "repeated", "held"):
            there = [getattr(other, what, None) for other in others]
            if any(value != getattr(job, what) for value in there):
                yield f"{job.spec.name}: {what} is {getattr(job, what)}, of the journal's replay {there}"
        if job.id not in shown:
            yield f"{job.spec.name} is not in the snapshot"
        elif (seen := shown[job.id].state) != job.state:
            yield f"{job.spec.name} is {job.state}, in the snapshot {seen}"


def untrue_reasons(world: World, machine: Machine) -> Iterator[str]:
    """While a run goes on the snapshot says of each job that waits why it does; seconds that go down may be
    those of its last change."""
    shown = {row.id: row for row in read_status(world.rundir).jobs}
    for job in machine.run.jobs.left():
        if (reason := machine.waiting_reason(job)) is None:
            continue
        row, said = shown[job.id], reason.said(machine.ledger.noun)
        counts_down = reason.why is Why.WALLTIME_TOO_SHORT
        if row.reason != reason.why or not (counts_down or row.detail == said):
            told = reason.why if counts_down else said
            yield f"{job.spec.name}: {told}; the snapshot says: {row.detail}"


def _left(world: World) -> Iterator[str]:
    for program in world.living:
        yield f"{program.job}: processes of attempt {program.attempt} are left"
    for pattern in ("*.tmp", "held.*", "*.new", "inbox/tmp/*"):
        for path in world.rundir.root.rglob(pattern):
            yield f"{path.relative_to(world.rundir.root)} is left"
