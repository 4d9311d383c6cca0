"""A run as one HTML page: how it went, its Gantt chart, its jobs, and how their batches and cores changed.

The page needs no other file, no script and no network. What stands where is in `page.html.jinja`, which
escapes all texts; here is what they say.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec import UNSET

from hpcsched.contract.seats import Seat
from hpcsched.core.mechanisms.cpu.layout import cores_of, said_seats
from hpcsched.core.model import Attempt
from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.printing import printable
from hpcsched.report.idle import Idle
from hpcsched.report.jobs import KINDS, JobDetail, sections
from hpcsched.report.pieces import Section, Table, anchor, inline, or_dash, row, template
from hpcsched.report.result import JobResult, Result
from hpcsched.report.tables import duration, steps_done, stretches, time_format
from hpcsched.store.batches import Decision


@dataclass(frozen=True, kw_only=True)
class BatchHistory:
    """A job whose global batch changes: its decisions (at least one), what it was told, and their figure."""

    job_id: int
    name: str
    decisions: Sequence[Decision]
    options: WorkerOptions
    svg: str


@dataclass(frozen=True, kw_only=True)
class CoresHistory:
    """A job on CPU cores: its configurations (at least one), the cores it may have, and their figure."""

    job_id: int
    name: str
    attempts: Sequence[Attempt]
    budget: float
    svg: str


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """The data of a run's page.

    `state` is the run's, `notes` say what else a reader should know. `gantt` is the chart as an SVG document
    (None: it could not be drawn), `use` the same of how busy the devices were. `efficiencies` are those of
    jobs by id, where they are known. `details` are the jobs that get a section of their own, `facts` are
    those on the run, as (name, words). `policies` are simulations of its jobs, `about_policies` what to know
    of them, or why there are none.
    """

    title: str
    state: str
    began: str
    result: Result
    gantt: str | None
    efficiencies: Mapping[int, float]
    histories: Sequence[BatchHistory] = ()
    configurations: Sequence[CoresHistory] = ()
    use: str | None = None
    details: Sequence[JobDetail] = ()
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    policies: Sequence[Result] = ()
    about_policies: str = ""

    def html(self) -> str:
        """The whole page. Raises MissingExtra without jinja2."""
        numbers = count(1)
        details = sections(self.details, numbers)
        linked = {detail.job_id for detail in self.details}
        page = template("page.html.jinja").render(
            page=self,
            noun=self.result.noun,
            tiles=self._headline(),
            resources=self._resources(),
            gantt=None if self.gantt is None else inline(self.gantt, next(numbers)),
            use=None if self.use is None else inline(self.use, next(numbers)),
            jobs=_job_table(self.result, self.efficiencies, linked) if self.result.jobs else None,
            details=details,
            idle=_idle_table(self.result.idle, self.result.noun) if self.result.idle else None,
            policies=_policy_table(self.result, self.policies) if self.policies else None,
            configurations=[_of_cores(history, next(numbers)) for history in self.configurations],
            histories=[_of_batches(history, next(numbers)) for history in self.histories],
        )
        return printable(page, lines=True)

    def _resources(self) -> str:
        """GPUs, CPU cores or both, for a heading."""
        noun = self.result.noun
        if self.result.core_hours is UNSET:
            return f"{noun}s"
        return f"{noun}s and CPU cores" if self.result.on_gpus else "CPU cores"

    def _headline(self) -> list[tuple[str, str]]:
        """The numbers that sum the run up, as (name, value)."""
        r = self.result
        over = r.jobs_total > 0 and self.state == "FINISHED"
        tiles = [
            ("state", self.state),
            ("policy", r.policy),
            *([(f"{r.noun}s", str(r.gpus))] if r.on_gpus else []),
            *([("CPU cores", f"{sum(r.cores.values()):g}")] if r.cores else []),
            ("jobs completed", f"{r.jobs_completed} of {r.jobs_total}"),
            ("makespan" if over else "time so far", duration(r.makespan_s)),
            ("mean JCT", or_dash(None if r.mean_jct_s is None else duration(r.mean_jct_s))),
        ]
        if r.on_gpus:
            tiles += [(f"{r.noun}-hours", f"{r.gpu_hours:.2f}"), ("utilisation", f"{r.utilisation:.0%}")]
            if r.idle and r.idle.gpu_hours:
                tiles.append((f"{r.noun}-hours idle", f"{r.idle.gpu_hours:.2f}"))
        if r.core_hours is not UNSET:
            tiles.append(("core-hours", f"{r.core_hours:.2f}"))
        tiles.append(("overhead", f"{r.overhead_of_held:.1%}"))
        if r.lost_of_held:
            tiles.append(("work lost", f"{r.lost_of_held:.1%}"))
        if r.gap is not None:
            tiles.append(("above the bound", f"{r.gap:z.1%}"))
        if r.background_total:
            done = f"{r.background_completed} of {r.background_total}"
            tiles += [("in the background", done), (f"{r.noun}-hours there", f"{r.background_gpu_hours:.2f}")]
        return tiles


def _policy_table(measured: Result, simulated: Sequence[Result]) -> Table:
    """The run as it was measured, and as it was simulated under policies."""
    results = {f"measured, under {measured.policy}": measured}
    results |= {f"{result.title}, simulated": result for result in simulated}
    rows = [
        row(
            [
                name,
                duration(result.makespan_s),
                or_dash(None if result.mean_jct_s is None else duration(result.mean_jct_s)),
                f"{result.gpu_hours:.2f}",
            ],
            {0: "left"},
        )
        for name, result in results.items()
    ]
    return Table(row(["policy", "makespan", "mean JCT", f"{measured.noun}-hours"], {0: "left"}), rows)


def _idle_table(idle: Idle, noun: str) -> Table | None:
    """The GPU time that nobody used, by host; None if it was all used."""
    if not idle.gpu_hours and not idle.given_back_gpu_hours:
        return None
    backs = [host.given_back_s for host in idle.hosts.values() if host.given_back_s is not None]
    unit, clock = time_format(backs)
    heads = [
        "host",
        f"{noun}s",
        f"{noun}-hours idle",
        "nothing to start",
        "whole host",
        f"given back {unit}".rstrip(),
    ]
    rows = [
        row(
            [
                name,
                str(host.gpus),
                f"{host.gpu_hours:.2f}",
                f"{host.left_over_gpu_hours:.2f}",
                f"{host.whole_gpu_hours:.2f}",
                clock(host.given_back_s),
            ],
            {0: "left name"},
        )
        for name, host in idle.hosts.items()
    ]
    return Table(row(heads, {0: "left"}), rows)


def _job_table(result: Result, efficiencies: Mapping[int, float], linked: Container[int]) -> Table:
    jobs, now_s = result.jobs, max(result.makespan_s, result.background_end_s or 0.0)
    metrics = sorted({name for job in jobs for name in job.metrics})
    unit, clock = time_format(t for job in jobs for t in _times(job) if t is not None)
    times = [f"{name} {unit}".rstrip() for name in ("submit", "start", "end", "JCT")]
    heads = ["id", "name", "state", f"{result.noun}s", *times, "steps", "suspended", "overhead"]
    lost = any(job.lost_s for job in jobs)
    heads += [*(["lost"] if lost else []), "efficiency"]
    rows = []
    for job in jobs:
        cells = [
            str(job.id),
            job.name,
            str(job.state),
            stretches(job),
            *map(clock, _times(job)),
            steps_done(job),
            str(job.suspensions),
            *(or_dash(text) for text in _unused(job, now_s)[: 1 + lost]),
            or_dash(f"{efficiencies[job.id]:.0%}" if job.id in efficiencies else None),
        ]
        for name in metrics:
            value = job.metrics.get(name)
            cells.append(or_dash(None if value is None else f"{value:#.4g}"))
        line = [*row(cells, {**_LEFT, 2: f"left {KINDS.get(job.state, 'open')}"})]
        if job.id in linked:
            line[1] = line[1]._replace(link=anchor(job.id))
        rows.append(line)
    return Table(row([*heads, *metrics], _LEFT), rows)


_LEFT = {1: "left name", 2: "left", 3: "left"}
"""Columns of text: their classes."""


def _times(job: JobResult) -> tuple[float | None, ...]:
    return job.submit_s, job.start_s, job.end_s, job.jct_s


def _unused(job: JobResult, now_s: float) -> list[str | None]:
    """The shares of the time on GPUs or cores that were no training, and training that was lost; None if
    there was no such time."""
    held_s = sum((now_s if a.end_s is None else a.end_s) - a.start_s for a in job.attempts)
    return [f"{part_s / held_s:.1%}" if held_s > 0 else None for part_s in (job.overhead_s, job.lost_s)]


def _of_cores(history: CoresHistory, number: int) -> Section:
    """A job's configurations: what it came to, the figure, and what led from one to the next."""
    attempts, last = history.attempts, history.attempts[-1]
    facts = [
        ("configuration", said_seats(last.seats)),
        ("cores", f"{cores_of(last.seats):.4g} of {history.budget:.4g}"),
        ("changes", str(len(attempts) - 1)),
    ]
    if rates := [attempt.usage.rate for attempt in attempts if attempt.usage]:
        facts.append(("steps/s", f"{rates[0]:.4g}" + (f" to {rates[-1]:.4g}" if len(rates) > 1 else "")))
    if last.usage:
        facts.append(("efficiency", _efficiency(last)))
    unit, clock = time_format(attempt.start_s for attempt in attempts)
    heads = [f"from {unit}".rstrip(), "servers", "workers", "cores", "steps/s", "efficiency", "why"]
    rows = [
        row(
            [
                clock(attempt.start_s),
                _shares([seat for seat in attempt.seats if seat.server]),
                _shares([seat for seat in attempt.seats if not seat.server]),
                f"{cores_of(attempt.seats):.4g}",
                f"{attempt.usage.rate:.4g}" if attempt.usage else "-",
                _efficiency(attempt),
                or_dash(str(attempt.why) if attempt.why else None),
            ],
            {6: "left why"},
        )
        for attempt in attempts
    ]
    table = Table(row(heads, {6: "left"}), rows)
    return Section(f"Job {history.job_id}: {history.name}", facts, inline(history.svg, number), table)


