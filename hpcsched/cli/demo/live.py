"""What a demo says while its trainings run: what happens and why, in a line or two."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Sequence

import click

from hpcsched.cli.common import plural
from hpcsched.cli.run.live import Narrator, sentences, stamp
from hpcsched.cli.run.live_table import LiveTable
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch, Resize
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.printing import printable

PROGRESS_S = 10.0
"""Seconds between two lines on the progress, where no table is redrawn."""

HIGHLIGHT = "PROMOTED IN PLACE"


def told(machine: Machine, event: ev.Event, actions: Sequence[Action]) -> list[str]:
    """Sentences on an event and what came of it, for people who see a run for the first time.

    What is rare is told as `run` tells it.
    """
    lines = _of_event(machine, event)
    usual = len(sentences(machine, event, ()))
    for action in actions:
        match action:
            case Launch():
                lines.append(_launch(machine, action))
            case Resize():
                lines.append(_resize(machine, action))
            case _:
                lines += sentences(machine, event, [action])[usual:]
    return lines


def _of_event(machine: Machine, event: ev.Event) -> list[str]:
    if isinstance(event, ev.WorkersResized):
        job = machine.run.jobs[event.job_id]
        done = _newest(job, Why.RESIZED_IN_PLACE)
        if done and done.facts["gpus"] > done.facts["old"]:
            return [_promoted(job, done, machine.ledger.noun)]
    if isinstance(event, ev.WorkersExited):
        job = machine.run.jobs[event.job_id]
        if job.state is JobState.COMPLETED and event.code == 0:
            metrics = ", ".join(f"{k} {v:.3g}" for k, v in job.metrics.items() if v is not None)
            return [f"{job.spec.name} has ended" + (f" ({metrics})" if metrics else "")]
    return sentences(machine, event, ())


def _promoted(job: Job, done: Reason, noun: str) -> str:
    stood_s = done.facts.get("stopped_s")
    stood = "" if stood_s is None else f"; it stood still for {max(1, round(1000 * stood_s))} ms"
    return (
        f"{HIGHLIGHT}: {job.spec.name} goes on with {plural(done.facts['gpus'], noun)} from step"
        f" {done.facts['step']}, without a restart{stood}."
    )


def _launch(machine: Machine, launch: Launch) -> str:
    job = machine.run.jobs[launch.job_id]
    verb = f"goes on from step {job.step}" if launch.resume else "starts"
    why = next((n.reason for n in reversed(job.story) if n.reason.why in _PLACING), None)
    noun = machine.ledger.noun
    return f"{job.spec.name} {verb} on {_places(launch.gpus, noun)}{_because(why, noun)}"


_PLACING = (Why.OPTIMAL, Why.LEFT_OVER, Why.PROMOTED, Why.NO_PROFILE)


def _because(why: Reason | None, noun: str) -> str:
    match why:
        case Reason(why=Why.OPTIMAL, facts={"gpus": count, "rate": rate}):
            return f": {count} is fastest for it ({rate:.3g} steps/s)"
        case Reason(why=Why.LEFT_OVER, facts={"wanted": wanted}):
            return f": {wanted} would be fastest for it, no more are free yet"
        case Reason(why=Why.PROMOTED, facts={"old": old, "gpus": count}):
            return f": promoted from {old} to {count}"
    return f": {why.said(noun)}" if why else ""


def _resize(machine: Machine, resize: Resize) -> str:
    job = machine.run.jobs[resize.job_id]
    why = _newest(job, Why.PROMOTED)
    gain = f": {why.facts['gain']}" if why else ""
    return f"{job.spec.name} is to have {_places(resize.gpus, machine.ledger.noun)} while it trains{gain}"


def _places(gpus: Sequence[int], noun: str) -> str:
    *others, last = map(str, sorted(gpus))
    return f"{noun}s {', '.join(others)} and {last}" if others else f"{noun} {last}"


def _newest(job: Job, why: Why) -> Reason | None:
    return next((note.reason for note in reversed(job.story) if note.reason.why is why), None)


class OnTerminal(LiveTable):
    """The table of `run`, with the demo's sentences above it."""

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        for line in told(self._machine, event, actions):
            self.message(line)

    def message(self, text: str, *, about: str = "") -> None:
        from rich.text import Text

        style = "bold green" if text.startswith(HIGHLIGHT) else ""
        for begin, line in _wrapped(stamp(self._machine, self._now), text, self._console.width):
            self._console.print(Text(begin, style="dim") + Text(line, style=style), soft_wrap=True)


class InLines(Narrator):
    """The same line by line, with the progress every few seconds."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._told_at = time.monotonic()

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        for line in told(self._machine, event, actions):
            self._say(line)

    def tick(self, now: float) -> None:
        super().tick(now)
        if time.monotonic() - self._told_at >= PROGRESS_S and (line := progress(self._machine)):
            self._say(line)

    def _say(self, text: str) -> None:
        self._told_at = time.monotonic()
        width = shutil.get_terminal_size().columns
        for begin, line in _wrapped(stamp(self._machine, self._now), text, width):
            click.echo(f"{begin}{line}")


def progress(machine: Machine) -> str:
    """Such as "small-b 70%, wide 12%; 1 waiting"."""
    jobs = [job for job in machine.run.active.values() if job.spec.steps]
    parts = [f"{job.spec.name} {100 * job.step // (job.spec.steps or 1)}%" for job in jobs]
    waiting = machine.run.unfinished - len(machine.run.active)
    return ", ".join(parts) + (f"; {waiting} waiting" if waiting and parts else "")


def _wrapped(begin: str, text: str, width: int) -> list[tuple[str, str]]:
    """Lines of a sentence behind a time, each with what stands before it."""
    lines = textwrap.wrap(printable(text), max(20, width - len(begin) - 1)) or [""]
    return [(begin if number == 0 else " " * len(begin), line) for number, line in enumerate(lines)]
