"""Display of a run while it goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from itertools import islice

from hpcsched.agent.job_folder import gpus_named
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.seats import Seat
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Kill, Launch, Pace, Resize, Suspend, Terminate
from hpcsched.core.exits import said_exit
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.layout import said_seats
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.saving import what_is_lost
from hpcsched.durations import clock
from hpcsched.printing import printable


def sentences(machine: Machine, event: ev.Event, actions: Sequence[Action]) -> list[str]:
    """Sentences on an event and the actions it led to, one line each."""
    lines, noun = [], machine.ledger.noun
    if isinstance(event, (ev.WorkersExited, ev.LaunchFailed)):
        job = machine.run.jobs[event.job_id]
        if job.attempt == event.attempt or job.state.active:
            lines.append(f"{_name(job)} {_ending(job, event, noun, draining=machine.deadline.draining)}")
    elif isinstance(event, ev.AgentStarted):
        for job in machine.run.jobs.since(machine.run.now):
            news = itertools.takewhile(lambda note: note.at == machine.run.now, reversed(job.story))
            told = (note.reason for note in reversed([*news]) if note.reason.why in _TAKEN_OVER)
            lines += [f"{_name(job)}: {reason.said(noun)}" for reason in told]
    elif isinstance(event, (ev.WorkersResized, ev.ResizeFailed)):
        job = machine.run.jobs[event.job_id]
        told = (
            n.reason for n in reversed(job.story) if n.reason.why in _IN_PLACE and n.at == machine.run.now
        )
        lines += [f"{_name(job)} {reason.said(noun)}" for reason in islice(told, 1)]
    elif isinstance(event, (ev.WorkersApart, ev.WorkersReady)):
        job = machine.run.jobs[event.job_id]
        told = (
            n.reason for n in reversed(job.story) if n.reason.why in _PROCESSES and n.at == machine.run.now
        )
        lines += [f"{_name(job)} {reason.said(noun)}" for reason in islice(told, 1)]
    elif isinstance(event, ev.UsageMeasured):
        job = machine.run.jobs[event.job_id]
        told = (n.reason for n in job.story[-1:] if n.reason.why in _FOUND and n.at == machine.run.now)
        lines += [f"{_name(job)} {reason.said(noun)}" for reason in told]
    for action in actions:
        if not isinstance(action, (Launch, Resize, Suspend, Terminate, Kill, Pace)):
            continue
        job = machine.run.jobs[action.job_id]
        match action:
            case Launch(gpus=gpus, role=role, resume=resume, seats=seats):
                at = f"at step {job.step}" if job.reports else "from its checkpoint"
                verb = f"resumes {at}" if resume else "starts"
                where = f"on {gpus_named(gpus, noun)} as {role}{_placed(job, noun)}"
                lines.append(f"{_name(job)} {verb} {_cores(seats) if seats else where}")
                told = (n.reason for n in job.story[-1:] if n.reason.why is Why.ONE_PROCESS)
                lines += [f"{_name(job)} {reason.said(noun)}" for reason in told]
            case Resize(seats=seats) if seats and job.target:
                lines.append(f"{_name(job)}{_because(job.target.why, noun)}")
            case Resize(gpus=gpus, role=role):
                place = f"{gpus_named(gpus, noun)} as {role}{_placed(job, noun)}"
                lines.append(f"{_name(job)} is to go on on {place}")
            case Pace():
                told = (n.reason for n in job.story[-1:] if n.reason.why is Why.PACED and n.at == action.at)
                lines += [f"{_name(job)} {reason.said(noun)}" for reason in told]
            case Suspend():
                then = _to_go_on(job, noun) or _apart(job, action.at, noun)
                cost = what_is_lost(job, machine.run.now, machine.estimates.unsaved_s(job))
                lines.append(f"{_name(job)} is asked to save{then}{cost}")
            case Terminate():
                why = ": it has not said that it can save" * (job.cannot_save and machine.deadline.draining)
                lines.append(f"{_name(job)} is told to end (SIGTERM){why}")
            case Kill():
                lines.append(f"{_name(job)} is killed (SIGKILL)")
    return lines


_PLACING = frozenset(
    {
        Why.OPTIMAL,
        Why.LEFT_OVER,
        Why.NO_PROFILE,
        Why.NOT_PARALLEL,
        Why.FIXED,
        Why.EXCLUSIVE,
        Why.EQUAL_SHARE,
        Why.MARGINAL_GAIN,
        Why.PLANNED,
        Why.PROMOTED,
        Why.RESIZED,
        Why.SCALED_UP,
        Why.SCALED_DOWN,
        Why.GIVEN_BACK,
        Why.GROWN,
        Why.SHRUNK,
        Why.IDLE_GPU,
        Why.BESIDE,
        Why.PACKED,
        Why.SHARED,
    }
)
"""The reasons for which a job is launched on the GPUs it gets; a story tells of other things in between."""

_TAKEN_OVER = frozenset({Why.LOST, Why.ADOPTED, Why.HOST_SILENT})
"""What becomes of attempts of an earlier agent."""

_PARTING = frozenset({Why.PARTED, Why.SLOWER_TOGETHER, Why.MOVED_APART})

_IN_PLACE = frozenset({Why.RESIZED_IN_PLACE, Why.RESEATED, Why.RESIZE_FAILED})

_PROCESSES = frozenset({Why.NOT_MET, Why.SAYS_PARALLEL})

_FOUND = frozenset({Why.SETTLED, Why.WANTS_CORES})
"""What a job on CPU cores comes to where its configuration stays as it is."""


def _placed(job: Job, noun: str) -> str:
    """The reason for a job's GPUs."""
    why = next((n.reason for n in reversed(job.story) if n.reason.why in _PLACING), None)
    return _because(why, noun)