def _shares(seats: Sequence[Seat]) -> str:
    """The number of processes, times the cores of each: 2 x 0.5; of different ones, 2 x 0.3-0.6."""
    low, high = min(seat.share for seat in seats), max(seat.share for seat in seats)
    return f"{len(seats)} x {low:.4g}" + (f"-{high:.4g}" if high > low else "")


def _efficiency(attempt: Attempt) -> str:
    """The cores used, of those that it had."""
    return f"{sum(attempt.usage.cpu) / cores_of(attempt.seats):.0%}" if attempt.usage else "-"


def _of_batches(history: BatchHistory, number: int) -> Section:
    """A job's batches: where they are and what they follow, and the figure."""
    first, last, options = history.decisions[0], history.decisions[-1], history.options
    batch = f"{first.global_batch} samples"
    if last.global_batch != first.global_batch:
        batch = f"from {first.global_batch} to {last.global_batch} samples"
    facts = [("global batch", batch)]
    low, high = options.global_batch or (0, 0)
    if low < high:
        facts.append(("bounds", f"{low} to {high}"))
    ranks = f"{len(last.workers)} rank" + "s" * (len(last.workers) != 1)
    facts.append(("workers", f"{sum(last.workers)} of {last.local_batch} samples on {ranks}"))
    value = last.similarity if options.metric == "similarity" else last.noise_scale
    if value is not None:
        facts.append((options.metric.replace("-", " "), f"{value:.4g}"))
        facts.append(("target", f"{options.target:g}, every {options.every} updates"))
    facts.append(("learning rate", f"x {last.factor:.3g}"))
    if last.loss is not None:
        facts.append(("loss", f"{last.loss:.4g}"))
    return Section(f"Job {history.job_id}: {history.name}", facts, inline(history.svg, number))
