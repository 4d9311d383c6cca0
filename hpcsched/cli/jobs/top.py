"""`hpcsched top`: the run as it goes on, from its snapshot alone; in place on a terminal, else in pages."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from hpcsched.cli.common import (
    Number,
    code_of,
    dir_option,
    find_run,
    hint_at_runs,
    option,
    plural,
    whole_number,
)
from hpcsched.cli.jobs import about_idle, batch_job_status
from hpcsched.cli.jobs.about_leftover import in_a_line
from hpcsched.cli.jobs.columns import cores_held, shared_gpus, steps, where
from hpcsched.cli.jobs.status import asked, silent_gpus
from hpcsched.client.waiting import read_all, what_takes_them
from hpcsched.core.model import JobState
from hpcsched.durations import clock
from hpcsched.errors import HpcschedError
from hpcsched.printing import printable, shortened, spans
from hpcsched.store.status import GpuStatus, JobStatus, Status, age_s, is_old, left_s

PAGE_WIDTH = 100
"""Columns of a page where no terminal says otherwise."""

_LEVELS = " ▁▂▃▄▅▆▇█"
_ORDER = {
    JobState.RUNNING: 0,
    JobState.SUSPENDING: 1,
    JobState.STARTING: 2,
    JobState.SUSPENDED: 3,
    JobState.PENDING: 4,
    JobState.HELD: 5,
}
_ORDER_OF_COUNTS = (*_ORDER, *(state for state in JobState if state.final))


@click.command()
@dir_option
@option("--delay", "-d", type=Number(min=0.1), default=2.0, help="Seconds between updates (2).")
@click.option(
    "--count", "-n", type=click.IntRange(min=1), help="Number of updates; default: until you leave."
)
@click.pass_context
def top(ctx: click.Context, dir_: str | None, delay: float, count: int | None) -> int:
    """The run as it goes on: time left, GPUs by host, jobs. Leave with q or Ctrl-C.

    Reads the snapshot only, so it works on a login node. Into a file or pipe it prints plain pages, until
    the run is FINISHED or -n is reached. Exit code 3: the run's agent is gone, and jobs are left.
    """
    rundir = find_run(ctx, dir_)
    with hint_at_runs(ctx, dir_):
        read_all(rundir, only=())
    watch = _Watch(lambda: read_all(rundir, only=()))
    with contextlib.suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            _in_place(watch, delay, count)
        else:
            _in_pages(watch, delay, count)
    return code_of(rundir)


class _Watch:
    """Looks at a run again and again; keeps what it saw last when the run cannot be read."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self._asked_at: tuple[str, int] | None = None
        self._life: str | None = None
        self.status: Status | None = None
        self.trouble = ""

    def look(self) -> None:
        """Read the snapshot; ask the batch system once for each snapshot that no agent continues."""
        try:
            status = self._read()
        except HpcschedError as error:
            self.trouble = f"{error}; shown is what was seen last"
            return
        self.status, self.trouble = status, ""
        run = status.run
        if not batch_job_status.needs_asking(run):
            self._asked_at = None
            return
        this = (run.written_at, run.seq)
        if this != self._asked_at:
            asked(run)
            self._asked_at, self._life = this, run.allocation.get("life")
        run.allocation["life"] = self._life

    @property
    def finished(self) -> bool:
        return self.status is not None and self.status.run.state == "FINISHED"


def _in_pages(watch: _Watch, delay: float, count: int | None) -> None:
    shown = 0
    while True:
        watch.look()
        width = whole_number(os.environ.get("COLUMNS", "")) or PAGE_WIDTH
        page = Screen(width=width, height=None, fancy=_can_draw())
        sys.stdout.write("\n" * bool(shown) + "\n".join(page.lines(watch.status, watch.trouble)) + "\n")
        sys.stdout.flush()
        shown += 1
        if shown == count or watch.finished:
            return
        time.sleep(delay)


