"""`hpcsched report RUN RUN ...`: several runs on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcsched.cli.common import plural
from hpcsched.cli.run.report_run import began, facts_of, state_of
from hpcsched.cli.run.results import result_of
from hpcsched.cli.run.simulate import MOST_DRAWN
from hpcsched.cli.run.simulation_inputs import MOST_KEPT
from hpcsched.core.machine import Machine
from hpcsched.report.result import Result
from hpcsched.store.rundir import RunDir


def page_of(rundirs: Sequence[RunDir], machines: Sequence[Machine], folder: Path) -> str:
    """The page of these runs; its figures are left in the folder."""
    from hpcsched.report.gantt import gantt_svg, span_of
    from hpcsched.report.runs import RunPart, runs_page

    names, notes, results = _names([rundir.root for rundir in rundirs]), list[str](), list[Result]()
    for name, machine in zip(names, machines, strict=True):
        many = len(machine.run.jobs)
        if many > MOST_DRAWN:
            notes.append(f"{name}: {plural(many, 'job')} are too many to be drawn")
        label = name if machine.run.finished else f"{name}, so far"
        results.append(result_of(machine, label=label, keep_jobs=many <= MOST_KEPT))
    span_s, parts = span_of(results), list[RunPart]()
    for number, rundir in enumerate(rundirs):
        machine, result, gantt = machines[number], results[number], None
        if len(machine.run.jobs) <= MOST_DRAWN:
            path = folder / f"gantt-{number + 1}.svg"
            gantt_svg([result], path, span_s=span_s)
            gantt = path.read_text(encoding="utf-8")
        state, more = state_of(rundir, machine)
        notes += [f"{names[number]}: {note}" for note in more]
        part = RunPart(
            name=names[number],
            path=str(rundir.root),
            state=state,
            began=began(machine),
            result=result,
            gantt=gantt,
            facts=facts_of(rundir, machine),
        )
        parts.append(part)
    return runs_page(parts, notes)


def _names(roots: Sequence[Path]) -> list[str]:
    """The last parts of each of these paths, as few as no other has; of one that is there twice, all."""
    return [_name(root, set(roots) - {root}) for root in roots]


def _name(root: Path, others: set[Path]) -> str:
    for count in range(1, len(root.parts)):
        name = root.parts[-count:]
        if all(other.parts[-count:] != name for other in others):
            return "/".join(name)
    return str(root)
