"""What `pool status` and `pool start --dry-run` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcsched.durations import clock
from hpcsched.pool.deciding import Decision
from hpcsched.pool.record import Allocation, Record, State, Wanted

_SHOWN = 10
"""Allocations that are over and are shown (chosen)."""


def status_text(record: Record, wanted: Wanted, now: float, *, works: bool, leader: str) -> str:
    """The pool: its caps and what is used of them, its allocations, and why nothing is asked for.

    `leader`: the batch job of the run's agent ("": none).
    """
    live = record.live()
    gpus = sum(one.gpus for one in live)
    used, promised = record.used_gpu_s(now) / 3600, record.promised_gpu_s(now) / 3600
    said = {Wanted.RUN: "", Wanted.PAUSE: ", paused", Wanted.STOP: ", stopped"}[wanted]
    looks = "a process looks after it" if works else "no process looks after it"
    if record.round is not None:
        looks += f", last round {clock(max(0.0, now - record.round))} ago"
    lines = [
        f"pool {record.id} ({record.file}){said}: {looks}",
        f"{len(live)} of {record.max_allocations} allocations, {gpus} of {record.max_gpus} GPUs, "
        f"{used:.3g} of {record.gpu_hours:g} GPU-hours used, up to {promised:.3g} more spoken for",
    ]
    over = [one for one in record.allocations if one.state.over][-_SHOWN:]
    rows: list[tuple[str, ...]] = [("JOB", "TEMPLATE", "STATE", "GPUS", "TIME", "ENDS IN", "NOTE")]
    rows += [_row(one, now, leader) for one in (*over, *live)]
    if len(rows) > 1:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines.append("")
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
    if record.words:
        lines += ["", *record.words]
    for name, trouble in record.troubles.items():
        times = "once" if trouble.count == 1 else f"{trouble.count} times in a row"
        lines.append(f"{name} has failed {times}: {trouble.why}")
    return "\n".join(lines)


def _row(one: Allocation, now: float, leader: str) -> tuple[str, ...]:
    ends, note = "", one.note
    since = clock(one.held_s(now)) if one.began is not None else ""
    if one.state is State.RUNNING and one.began is not None:
        ends = clock(max(0.0, one.began + one.limit_s - now))
        note = "leads the run" if one.job_id == leader else note
    if one.state is State.WAITING:
        since = clock(max(0.0, now - one.asked))
        if one.planned is not None:
            note = f"{note}, starts in {clock(max(0.0, one.planned - now))}".removeprefix(", ")
    if one.given_up:
        note = "cancelled by the pool"
    row = (one.job_id or "-", one.template, one.state, str(one.gpus), since, ends, note[:100])
    return tuple(map(str, row))


def status_json(record: Record, wanted: Wanted, now: float, *, works: bool, leader: str) -> dict[str, Any]:
    """The same for programs: the record, and what follows from it."""
    import msgspec

    page = msgspec.to_builtins(record)
    assert isinstance(page, dict)
    page["wanted"], page["works"], page["leader"] = str(wanted), works, leader or None
    page["gpu_hours_used"] = round(record.used_gpu_s(now) / 3600, 4)
    page["gpu_hours_promised"] = round(record.promised_gpu_s(now) / 3600, 4)
    return page


def dry_text(decisions: Sequence[Decision]) -> str:
    """What a round would ask for, and why."""
    lines = []
    for one in decisions:
        if one.template is not None:
            template = one.template
            where = f" in {template.partition}" if template.partition else ""
            what = f"{template.nodes} x {template.gpus_per_node} GPUs{where} for {clock(template.limit_s)}"
            lines.append(f"would ask for {template.name} ({what})")
            lines += [f"  {why}" for why in one.why]
        else:
            lines.append("would ask for nothing" + (" more" if lines else ""))
            lines += [f"  {why}" for why in one.why]
            lines += [f"  would cancel job {gone.job_id}" for gone in one.give_up]
    return "\n".join(lines)
