"""Advice for people: the table of allocations, what stands beside it, and one recommendation in words."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcsched.allocations.advice import NEAR
from hpcsched.cli.common import plural
from hpcsched.durations import clock, limit
from hpcsched.printing import fitting

if TYPE_CHECKING:
    from hpcsched.allocations.advice import Advice, Missing, Row, Separate
    from hpcsched.allocations.outcomes import Work
    from hpcsched.allocations.waits import Waits
    from hpcsched.batch.queue import Partition
    from hpcsched.core.profile import Profile

_GAP = "  "
_SAID = {
    "given": "--wait",
    "test-only": "Slurm's plan of this moment",
    "between": "between Slurm's plans for smaller and larger ones",
    "squeue --start": "Slurm's plan for a waiting job of yours",
    "history": "earlier allocations of yours",
    "unknown": "not known",
}
_SHORT = {"given": "given", "test-only": "plan", "between": "between", "squeue --start": "waiting job"}
_PLAN = (
    "Slurm's plan of this moment: earlier if others end early, later if more important jobs come; each"
    " further allocation is taken to wait as long"
)


def shown(advice: Advice, about: Sequence[str], *, width: int | None, all_rows: bool) -> str:
    """The whole answer. `about`: what the numbers rest on. `width` None: as wide as it takes."""
    rows = [row for row in advice.rows if all_rows or row.front]
    parts = [_title(advice), _table(advice, rows, width)]
    if not all_rows and len(rows) < len(advice.rows):
        beaten = len(advice.rows) - len(rows)
        parts[-1] += f"\n{beaten} more that one of these beats: --all lists them"
    below = [_wrapped(f"- {note}", width, "  ") for note in (*advice.notes, *about, *_about_waits(advice))]
    parts.append("\n".join(_wrapped(line, width) for line in _recommendation(advice)))
    script = f"  {advice.command} -o job.{'lsf' if advice.system == 'lsf' else 'sbatch'}"
    return "\n\n".join([*parts, script, "\n".join(below)])


def _wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Lines that fit a terminal, without cutting words."""
    if width is None:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _title(advice: Advice) -> str:
    jobs = plural(advice.counted, "job")
    if advice.counted < advice.jobs:
        jobs = f"{advice.counted} of {plural(advice.jobs, 'job')}"
    return f"{advice.file}: {jobs} under {advice.policy}; {plural(len(advice.rows), 'allocation')} tried"


def _table(advice: Advice, rows: Sequence[Row], width: int | None) -> str:
    waiting = advice.waiting
    lines: list[tuple[str, ...]] = [_cells(row, advice) for row in rows]
    lines += [_separate_cells(one, waiting=waiting) for one in advice.separate if not one.too_long]
    heads = ("", "NO", "PARTITION", "NODES", "GPUS", "LIMIT", "TIMES", "WAIT", "SAYS", "RUN", "END", "GPU-H")
    # Rank 0 always stays; of the others the highest goes first where the width is short.
    ranks: tuple[int, ...] = (0, 0, 1, 2, 0, 0, 1, 0, 3, 2, 0, 0)
    left = {0, 2, 8}
    columns, ranks = _without_empty(list(zip(heads, *lines, strict=True)), ranks)
    widths = [max(map(len, column)) for column in columns]
    kept = fitting(widths, ranks, width)
    names = [column[0] for column in columns]
    aligned = [str.ljust if heads.index(name) in left else str.rjust for name in names]
    return "\n".join(
        _GAP.join(aligned[i](columns[i][number], widths[i]) for i in kept).rstrip()
        for number in range(len(lines) + 1)
    )


def _without_empty(
    columns: list[tuple[str, ...]], ranks: Sequence[int]
) -> tuple[list[tuple[str, ...]], tuple[int, ...]]:
    """Without the column of partitions where nobody knows of any."""
    kept = [i for i, column in enumerate(columns) if column[0] != "PARTITION" or any(column[1:])]
    return [columns[i] for i in kept], tuple(ranks[i] for i in kept)