def _because(why: Reason | None, noun: str) -> str:
    return f": {why.said(noun)}" if why else ""


def _name(job: Job) -> str:
    return f"job {job.id} ({job.spec.name})"


def _numbers(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))


def _cores(seats: Sequence[Seat]) -> str:
    return f"with {said_seats(seats)} cores"


def _to_go_on(job: Job, noun: str) -> str:
    """The GPUs or cores of a job after it has saved, if that is decided; on CPU cores also why."""
    if job.target is None:
        return ""
    if job.target.seats:
        return f" to go on {_cores(job.target.seats)}{_because(job.target.why, noun)}"
    return f" to go on with {len(job.target.gpus)} {noun}s"


def _apart(job: Job, at: float, noun: str) -> str:
    """Why a job leaves others that it has shared a GPU with, where that was decided now."""
    told = (note.reason for note in job.story[-1:] if note.at == at and note.reason.why in _PARTING)
    return next((f": {reason.said(noun)}" for reason in told), "")


def _ending(job: Job, event: ev.WorkersExited | ev.LaunchFailed, noun: str, *, draining: bool) -> str:
    if isinstance(event, ev.LaunchFailed):
        again = _in_a_while(job, event.at)
        waits = _WAITS_FOR_ROOM if event.no_room else f"; tried again{again}" if again else ""
        return f"could not be started: {event.error}{waits}"
    bad = f": its STATE.json cannot be read: {event.unreadable}" if event.unreadable else ""
    if event.code == 0 and job.state is JobState.COMPLETED:
        metrics = "".join(
            f", {k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in job.metrics.items()
        )
        return f"completed{metrics}{bad}"
    if job.reason and job.reason.why in (Why.TIME_LIMIT, Why.OUT_OF_MEMORY):
        return f"ended: {job.reason.said(noun)}"
    if event.code == SUSPENDED and not bad:
        return f"saved at step {job.saved_step}" if job.reports else "saved"
    anew = "; begins anew when the run goes on" if draining else "; starts again"
    again = "" if job.state.final else anew
    if again and job.saved_step is not None:
        again = f"; goes on from step {job.saved_step}" if job.reports else "; goes on from its checkpoint"
    if again and not draining:
        again += _in_a_while(job, event.at)
    if event.not_taken:
        again = f"; {event.not_taken}{again if job.reports or job.state.final else anew}"
    said = f"out of memory: {event.oom}" if event.oom else event.detail
    detail = f": {said}" if said else bad
    if event.code == 0:
        detail = ", as it was told to end: that counts as no completion"
    if job.reason and job.reason.why is Why.SAME_FAILURE:
        detail += "; the same as before, so it is not repeated"
    if event.no_room:
        detail, again = f"{detail}: no room in {event.no_room}", _WAITS_FOR_ROOM
    return f"ended with {said_exit(event.code)}{detail}{again}"


def _in_a_while(job: Job, at: float) -> str:
    """When a job is tried again that has failed at once, if that is not now."""
    told = job.story[-1].reason if job.story and not job.held else None
    return f" in {told.facts['again'] - at:.0f} s" if told and told.why is Why.FAILED_AT_ONCE else ""


_WAITS_FOR_ROOM = "; waits for room, which does not count as a failure"


class NothingLeft:
    """Notices when only jobs are left that wait for the user: nothing else would say why the run goes on."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._said = machine, False

    def sentence(self) -> str | None:
        """The sentence on it, once until something else can go on again."""
        machine = self._machine
        stuck = not machine.run.active and machine.run.unfinished > 0 and not machine.deadline.draining
        if stuck:
            left = machine.run.jobs.left()
            stuck = all(job.held or job.state is JobState.HELD or job.unmet for job in left)
        said, self._said = self._said, stuck
        return STUCK if stuck and not said else None


STUCK = (
    "only jobs that you hold or suspended are left: let them go on (release, resume), cancel them, or stop "
    "the run (drain)"
)


def stamp(machine: Machine, ticked: float) -> str:
    """The time into the run, before a line. The machine's own time is that of its last event, which may be
    hours ago when something is said that is no event; `ticked` is that of the loop's last round."""
    return f"[{clock(max(machine.run.now, ticked)):>7}] "


class Narrator:
    """Tells what happens line by line on stderr, each with the time into the run."""

    def __init__(self, machine: Machine, *, quiet: bool = False) -> None:
        self._machine, self._quiet = machine, quiet
        self._stuck = NothingLeft(machine)
        self._now = 0.0

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        if not self._quiet:
            for line in sentences(self._machine, event, actions):
                self._say(line)
            if stuck := self._stuck.sentence():
                self._say(stuck)

    def tick(self, now: float) -> None:
        """Note the time: what is said of no event has no other."""
        self._now = now

    def message(self, text: str, *, about: str = "") -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{stamp(self._machine, self._now)}{printable(text)}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing is held."""
