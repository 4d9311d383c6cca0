"""One round of a pool: look, decide, ask. One `squeue`, a few `sbatch --test-only`, and a few `sbatch`."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcsched.batch.base import BatchJobState
from hpcsched.batch.queue import Queue
from hpcsched.batch.submissions import Submissions, Submitted
from hpcsched.decoding import read_tail
from hpcsched.errors import BatchError, StoreError
from hpcsched.pool.deciding import Decision, Forecast, Situation, decide, may_ask
from hpcsched.pool.foresight import followed, forecast
from hpcsched.pool.observing import ProfilesOf, Seen, look
from hpcsched.pool.poolfile import Pool, Template
from hpcsched.pool.record import Allocation, PoolFiles, Record, State, Trouble, Wanted, new_id
from hpcsched.sim.blocks import Block

MOST_A_ROUND = 4
"""Allocations asked for in a round, questions about waits, and for how long an answer counts (chosen)."""
MOST_QUESTIONS = 3
WAIT_KNOWN_S = 300.0
WAIT_S = 600.0
"""The wait that is reckoned with where nobody knows it (chosen)."""
ENTERS_WITHIN_S = 120.0
"""Time from an allocation's start until its hosts are in the run, or do not come (chosen)."""
LOST_S = 120.0
"""Time after which what is on record and not in the queue was never submitted (chosen)."""
AT_ONCE_S = 60.0
"""An allocation that ends within so many seconds though jobs wait has failed (chosen)."""
NEVER_S = 600.0
"""Longest wait for a reason that does not go away by itself (chosen), and these reasons."""
NEVER = (
    "PartitionDown",
    "PartitionInactive",
    "PartitionTimeLimit",
    "PartitionNodeLimit",
    "InvalidAccount",
    "InvalidQOS",
    "BadConstraints",
    "AccountNotAllowed",
    "QOSNotAllowed",
    "JobHeldAdmin",
    "JobHeldUser",
    "DependencyNeverSatisfied",
)
_TAIL_BYTES = 4096

ScriptOf = Callable[[Template, str], str]


@dataclass(kw_only=True)
class Round:
    """What came of a round: its decisions, in words, whether something changed, and whether all is over."""

    decisions: list[Decision] = field(default_factory=list)
    changed: bool = False
    over: bool = False