def _cells(row: Row, advice: Advice) -> tuple[str, ...]:
    mark = "*" if row.number == advice.recommended else ""
    end = clock(row.end_s) if row.end_s is not None else f"{clock(row.least_s)}+"
    said = f"{row.wait_of} before" if row.wait_source == "history" else _SHORT.get(row.wait_source, "")
    return (
        mark,
        str(row.number),
        row.partition + (" (preempted)" if row.preempted else ""),
        str(row.nodes),
        str(row.gpus_per_node),
        limit(row.time_s),
        str(row.allocations),
        _wait(row),
        said,
        clock(row.running_s),
        end,
        f"{row.gpu_hours:.2f}",
    )


def _wait(row: Row) -> str:
    if row.wait_s is None:
        return "?"
    low, high = row.wait_low_s, row.wait_high_s
    if low is None or high is None or clock(low) == clock(high):
        return clock(row.wait_s)
    return f"{clock(low)}-{clock(high)}"


def _separate_cells(one: Separate, *, waiting: bool) -> tuple[str, ...]:
    least, most = one.gpus
    known = waiting and one.end_s is not None
    end = f"{clock(one.compared_s(waiting=known))}+"
    if known and one.end_high_s is not None and one.end_s is not None:
        same = clock(one.end_s) == clock(one.end_high_s)
        end = clock(one.end_s) if same else f"{clock(one.end_s)}-{clock(one.end_high_s)}"
    return (
        "",
        "each",
        one.partition,
        "",
        str(least) if least == most else f"{least}-{most}",
        "",
        str(one.jobs),
        "?" if one.wait_s is None else clock(one.wait_s),
        _SHORT.get(one.wait_source, ""),
        "",
        end,
        f"{one.gpu_hours:.2f}",
    )


def _about_waits(advice: Advice) -> list[str]:
    sources = Counter(row.wait_source for row in advice.rows)
    lines = []
    if not advice.waiting:
        lines.append(
            "no wait is known: allocations are compared without waiting (END is the least it takes, +)"
        )
        lines.append("your own estimate counts with --wait MINUTES")
    elif sources["unknown"]:
        lines.append(
            f"{plural(sources['unknown'], 'allocation')} of unknown wait: not compared with the others"
        )
    if sources["test-only"] or sources["between"]:
        lines.append(f"waits are {_PLAN}")
    if sources["history"]:
        lines.append("waits of earlier allocations: the least and the most; the end counts with the median")
    held = max((row.hold_s for row in advice.rows), default=0.0)
    if held:
        lines.append("WAIT of several TIMES has the two minutes for which Slurm holds back what is requeued")
    if not all(one.too_long for one in advice.separate):
        lines.append(
            "each: one sbatch for each training, on the fewest and on the best number of GPUs; END from all"
            " start as soon as the partition has room, to all wait as long as one job as large as all of"
            " them; limits on a user's jobs are not known"
        )
    return lines


def about_missing(missing: Sequence[Missing], file: str) -> list[str]:
    """What is not known of which jobs, and what to do."""
    if not missing:
        return []
    lines = []
    for what, how in (
        ("profile", f"`hpcsched profile run {file} --job NAME` measures it"),
        ("steps", f"say `steps` in {file}"),
    ):
        names = [one.name for one in missing if what in one.missing]
        if names:
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            lines.append(f"no {what} of {listed}: {how}")
    lines.append(f"{plural(len(missing), 'job')} not counted: all times and GPU-hours are at least that")
    return lines


def about_refused(waits: Waits) -> list[str]:
    """What the batch system does not take, once for each of its reasons."""
    by_reason: dict[str, set[str]] = {}
    for shape, why in waits.refused.items():
        by_reason.setdefault(why, set()).add(shape.partition)
    return [f"not taken in {', '.join(sorted(names))}: {why}" for why, names in by_reason.items()]


