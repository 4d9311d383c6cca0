"""The table of running jobs that `run` redraws on a terminal, as wide as that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcsched.cli.jobs.about_cpu import there
from hpcsched.cli.jobs.columns import aligned
from hpcsched.cli.run.live import NothingLeft, sentences, stamp
from hpcsched.core import events as ev
from hpcsched.core.actions import Action
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.cores import WHOLE
from hpcsched.core.mechanisms.cpu.layout import cores_of
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.model import JobState
from hpcsched.durations import clock
from hpcsched.printing import hanging, printable, said_cores, shortened
from hpcsched.store.snapshot import elapsed_s

MOST_LINES = 12
"""Jobs that are shown; the others are counted."""

LEAST_NAME = 8
"""Characters that a name keeps, however narrow it is."""

BAR = 24
"""Characters of the bar that shows how much of a job is done."""


class LiveTable:
    """A table of the running jobs, redrawn in place; events scroll above it."""

    def __init__(self, machine: Machine) -> None:
        from rich.console import Console
        from rich.live import Live

        self._machine, self._stuck = machine, NothingLeft(machine)
        self._console = Console(stderr=True)
        self._now = 0.0
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, get_renderable=self._render
        )
        self._live.start()

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        for line in sentences(self._machine, event, actions):
            self.message(line)
        if stuck := self._stuck.sentence():
            self.message(stuck)

    def tick(self, now: float) -> None:
        self._now = now
        self._live.refresh()

    def message(self, text: str, *, about: str = "") -> None:
        from rich.text import Text

        when = stamp(self._machine, self._now)
        line = Text(hanging(when + printable(text), under=len(when), width=self._console.width))
        line.stylize("dim", 0, len(when))
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Any:
        from rich.text import Text

        title, head, *rows = table(self._machine, self._now, self._console.width)
        parts = [Text(title, style="italic"), Text(head, style="bold"), *map(Text, rows)]
        return Text("\n").join(parts)


def table(machine: Machine, now: float, width: int) -> list[str]:
    """The lines: a title, the head, a line for each of the first jobs that run; none is longer than `width`.

    Narrow, it has what people look for; wide, all. Only names are shortened, in their middle.
    """
    jobs = sorted(machine.run.active.values(), key=lambda job: job.id)[:MOST_LINES]
    columns = [(key, right, text) for key, right, least, text in _COLUMNS if width >= least]
    cells = [[key, *(text(job, now) for job in jobs)] for key, _, text in columns]
    others = sum(max(map(len, column)) for column in cells[:1] + cells[2:]) + 2 * (len(cells) - 1)
    room = max(LEAST_NAME, width - others)
    cells[1] = [shortened(name, room) for name in cells[1]]
    lines = aligned(cells, [right for _, right, _ in columns]).splitlines()
    waiting = machine.run.unfinished - len(machine.run.active)
    done = len(machine.run.jobs) - machine.run.unfinished
    title = (
        f"{clock(now)}  {len(machine.run.active)} running, {waiting} waiting, {done} ended; "
        f"{', '.join(_free(machine))} free"
    )
    return [line[:width].rstrip() for line in (title, *lines)]


def _steps(job: Job, _: float) -> str:
    return str(job.step) if job.steps is None else f"{job.step}/{job.steps}"


def _left(job: Job, _: float) -> str:
    if job.steps is None or not job.rate or job.state is not JobState.RUNNING:
        return "-"
    return clock(max(0, job.steps - job.step) / job.rate)


def _bar(job: Job, _: float) -> str:
    if job.steps is None:
        return ""
    step = job.step if job.state is not JobState.STARTING else 0
    full = BAR * min(step, job.steps) // job.steps
    return "━" * full + "╌" * (BAR - full)


def _gpus(job: Job, _: float) -> str:
    seats = job.current.seats
    return said_cores(cores_of(seats)) if seats else ",".join(map(str, job.current.gpus))


_COLUMNS: tuple[tuple[str, bool, int, Callable[[Job, float], str]], ...] = (
    ("JOBID", True, 0, lambda job, _: str(job.id)),
    ("NAME", False, 0, lambda job, _: job.spec.name),
    ("ST", False, 0, lambda job, _: f"{job.state.code}{'' if job.ready else '*'}"),
    ("TIME", True, 0, lambda job, now: clock(elapsed_s(job, now))),
    ("LEFT", True, 0, _left),
    ("GPUS", False, 0, _gpus),
    ("ROLE", False, 110, lambda job, _: str(job.role or "-")),
    ("STEP", True, 0, _steps),
    ("RATE", True, 110, lambda job, _: f"{job.rate:.4g}/s" if job.rate else "-"),
    ("PROGRESS", False, 130, _bar),
)
"""Head, to the right, from which width on, text."""


def _free(machine: Machine) -> list[str]:
    """The free GPUs and, where there are jobs for them, the free CPU cores."""
    gpus = [f"{len(machine.ledger.free)} of {len(machine.ledger.devices)} {machine.ledger.noun}s"]
    if not machine.mechanism(Cpu).used:
        return gpus
    free = (
        sum(
            sum(machine.mechanism(Cpu).room(host, lent=True).values())
            for host in machine.mechanism(Cpu).cores.hosts
        )
        / WHOLE
    )
    cores = f"{free:.4g} of {sum(there(machine).values()):.4g} CPU cores"
    return [*(gpus if machine.ledger.devices else ()), cores]