class Rounds:
    """The rounds of a pool. `speed`: of stand-ins in a run that has not begun. `tell` is given each thing
    that happens, once."""

    def __init__(
        self,
        pool: Pool,
        submissions: Submissions,
        queue: Queue,
        *,
        script_of: ScriptOf,
        profiles_of: ProfilesOf,
        tell: Callable[[str], None],
        speed: float = 1.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._pool, self._submissions, self._queue = pool, submissions, queue
        self._script_of, self._profiles_of, self._tell = script_of, profiles_of, tell
        self._speed, self._now = speed, now
        self._files = PoolFiles(pool.dir)
        self._asked: dict[str, tuple[float, float | str]] = {}
        """By template: when the batch system was asked, and the time at which it would start, or why not."""
        self._said: set[str] = set()

    def once(self, *, dry: bool = False) -> Round:
        """One round; `dry`: nothing is submitted, cancelled or written. Raises StoreError."""
        record = self._record()
        seen = look(self._pool, self._profiles_of, self._speed)
        outcome = Round()
        try:
            outcome.changed = self._look(record, seen, dry=dry)
        except BatchError as error:
            # What is not known to be there might be asked for twice.
            record.words = [f"the queue is not known: {error}"]
            self._once(str(error))
            outcome.decisions.append(Decision(why=tuple(record.words)))
        else:
            for _ in range(MOST_A_ROUND):
                decision = self._next(record, seen, dry=dry)
                outcome.decisions.append(decision)
                record.words = list(decision.why)
                if decision.template is None or not self._ask(record, decision, dry=dry):
                    break
                outcome.changed = True
        outcome.over = seen.work.over and not record.live()
        if not dry:
            record.round, record.host, record.pid = self._now(), socket.gethostname(), os.getpid()
            record.forget()
            self._files.write(record)
        return outcome

    def leave(self) -> None:
        """Nobody looks after the pool any more."""
        if record := self._files.read():
            record.pid = 0
            self._files.write(record)

    def _record(self) -> Record:
        pool = self._pool
        caps = {key: getattr(pool, key) for key in ("max_allocations", "max_gpus", "gpu_hours")}
        record = self._files.read() or Record(id=new_id(), file=pool.where, **caps)
        record.file = str(Path(pool.where).absolute())
        for key, value in caps.items():
            setattr(record, key, value)
        order = self._files.ordered()
        if order.wanted is Wanted.RUN and order.since > record.resumed:
            record.resumed = order.since
            record.troubles.clear()
        return record

    def _look(self, record: Record, seen: Seen, *, dry: bool) -> bool:
        """Take in what the batch system says of the allocations; whether something is new."""
        live = record.live()
        if not live:
            return False
        shown = {one.name: one for one in self._submissions.found([one.name for one in live])}
        before = [(one.state, one.job_id) for one in live]
        for one in live:
            if row := shown.get(one.name):
                self._take(record, one, row, seen)
            elif one.job_id:
                self._vanished(record, one, seen)
            elif self._now() - one.asked > LOST_S:
                one.state, one.note = State.FAILED, one.note or "was never submitted"
            stuck = one.state is State.WAITING and one.note in NEVER and self._now() - one.asked > NEVER_S
            if stuck and not dry and not one.given_up:
                self._give_up(record, [one])
                self._trouble(record, one.template, f"waited for {one.note}")
        return before != [(one.state, one.job_id) for one in live]

    def _take(self, record: Record, one: Allocation, row: Submitted, seen: Seen) -> None:
        if not one.job_id:
            self._tell(f"{one.name}: found again as job {row.job_id}")
        one.job_id, one.word, one.note = row.job_id, row.word, row.reason
        match row.state:
            case BatchJobState.PENDING | BatchJobState.HELD:
                one.state, one.planned, one.began = State.WAITING, row.start, None
            case BatchJobState.RUNNING | BatchJobState.SUSPENDED:
                if one.state is not State.RUNNING:
                    self._tell(f"{one.name}: job {one.job_id} runs ({one.gpus} GPUs)")
                one.state, one.note = State.RUNNING, ""
                one.began = row.start or one.began or self._now()
                if one.held_s(self._now()) >= AT_ONCE_S:
                    self._well(record, one)
            case BatchJobState.ENDED:
                self._over(record, one, row.start, row.end, seen)

    def _well(self, record: Record, one: Allocation) -> None:
        """One that lasts ends the failures of its template, those since it began excepted."""
        trouble = record.troubles.get(one.template)
        if trouble and one.began is not None and one.began > trouble.last:
            del record.troubles[one.template]

    def _vanished(self, record: Record, one: Allocation, seen: Seen) -> None:
        """The batch system has forgotten it: the accounting may know, else the most that it can be counts."""
        if row := self._submissions.accounted(one.job_id, one.name):
            one.word = row.word
            self._over(record, one, row.start, row.end, seen)
        else:
            one.word = one.word if one.state is State.RUNNING else "GONE"
            self._over(record, one, one.began, None, seen)

    def _over(
        self, record: Record, one: Allocation, began: float | None, ended: float | None, seen: Seen
    ) -> None:
        now = self._now()
        one.ended = ended or (now if one.began is None else min(now, one.began + one.limit_s))
        one.began = began if began is not None and began < one.ended else None
        held_s = one.held_s(now)
        failed = one.began is None or (held_s < AT_ONCE_S and seen.work.waiting > 0)
        if failed and not one.given_up:
            after = "without having started" if one.began is None else f"after {held_s:.0f} s"
            last = self._last_line(one)
            why = f"ended {after}: {one.word}" + (f": {last}" if last else "")
            one.state, one.note = State.FAILED, why
            self._trouble(record, one.template, why)
        else:
            one.state, one.note = State.ENDED, ""
            if not failed:
                self._well(record, one)
            self._tell(f"{one.name}: job {one.job_id} has ended ({one.word}) after {held_s:.0f} s")

    def _last_line(self, one: Allocation) -> str:
        try:
            text = read_tail(self._files.output / f"{one.name}-{one.job_id}.out", _TAIL_BYTES)
        except (OSError, StoreError):
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("hpcsched: ")]  # tables may come after it
        return (ours or lines)[-1].removeprefix("hpcsched: ")[:200] if lines else ""

    def _trouble(self, record: Record, template: str, why: str) -> None:
        before = record.troubles.get(template)
        count = 1 + (before.count if before else 0)
        record.troubles[template] = Trouble(count=count, last=self._now(), why=why)
        if before is None or before.why != why or count == self._pool.failures:
            aside = f": set aside after {count} failures" if count >= self._pool.failures else ""
            self._tell(f"{template}: {why}{aside}")

    def _next(self, record: Record, seen: Seen, *, dry: bool) -> Decision:
        now = self._now()
        situation = Situation(
            now=now,
            work=seen.work,
            held=record.live(),
            coming=self._coming(record.live(), seen),
            used_gpu_s=record.used_gpu_s(now),
            promised_gpu_s=record.promised_gpu_s(now),
            troubles=record.troubles,
            wanted=self._files.wanted(),
        )
        self._ask_about_waits(now, may_ask(self._pool, situation))
        waits, refused = {}, {}
        for name, (_, answer) in self._asked.items():
            if isinstance(answer, str):
                refused[name] = answer
            else:
                waits[name] = max(0.0, answer - now)
        situation = replace(situation, waits=waits, refused=refused)
        found: dict[str, Forecast | None] = {}

        def foresee(template: Template | None) -> Forecast | None:
            key = template.name if template else ""
            if key not in found:
                found[key] = self._foresee(situation, seen, template)
            return found[key]

        decision = decide(self._pool, situation, foresee)
        if decision.give_up and not dry:
            self._give_up(record, decision.give_up)
        return decision

    def _ask_about_waits(self, now: float, templates: Sequence[Template]) -> None:
        """How long templates would wait, of those of which that is not known or no longer so."""
        questions = 0
        for one in templates:
            known = self._asked.get(one.name)
            if questions >= MOST_QUESTIONS or (known and now - known[0] < WAIT_KNOWN_S):
                continue
            questions += 1
            try:
                answer = self._queue.planned(one.shape, options_of(one))
            except BatchError as error:
                self._once(str(error))
                continue
            start = answer.refused if answer.start is None else answer.start
            self._asked[one.name] = now, start

    def _foresee(self, at: Situation, seen: Seen, template: Template | None) -> Forecast | None:
        if seen.rest is None or not seen.rest.jobs:
            return None
        blocks = list(seen.blocks)
        for one in at.coming:
            if (known := self._pool.template(one.template)) is None:
                continue
            if one.state is State.RUNNING:
                left_s = max(1.0, known.limit_s - one.held_s(at.now))
                blocks.append(replace(_block(known, 0.0), lasts_s=left_s))
                continue
            start_s = at.waits.get(one.template, WAIT_S) if one.planned is None else one.planned - at.now
            blocks.append(_block(known, max(0.0, start_s)))
        soonest = min(self._pool.templates, key=lambda one: (at.waits.get(one.name, WAIT_S), -one.gpus))
        later = soonest if blocks or template is None else template
        if template is not None:
            blocks.append(_block(template, at.waits.get(template.name, WAIT_S)))
        if not blocks:
            return Forecast(end_s=math.inf, gpu_s=math.inf)
        after = followed(blocks, _block(later, at.waits.get(later.name, WAIT_S)))
        found = forecast(seen.rest, after, self._pool.idle_s)
        if found is None or math.isfinite(found.end_s):
            return found
        # Some jobs need several allocations at a time: as if those that there are lasted.
        lasting = [replace(block, lasts_s=math.inf) for block in blocks]
        return forecast(seen.rest, lasting, self._pool.idle_s)

    def _coming(self, held: Sequence[Allocation], seen: Seen) -> list[Allocation]:
        """Allocations whose hosts are not in the run yet: those that wait, and the newest that run."""
        now, lacking = self._now(), -seen.joined
        found = [one for one in held if one.state is not State.RUNNING]
        running = [one for one in held if one.state is State.RUNNING]
        if any(one.job_id == seen.leader for one in running):
            lacking -= seen.own
        lacking += sum(self._nodes(one) for one in running)
        for one in sorted(running, key=lambda one: one.began or now, reverse=True):
            if not seen.work.leads or (lacking > 0 and one.held_s(now) < ENTERS_WITHIN_S):
                found.append(one)
                lacking -= self._nodes(one)
        return found

    def _nodes(self, one: Allocation) -> int:
        known = self._pool.template(one.template)
        return known.nodes if known else 0

    def _ask(self, record: Record, decision: Decision, *, dry: bool) -> bool:
        """Ask for what was decided; whether more may be asked for in this round."""
        template = decision.template
        assert template is not None
        record.number += 1
        one = Allocation(
            name=f"pool-{record.id}-{record.number}",
            template=template.name,
            gpus=template.gpus,
            limit_s=template.limit_s,
            asked=self._now(),
            why=decision.why[0] if decision.why else "",
        )
        record.allocations.append(one)
        if dry:
            one.state = State.WAITING
            return True
        if self._files.wanted() is not Wanted.RUN:
            record.allocations.remove(one)
            return False
        self._files.output.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files.write(record)  # first of all: whatever becomes of us, it can be found by its name
        try:
            one.job_id = self._submissions.submit(self._script_of(template, one.name))
        except BatchError as error:
            if "did not answer" not in str(error):  # otherwise it may be there: the next round looks for it
                one.state = State.FAILED
            one.note = str(error)
            self._trouble(record, template.name, str(error))
            self._files.write(record)
            return False
        one.state = State.WAITING
        self._files.write(record)
        self._tell(f"{one.name}: asked for as job {one.job_id} ({template.name}): {one.why}")
        return True

    def _give_up(self, record: Record, those: Sequence[Allocation]) -> None:
        ids = [one.job_id for one in those if one.job_id]
        if not ids:
            return
        for one in those:
            one.given_up = True
        self._files.write(record)
        self._submissions.cancel(ids)
        for one in those:
            self._tell(f"{one.name}: job {one.job_id} is not needed any more: cancelled")

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._tell(line)