def _in_place(watch: _Watch, delay: float, count: int | None) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    shown = 0
    with _keys() as pressed, Live(console=Console(), screen=True, auto_refresh=False) as live:
        while shown != count:
            watch.look()
            until = time.monotonic() + delay
            while True:
                width, height = shutil.get_terminal_size()
                lines = Screen(width=width, height=height, fancy=_can_draw()).lines(
                    watch.status, watch.trouble
                )
                text = Text("\n".join(lines), no_wrap=True, overflow="crop")
                text.highlight_regex(r"(?m)^(JOBID|HOST) .*$", "bold reverse")
                text.highlight_regex(r"\A\S+", "bold")
                text.highlight_regex(r"(?m)^! .*$", "bold red")
                live.update(text, refresh=True)
                # Often enough that the window can be resized and the clock in the first line runs.
                wait_s = min(1.0, until - time.monotonic())
                if wait_s <= 0:
                    break
                if pressed(wait_s):
                    return
            shown += 1


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Gives a function that waits for a key, for a number of seconds, and says whether it means to leave."""
    if not sys.stdin.isatty():

        def slept(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield slept
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        if not select.select([descriptor], [], [], seconds)[0]:
            return False
        typed = os.read(descriptor, 64)
        return not typed or typed[:1] in (b"q", b"Q", b"\x04")

    try:
        tty.setcbreak(descriptor)  # Ctrl-C still interrupts
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _can_draw() -> bool:
    try:
        _LEVELS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Screen:
    """A status in `width` columns and `height` lines (None: all lines). `fancy`: block characters."""

    width: int
    height: int | None
    fancy: bool = True

    def lines(self, status: Status | None, trouble: str = "") -> list[str]:
        """The page; no line is longer than `width`, and there are at most `height`."""
        if status is None:
            return [self._cut(printable(f"! {trouble or 'nothing to see yet'}"))]
        head = self._head(status) + ([f"! {trouble}"] if trouble else [])
        height = self.height
        room = None if height is None else max(2, (height - len(head)) // 3)
        gpus = self._gpus(status, room)
        room = None if height is None else max(2, height - len(head) - len(gpus) - 2)
        jobs = self._jobs(status.jobs, room)
        return [self._cut(printable(line)) for line in [*head, "", *gpus, "", *jobs][:height]]

    def _head(self, status: Status) -> list[str]:
        run = status.run
        kind, job_id = run.allocation.get("kind") or "none", run.allocation.get("id")
        first = ["STALE" if run.stale else run.state, run.policy]
        if kind != "none":
            first.append(f"{kind} job {job_id}" if job_id else kind)
        left = left_s(run)
        if left is not None and run.state in ("RUNNING", "DRAINING"):
            first.append(f"{clock(left)} left" if left > 0 else f"time was up {clock(-left)} ago")
        old = is_old(run) or run.stale
        first.append(f"{'! ' if old else ''}seen {clock(age_s(run))} ago")
        gpus = [gpu for gpu in status.gpus if gpu.lane == "foreground"]
        busy = len({gpu.index for gpu in status.gpus if gpu.job is not None})
        counts = status.counts
        used = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
        second = [f"{busy} of {plural(len(gpus), status.noun)} busy"]
        if used:
            second.append(f"{sum(used) / len(used):.0%} used")
        if lent := sum(gpu.loan for gpu in gpus):
            second.append(f"{lent} lent to jobs on CPU cores")
        if run.lost_gpus:
            second.append(f"{len(run.lost_gpus)} lost")
        second += [f"{counts[state]} {state.lower()}" for state in _ORDER_OF_COUNTS if counts[state]]
        lines = ["  ".join(first), ", ".join(second), self._short(run.dir)]
        if idle := about_idle.in_a_line(run, clock):
            lines += self._wrapped(idle)
        if waiting := what_takes_them(status):
            lines += self._wrapped(f"! {waiting}")
        if saying := batch_job_status.sentence(run, clock(age_s(run))):
            lines += self._wrapped(f"! {saying}")
        lines += in_a_line(status, clock)
        for line in silent_gpus(status):
            lines += self._wrapped(f"! {line}")
        return lines

    def _gpus(self, status: Status, room: int | None) -> list[str]:
        """A line a host (or more): which job has each GPU, and how busy it is."""
        guests = {gpu.index: gpu.job for gpu in status.gpus if gpu.lane == "background"}
        gpus = [gpu for gpu in status.gpus if gpu.lane == "foreground"]
        riders = Counter(job.gpus[0] for job in status.jobs if job.role in ("packed", "shared") and job.gpus)
        by_host: dict[str, list[GpuStatus]] = {}
        for gpu in gpus:
            by_host.setdefault(gpu.host, []).append(gpu)
        if not by_host:
            return [f"no {status.noun}s"]
        name_width = min(max(4, *map(len, by_host)), self.width // 4)
        cells = {
            host: [self._cell(gpu, guests.get(gpu.index), riders[gpu.index]) for gpu in mine]
            for host, mine in by_host.items()
        }
        cell_width = max(len(cell) for row in cells.values() for cell in row)
        across = max(1, (self.width - name_width) // (cell_width + 2))
        lines = [f"{'HOST':<{name_width}}  {status.noun.upper()}:JOB USED"]
        for host, row in cells.items():
            for start in range(0, len(row), across):
                label = shortened(host, name_width) if start == 0 else ""
                rest = "  ".join(cell.ljust(cell_width) for cell in row[start : start + across])
                lines.append(f"{label:<{name_width}}  {rest}".rstrip())
        if room is not None and len(lines) > room:
            free = sum(gpu.job is None and not gpu.loan and gpu.index not in guests for gpu in gpus)
            note = (
                f"... {plural(len(by_host), 'host')} in all, {free} of {plural(len(gpus), status.noun)} free"
            )
            lines = [*lines[: room - 1], note]
        return lines

    def _cell(self, gpu: GpuStatus, guest: int | None, riders: int) -> str:
        """The jobs on a GPU, as `3+8` where 8 is in its background and `3(+2)` where two train as one with 3,
        and how busy it is; `lent` to jobs on CPU cores."""
        holder = "lent" if gpu.loan else "-" if gpu.job is None else str(gpu.job)
        job = holder + ("" if guest is None else f"+{guest}")
        job += f"(+{riders})" if riders else ""
        if gpu.utilisation is None:
            return f"{gpu.index}:{job}"
        bar = _LEVELS[min(8, max(0, round(gpu.utilisation * 8)))] if self.fancy else ""
        return f"{gpu.index}:{job} {bar}{gpu.utilisation:.0%}"

    def _jobs(self, jobs: list[JobStatus], room: int | None) -> list[str]:
        """The unfinished jobs, running ones first, as many as there is room for."""
        unfinished = sorted(
            (job for job in jobs if not job.state.final), key=lambda job: (_ORDER[job.state], job.id)
        )
        if not unfinished:
            return ["no unfinished jobs"]
        shown = unfinished
        if room is not None and len(unfinished) + 1 > room:
            shown = unfinished[: max(1, room - 2)]
        wide = self.width >= 100
        header = ["JOBID", "NAME", "ST", "ROLE", "GPUS", "STEP", "DONE", "TIME", "LEFT", "WHERE (WHY)"]
        right = {"JOBID", "STEP", "DONE", "TIME", "LEFT"}
        names = 32 if wide else 18
        shared = shared_gpus(jobs)
        rows = [[*self._row(job, names, shared)] for job in shown]
        if not wide:  # the number of GPUs says most of it
            drop = header.index("ROLE")
            for row in (header, *rows):
                del row[drop]
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = []
        for row in (header, *rows):
            cells = [
                cell.rjust(width) if title in right else cell.ljust(width)
                for title, cell, width in zip(header, row, widths, strict=True)
            ]
            lines.append("  ".join(cells).rstrip())
        if len(shown) < len(unfinished):
            lines.append(f"... and {plural(len(unfinished) - len(shown), 'more job')}")
        return lines

    def _row(self, job: JobStatus, names: int, shared: set[int]) -> Iterator[str]:
        done = "-" if job.step is None or not job.steps else f"{job.step / job.steps:.0%}"
        yield str(job.id)
        yield shortened(job.name, names)
        yield job.state.code
        yield job.role or "-"
        yield cores_held(job) or spans(job.gpus) + "+" * (not shared.isdisjoint(job.gpus))
        yield steps(job)
        yield done
        yield clock(job.elapsed_s)
        yield "-" if job.eta_s is None else clock(job.eta_s)
        yield where(job)

    def _short(self, path: str) -> str:
        return path if len(path) <= self.width else f"...{path[-(self.width - 3) :]}"

    def _cut(self, line: str) -> str:
        return line if len(line) <= self.width else line[: self.width - 1] + ("…" if self.fancy else ">")

    def _wrapped(self, text: str) -> list[str]:
        import textwrap

        return textwrap.wrap(text, self.width, subsequent_indent="! ", break_on_hyphens=False)