def about_profiles(work: Work, doubt: float | None, partitions: Sequence[Partition]) -> list[str]:
    """What the running times rest on."""
    models = {job.model for job in work.jobs if job.cpus is None}
    used = [profile for profile in work.profiles if profile.model in models]
    if not used:
        return []
    sources = Counter(profile.source for profile in used)
    listed = ", ".join(f"{count} {source}" for source, count in sorted(sources.items()))
    where = ", ".join(sorted({profile.device for profile in used if profile.device}))
    line = f"{plural(len(used), 'profile')}: {listed}" + (f" (on {where})" if where else "")
    types = sorted({kind for one in partitions for kind in one.types if kind != "gpu"})
    there = f"; the partitions have {', '.join(types)}" if types else ""
    return [line + there + _spread(used, doubt)]


def _spread(used: Sequence[Profile], doubt: float | None) -> str:
    if doubt is not None:
        return f"; measured rates spread by at most {doubt:.1%}, and running times with them"
    unmeasured = [profile.model for profile in used if profile.source not in ("measured", "learned")]
    if unmeasured:
        return "; not measured here: how far running times may be off is not known; `hpcsched profile run`"
    return "; the spread of their rates was not recorded: how far running times may be off is not known"


def _recommendation(advice: Advice) -> list[str]:
    """What to ask for, and whether that is better than a batch job for each training."""
    row = advice.row()
    waiting = advice.waiting
    gpus = f"with {plural(row.gpus_per_node, 'GPU')}" if row.gpus_per_node else "without GPUs"
    nodes = f"{plural(row.nodes, 'node')} {gpus}"
    where = f" in partition {row.partition}" if row.partition else ""
    if row.preempted:
        where += ", where more important jobs may end it,"
    times = "" if row.allocations == 1 else f", {row.allocations} times over (it comes back by itself)"
    end = clock(row.compared_s(waiting=waiting))
    if row.wait_s is None:
        when = f"all is done {end} after it starts; how long it waits is not known"
    else:
        waits = f"{clock(row.wait_s)} of it waiting ({_SAID[row.wait_source]})"
        when = f"all is done {end} after submission, {waits}"
    cost = f" It takes {row.gpu_hours:.2f} GPU-hours." if row.gpus_per_node else ""
    doubt = f" Give or take {advice.doubt:.0%} of the running time." if advice.doubt else ""
    return [
        f"Ask for {nodes} for {limit(row.time_s)}{where}{times}: {when}.{cost}{doubt}",
        *(_against(row, one, waiting=waiting) for one in advice.separate),
    ]


def _against(row: Row, one: Separate, *, waiting: bool) -> str:
    """Whether the user is better off than with a batch job for each training."""
    least, most = one.gpus
    gpus = plural(least, "GPU") if least == most else f"{least} to {most} GPUs"
    known = waiting and one.end_s is not None
    at, mine = one.compared_s(waiting=known), row.compared_s(waiting=known)
    worst = one.end_high_s if known else None
    ends = f"ends {clock(at)} at best ({_change(at, mine)})"
    if worst is not None and clock(worst) != clock(at):
        ends += f", {clock(worst)} at worst"
    if one.too_long:
        return (
            f"One sbatch for each training ({gpus} each) cannot do it as it is:"
            f" {plural(one.too_long, 'training')} would take longer than partition {one.partition} allows."
        )
    cheaper = one.gpu_hours < row.gpu_hours
    if at > mine * (1 + NEAR):
        verdict = "later, for fewer GPU-hours" if cheaper else "not better"
    elif worst is not None and worst <= mine * (1 + NEAR):
        early = "earlier" if worst < mine * (1 - NEAR) else "as early"
        verdict = f"better: {early}, for fewer GPU-hours" if cheaper else f"{early}, for more GPU-hours"
    else:
        verdict = "as early or earlier only if enough GPUs are free for all of them"
    return (
        f"One sbatch for each training ({gpus} each) {ends} and takes {one.gpu_hours:.2f} GPU-hours"
        f" ({_change(one.gpu_hours, row.gpu_hours)}): {verdict}."
    )


def _change(value: float, base: float) -> str:
    return f"{value / base - 1:+.0%}" if base else "-"