def settle(record: Record, submissions: Submissions) -> bool:
    """Take in the ends of what was cancelled; whether nothing is left. Raises BatchError."""
    if not (live := record.live()):
        return True
    shown = {one.name: one for one in submissions.found([one.name for one in live])}
    for one in live:
        row = shown.get(one.name)
        if row and row.state is BatchJobState.ENDED and row.end is not None:
            one.state, one.word, one.note, one.ended = State.ENDED, row.word, "", row.end
            one.began = row.start if row.start is not None and row.start < row.end else None
    return not record.live()


def options_of(template: Template) -> list[str]:
    """What the script of a template asks for besides its shape."""
    import shlex

    more = template.more
    options = [f"--{key}={more[key]}" for key in ("account", "constraint", "mem") if key in more]
    if "gpu_type" in more and more.get("gpu_option") != "none":
        options.append(f"--gres=gpu:{more['gpu_type']}:{template.gpus_per_node}")
    if "cpus" in more or "cpus_per_gpu" in more:
        cpus = more.get("cpus") or template.gpus_per_node * more["cpus_per_gpu"]
        options.append(f"--cpus-per-task={cpus}")
    for line in more.get("directives", ()):
        options += shlex.split(line)
    return options


def _block(template: Template, start_s: float) -> Block:
    return Block(gpus=template.gpus_per_node, nodes=template.nodes, start_s=start_s, lasts_s=template.limit_s)
