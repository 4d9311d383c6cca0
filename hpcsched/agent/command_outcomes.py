"""The outcome of a user's command for each job, in words, also when it does nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from signal import Signals

from hpcsched.agent.inbox import USERS_SIGNALS, Answer, Command
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState, Kind
from hpcsched.core.nouns import reworded
from hpcsched.core.saving import what_is_lost
from hpcsched.core.transitions.rerun import blocked_by, coming_back, from_its_beginning


def command_outcome(
    machine: Machine,
    command: Command,
    *,
    at: float,
    cause: str,
    keeping: Collection[int] = (),
    stand_ins: bool = False,
) -> tuple[list[ev.Event], Answer]:
    """The events of a command about jobs, and the answer to its sender.

    `keeping`: ids of jobs whose state is still being written from memory to disk. `stand_ins`: all jobs run
    as stand-ins.
    """
    unknown = [i for i in command.targets if i not in machine.run.jobs]
    if unknown:
        return [], Answer(error=f"no job {unknown[0]}")
    if command.command == "retry":
        return _retry(machine, command, at=at, cause=cause, keeping=keeping)
    jobs = [machine.run.jobs[i] for i in command.targets]
    told = [_outcome(machine, job, command.command, at, stand_ins) for job in jobs]
    doing = [i for i, (done, _) in zip(command.targets, told, strict=True) if done]
    # The last one alone carries the cause: a journal torn before it does not hold the command.
    causes = [*[""] * (len(doing) - 1), cause]
    make = _EVENTS[command.command]
    events: list[ev.Event] = [make(at=at, cause=c, job_id=i) for c, i in zip(causes, doing, strict=False)]
    done, outcomes = [done for done, _ in told], [text for _, text in told]
    return events, Answer(ids=command.targets, outcomes=outcomes, done=done)


def signal_outcome(machine: Machine, command: Command, send: Callable[[int, Signals], bool]) -> Answer:
    """Send a signal to the processes of jobs, and say to which.

    `send(job id, signal)`: whether there are any.
    """
    if command.signal not in USERS_SIGNALS:
        return Answer(error=f"{command.signal[:20]!r} is none of {', '.join(USERS_SIGNALS)}")
    unknown = [i for i in command.targets if i not in machine.run.jobs]
    if unknown:
        return Answer(error=f"no job {unknown[0]}")
    done = [send(i, Signals[command.signal]) for i in command.targets]
    states = [machine.run.jobs[i].state for i in command.targets]
    told = [
        f"was sent {command.signal}" if sent else f"is {state}: it has no processes"
        for sent, state in zip(done, states, strict=True)
    ]
    return Answer(ids=command.targets, outcomes=told, done=done)


def _retry(
    machine: Machine, command: Command, *, at: float, cause: str, keeping: Collection[int]
) -> tuple[list[ev.Event], Answer]:
    asked = [i for i in command.targets if not (command.from_scratch and i in keeping)]
    back = coming_back(machine.run, asked)
    told = []
    for i in command.targets:
        if i in asked:
            told.append(_of_retry(machine, machine.run.jobs[i], back, command.from_scratch))
        else:
            told.append((False, "is still being written to disk: ask again in a moment"))
    others = [i for i in back if i not in command.targets]
    told += [(True, f"runs again with {machine.run.jobs[back[i] or i].spec.name}") for i in others]
    ids = [*command.targets, *others]
    answer = Answer(ids=ids, outcomes=[text for _, text in told], done=[done for done, _ in told])
    if not back:
        return [], answer
    event = ev.RetryRequested(at=at, cause=cause, job_ids=tuple(asked), from_scratch=command.from_scratch)
    return [event], answer


def _of_retry(
    machine: Machine, job: Job, back: dict[int, int | None], from_scratch: bool
) -> tuple[bool, str]:
    if not job.state.final:
        return False, f"is {job.state}: only what has ended is run again"
    if job.id not in back:
        name = blocked_by(machine.run, job, back) or ""
        other = machine.run.jobs[machine.run.by_name[name]]
        return False, f"waits for {name}, which is {other.state}: retry that, and this one comes with it"
    saved = 0 if from_scratch or from_its_beginning(job) else job.saved_step
    return True, f"runs again from {f'step {saved}' if saved else 'its beginning'}"


def _outcome(machine: Machine, job: Job, command: str, now: float, stand_ins: bool) -> tuple[bool, str]:
    """Whether the command will do something to the job as it is now, and what, or why not."""
    if job.state.final:
        again = "" if command == "cancel" else f"; `hpcsched retry {job.spec.name}` runs it again"
        return False, f"is {job.state} already: nothing to {command}{again}"
    if command == "suspend" and not stand_ins and (why := _never_ready(job)):
        return False, why
    done, text = _OUTCOMES[command](job)
    text = reworded(text, machine.ledger.noun)
    if command == "suspend" and done and job.state is JobState.RUNNING and job.ready:
        text += what_is_lost(job, now, machine.estimates.unsaved_s(job, now=now))
    return done, text


def _never_ready(job: Job) -> str | None:
    """Why nobody can say whether a running job will ever be able to save and leave; None if it will."""
    waits = job.state in (JobState.STARTING, JobState.RUNNING) and not job.ready
    unknown = job.spec.kind is Kind.COMMAND and job.spec.restart is None
    if not waits or job.held or job.wanted or not unknown:
        return None
    if any(attempt.ready_s is not None for attempt in job.attempts):
        return None
    return (
        "cannot be suspended: its program has not said that it can (it has made no ready file). One that "
        "knows nothing of hpcsched never does; another can be suspended once it has"
    )


def _cancel(job: Job) -> tuple[bool, str]:
    if job.wanted == "cancel":
        return False, "is being cancelled already"
    return True, "is told to end" if job.state.active else "cancelled"


def _hold(job: Job) -> tuple[bool, str]:
    if job.state.active:
        return False, "runs, and only waiting jobs are held: suspend it instead"
    if job.held or job.state is JobState.HELD:
        return False, "is held already"
    return True, "held"


def _suspend(job: Job) -> tuple[bool, str]:
    if job.wanted == "cancel":
        return False, "is being cancelled"
    if job.held or job.state is JobState.HELD:
        return False, "stays away already until it is resumed"
    if job.state is JobState.PENDING:
        return False, "does not run yet: hold it instead"
    if job.state is JobState.SUSPENDED:
        return True, "stays suspended until it is resumed"
    if not job.ready and job.state is not JobState.SUSPENDING:
        when = "it is seen to save by itself" if job.saves_by_itself else "it says that it can"
        return True, f"is asked to save as soon as {when}"
    return True, "is asked to save and leave"


def _let_go(job: Job) -> tuple[bool, str]:
    if not job.held and job.state is not JobState.HELD:
        return False, "is neither held nor suspended by you"
    return True, "goes on as soon as GPUs are free"


_OUTCOMES = {"cancel": _cancel, "hold": _hold, "suspend": _suspend, "release": _let_go, "resume": _let_go}

_EVENTS: dict[str, type[ev.JobEvent]] = {
    "cancel": ev.CancelRequested,
    "hold": ev.HoldRequested,
    "release": ev.ReleaseRequested,
    "suspend": ev.SuspendRequested,
    "resume": ev.ResumeRequested,
}
