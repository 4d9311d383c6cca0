"""What must be true of a run that is over, by ledgers, its users' memory, files and processes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any

from hpcsched.agent.node.link import HEAD_ANSWERS_WITHIN_S
from hpcsched.contract.exits import SUSPENDED
from hpcsched.core.events import EventVoided, WorkersExited
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.patience import PASSING
from hpcsched.policy import make_policy
from hpcsched.store import journal
from hpcsched.store.replay import replay

from .jobs import RETRIES, SAME
from .ledgers import (
    Line,
    begin_of,
    begun_beside,
    lost,
    lost_by_trainer,
    parts_of,
    savings,
    surely_whole,
    widest,
)
from .programs import NOT_SAVED
from .schedule import TORCH, Job
from .world import Answer, World

GONE_WITHIN_S = 15.0
"""How long the last processes of a run that is over may take to end."""

FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY")

LASTS_S, LASTS_ON_HOSTS_S = 3.5, 40.0
"""How long what goes wrong may go on after its beginning (the longest stop of a process, and what comes of
it); where hosts have to be missed first, longer."""

LEAVES_WITHIN_S, ENDS_WITHIN_S = 1.5, 4.0
"""How long a process may go on that was told to end: one that listens, and one that has to be killed once its
two seconds of grace are over; with some for the machine."""

_ORDERLY = ("suspend", "resume", "submit", "hold", "release", "SIGTERM", "no snapshot")
"""What is done to a run and lets each program leave by itself."""

_TOLD_TO_END = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""Of one that was to leave before it could save, and did not end in time: it may load its libraries."""

_NO_ROOM_FOR_JOBS = f"{os.strerror(errno.ENOSPC)} for jobs"
_ENDS_IT = re.compile("healed|kill agent|.* for ")
_SEEN_WITHIN_S = 1.5
"""How long the agent may take to look why a program has failed."""

HARMLESS = ("no snapshot", "noise in the inbox", "clock ")
"""What goes wrong and neither ends nor stops any process."""


def violations(world: World, weights: dict[str, float]) -> list[str]:
    """What is wrong, each in a line; empty if nothing is. `weights`: by `weights.key`."""
    found = list(world.wrong)
    if any(line.startswith("not over") for line in found):
        return found
    found += _left(world)
    machine = replay(world.bench.rundir.journal, make_policy).machine
    found += _voided(world)
    page = _status(world, found)
    found += _records(machine, page)
    found += _states(world, machine)
    found += _weights(world, page, weights)
    found += _hiccups(world, machine)
    found += _full_disks(world, machine)
    for name in world.ledgers():
        found += _training(world, machine, name)
    found += _counts(world, machine)
    found += _commands(world, machine)
    found += _explained(world, page)
    found += _walltimes(world)
    return list(dict.fromkeys(found))


def _status(world: World, found: list[str]) -> dict[str, Any]:
    answer = world.command("status", "--json")
    if answer.code:
        found.append(f"`status --json` ends with {answer.code}: {answer.said[-200:]}")
    page: dict[str, Any] = json.loads(answer.said[answer.said.index("{") :])
    return page


def _voided(world: World) -> Iterator[str]:
    """All that happened could be handled, and planned for: that a run goes on without it hides a fault."""
    for event, _ in journal.read(world.bench.rundir.journal):
        if isinstance(event, EventVoided):
            yield f"an event counts for nothing: {event.kind} (record {event.record}): {event.error}"
    for life in (*world.lives, *world.guests):
        for line in life.said.splitlines():
            if "no plan could be made" in line:
                yield f"an agent says: {line.strip()}"


def _records(machine: Machine, page: dict[str, Any]) -> Iterator[str]:
    """The journal leads to what the snapshot shows."""
    shown = {job["id"]: job for job in page["jobs"]}
    if page["run"]["state"] != "FINISHED" or not machine.run.finished:
        over = "over" if machine.run.finished else "not over"
        yield f"the run is {page['run']['state']}, and by its journal {over}"
    if set(shown) != set(machine.run.jobs):
        yield f"the snapshot has the jobs {sorted(shown)}, the journal {sorted(machine.run.jobs)}"
    for job in machine.run.jobs.values():
        row = shown.get(job.id, {})
        for key, value in (("state", str(job.state)), ("attempt", job.attempt), ("name", job.spec.name)):
            if row and row.get(key) != value:
                yield f"{job.spec.name}: {key} is {value} by the journal, {row.get(key)} in the snapshot"
    for gpu in page["gpus"]:
        if gpu["job"] is not None:
            yield f"slot {gpu['index']} is still job {gpu['job']}'s"


def _states(world: World, machine: Machine) -> Iterator[str]:
    drawn = {job.name: job for job in (*world.schedule.jobs, *world.schedule.later)}
    for job in machine.run.jobs.values():
        name, state = job.spec.name, str(job.state)
        one = drawn.get(name) or next((j for j in drawn.values() if name.startswith(f"{j.name}-")), None)
        lines = world.ledger(name)
        if state not in FINAL:
            yield f"{name} is {state} at the end"
        if state == "COMPLETED" and one and one.kind not in TORCH:
            if not any(line.what == "done" for line in lines):
                yield f"{name} is COMPLETED, and has not come to its end"
            elif one.kind == "contract" and job.step != one.steps:
                yield f"{name} is COMPLETED after step {job.step} of {one.steps}"
        if state != "COMPLETED" and (why := _wrongly(world, machine, name, state, one)):
            reason = job.story[-1].reason.said(machine.ledger.noun) if job.story else ""
            yield f"{name} is {state} ({reason}): {why}"


def _wrongly(world: World, machine: Machine, name: str, state: str, job: Job | None) -> str:
    """Why a job should not have ended so; empty if it may have."""
    if state == "CANCELLED":
        array = machine.run.jobs[machine.run.by_name[name]].spec.array
        names = {name, array.name if array else name}
        if any(a.words[:1] == ("cancel",) and names & {*a.words[1:2]} for a in world.answers):
            return ""
        for other in job.keys.get("after", ()) if job else ():
            if str(machine.run.jobs[machine.run.by_name[other]].state) != "COMPLETED":
                return ""
        return "nobody has cancelled it"
    if job and job.options.get("takes_mib"):
        return "" if state in ("OUT_OF_MEMORY", "FAILED") else "it takes too much memory"
    if state == "OUT_OF_MEMORY":
        return "it takes little memory"
    failures = [line for line in world.ledger(name) if line.what == "fail"]
    own = sum(not _for_want_of_room(world, line) for line in failures)
    retries = int(job.keys.get("retries", RETRIES)) if job else RETRIES
    spoilt = sum(what == "healed" for _, what in world.disturbed) + world.killed[name]
    if state == "FAILED" and own + spoilt > retries:
        return ""
    return f"its program has failed {own} times and was disturbed {spoilt} times, {retries} are forgiven"


def _for_want_of_room(world: World, line: Line) -> bool:
    return line.step in (28, 122)  # ENOSPC, EDQUOT: its step is the number of the error


def _weights(world: World, page: dict[str, Any], weights: dict[str, float]) -> Iterator[str]:
    from .weights import key

    for job in world.schedule.jobs:
        if job.kind not in SAME:
            continue
        row = next((j for j in page["jobs"] if j["name"] == job.name), None)
        if row and row["state"] == "COMPLETED":
            got, wanted = row["metrics"].get("weights"), weights[key(job)]
            if got != wanted:
                yield f"{job.name} ({job.kind}) ends with the weights {got}, undisturbed with {wanted}"


def _hiccups(world: World, machine: Machine) -> Iterator[str]:
    """No training ends as its file system answers nothing for a moment. (Their ledgers lie elsewhere.)"""
    passing = tuple(os.strerror(number) for number in PASSING)
    if not all(what.startswith(passing) or what in _ORDERLY for what in +world.struck):
        return
    trainings = {machine.run.by_name.get(job.name) for job in world.schedule.jobs if job.kind in TORCH}
    for event, _ in journal.read(world.bench.rundir.journal):
        if not isinstance(event, WorkersExited) or event.job_id not in trainings:
            continue
        if event.code not in (0, SUSPENDED, *_TOLD_TO_END):
            name = machine.run.jobs[event.job_id].spec.name
            yield f"{name}: attempt {event.attempt} ended with {event.code}, but for the disk all was well"


def _full_disks(world: World, machine: Machine) -> Iterator[str]:
    """Who fails as its disk is full, as that one says itself, has not failed by its own fault."""
    if world.schedule.flavour != "disks":  # in others the agent may be stopped until the disk is well again
        return
    exits = {
        (event.job_id, event.attempt): event
        for event, _ in journal.read(world.bench.rundir.journal)
        if isinstance(event, WorkersExited)
    }
    full = [since for since, what in world.disturbed if what == _NO_ROOM_FOR_JOBS]
    for since, name in product(full, world.ledgers()):
        ends = (at for at, what in world.disturbed if at > since and _ENDS_IT.match(what))
        until = next(ends, since)
        for line in world.ledger(name):
            exited = exits.get((machine.run.by_name.get(name, 0), line.attempt))
            if line.what != "fail" or exited is None or not since < line.at < until - _SEEN_WITHIN_S:
                continue
            if (line.step == errno.ENOSPC or exited.code == NOT_SAVED) and not exited.no_room:
                yield f"{name}: that its disk was full as attempt {line.attempt} failed is not seen"


def _training(world: World, machine: Machine, name: str) -> Iterator[str]:
    """Each step once, or again from what was saved; never two attempts at once."""
    lines = world.ledger(name)
    parts = parts_of(lines)
    words = [part[0].word for part in parts]
    for word in {w for w in words if words.count(w) > 1}:
        others = sorted({line.word for part in parts for line in part} - {word})
        yield f"{name}: two processes worked at once ({word} and some of {', '.join(others)})"
    trainer = any(job.name == name and job.kind in TORCH for job in world.schedule.jobs)
    own_saves = any(job.name == name and job.kind in ("saves", "goes") for job in world.schedule.jobs)
    if trainer:
        yield from _goes_on_from_files(world, machine, name, parts)
        return
    for part in parts:
        steps = [line.step for line in part if line.what in ("begin", "step")]
        if any(after != before + 1 for before, after in pairwise(steps)):
            yield f"{name}: the steps of attempt {part[0].attempt} are not one after the other: {steps}"
    for number, after in enumerate(parts[1:], 1):
        begin = begin_of(after)
        if begin is None:
            continue
        known = savings(parts[:number])
        last = parts[number - 1]
        if own_saves and not (surely_whole(last) and _quiet(world, last[-1].at, after[0].at)):
            # Its newest checkpoint may be half written: the one before it is as good.
            before = {line.step for part in parts[:number] for line in part if line.what == "saved"}
            since, until = parts[number - 1][0].at, after[0].at
            happened = [what for at, what in world.disturbed if since <= at <= until]
            unread = sum(" for " in what and "slow" not in what for what in happened)
            known |= {*sorted({0} | before)[-2 - unread :]}
        if begin not in known:
            yield (
                f"{name}: attempt {after[0].attempt} began at step {begin}, saved were {sorted(known)}, "
                f"the last line before is {last[-1].what} {last[-1].step}"
            )


def _quiet(world: World, since: float, until: float) -> bool:
    """Whether nothing had gone wrong, and no agent has begun or ended, between two moments."""
    lasts_s = LASTS_ON_HOSTS_S if world.schedule.hosts else LASTS_S
    moments = [at for at, what in world.disturbed if not what.startswith(HARMLESS)]
    for life in world.lives:
        moments += [life.began, inf if life.over is None else life.over]
    return not any(since - lasts_s <= at <= until for at in moments)


def _goes_on_from_files(world: World, machine: Machine, name: str, parts: list[list[Line]]) -> Iterator[str]:
    """A trainer goes on at, or after, what its STATE.json was seen to say before.

    Where nothing has gone wrong, just where it was: what users and policies suspend loses no step.
    """
    seen = world.saved.get(str(machine.run.by_name.get(name)), [])
    wide = widest(parts)
    for before, after in pairwise(parts):
        begin, done = after[0].step, before[-1].step + wide
        durable = max((step for at, step in seen if at < after[0].at - 0.05), default=0)
        if begin < durable:
            yield f"{name}: went on at step {begin}, {durable} was saved"
        if begin > done:
            yield f"{name}: went on at step {begin} after {done}"
        if begin <= before[-1].step and _quiet(world, before[-1].at, after[0].at):
            yield f"{name}: went on at step {begin}, {before[-1].step} were done, and nothing had gone wrong"
    if parts and parts[0][0].step:
        yield f"{name} began at step {parts[0][0].step}"


def _counts(world: World, machine: Machine) -> Iterator[str]:
    """Steps repeated are counted: never more than there were, and all where no agent has died."""
    agents = any(life.process.returncode != 75 for life in world.lives[:-1]) or world.struck["stop agent"]
    for job in machine.run.jobs.values():
        name = job.spec.name
        drawn = (*world.schedule.jobs, *world.schedule.later)
        one = next((j for j in drawn if j.name == name), None)
        if one is None or one.kind not in ("contract", "shell", *TORCH):
            continue
        lines, completed = world.ledger(name), str(job.state) == "COMPLETED"
        trainer = one.kind in TORCH
        least, most = lost_by_trainer(lines, completed=completed) if trainer else lost(lines)
        if job.repeated > most:
            yield f"{name}: {job.repeated} steps are told to be repeated, {most} were lost"
        if not agents and not world.schedule.hosts and job.repeated < least:
            told = f"{name}: {job.repeated} steps are told to be repeated"
            yield f"{told}, {least} were lost, and no agent has died"


def _commands(world: World, machine: Machine) -> Iterator[str]:
    """What was acknowledged has happened."""
    for answer in world.answers:
        verb, *rest = answer.words
        if answer.code or not rest:
            continue
        if verb == "submit" and Path(rest[0]).stem not in machine.run.by_name:
            yield f"the submit of {Path(rest[0]).stem} was acknowledged, and it is not there"
        if verb == "cancel":
            for job in machine.run.jobs.values():
                name = job.spec.name
                if rest[0] in (name, job.spec.array and job.spec.array.name):
                    yield from _cancelled(world, job.spec, str(job.state), answer)
    for verb, undone in (("hold", "release"), ("suspend", "resume")):
        yield from _stands_still(world, verb, undone)
    for job in world.schedule.jobs:
        if job.kind != "array" and job.name not in machine.run.by_name:
            yield f"{job.name} is lost"


def _cancelled(world: World, spec: JobSpec, state: str, answer: Answer) -> Iterator[str]:
    lines = world.ledger(spec.name)
    drawn = (*world.schedule.jobs, *world.schedule.later)
    one = next((job for job in drawn if job.name == spec.name), None)
    trainer = one is not None and one.kind in TORCH
    last = (spec.steps or 0) - widest(parts_of(lines)) if trainer else None
    listens = one is not None and not trainer and not one.options.get("deaf")
    within_s = LEAVES_WITHIN_S if listens else ENDS_WITHIN_S
    if not _quiet(world, answer.began, answer.ended + within_s):
        within_s = inf
    for what in after_cancel(state, lines, answer, within_s=within_s, last=last):
        yield f"{spec.name}: {what} was acknowledged"


def after_cancel(
    state: str, lines: list[Line], answer: Answer, *, within_s: float, last: int | None = None
) -> Iterator[str]:
    """What a job does that it should not once its `cancel` was acknowledged.

    It is cancelled, unless it is over within so many seconds, and none of its processes begins. `last`: the
    step in the last line of a trainer, which has no line for its end.
    """
    ends = [line for line in lines if line.what == "done" or (last is not None and line.step >= last)]
    done = [line.at - answer.ended for line in ends]
    waits = "the next `" in answer.said  # no agent works, and its processes may
    if state not in ("CANCELLED", "FAILED", "OUT_OF_MEMORY") and not done:
        yield f"it is {state}, and its cancel"
    if state == "COMPLETED" and not waits and any(after > within_s for after in done):
        yield f"it has come to its end {max(done):.1f} s after its cancel"
    works = any(answer.began - 2 < line.at <= answer.ended for line in lines)
    for seconds in begun_beside(lines, answer.ended, inf, excused=not works):
        yield f"it began {seconds:.1f} s after its cancel"


def _stands_still(world: World, verb: str, undone: str) -> Iterator[str]:
    """No process of a job begins between a `hold` or `suspend` that was done and what takes it back."""
    for asked in world.answers:
        if asked.code or asked.words[0] != verb:
            continue
        name = asked.words[1]
        later = [a for a in world.answers if a.words[:2] == (undone, name) and a.began > asked.ended]
        until = min((a.began for a in later), default=asked.ended)
        lines = world.ledger(name)
        works = any(asked.began - 2 < line.at <= asked.ended for line in lines)
        loads = "as soon as it says" in asked.said and not works  # a process of it was there
        for seconds in begun_beside(lines, asked.ended, until, excused=loads):
            yield f"{name}: began {seconds:.2f} s after `{verb}` was done"


def _explained(world: World, page: dict[str, Any]) -> Iterator[str]:
    """`explain` says what `status` says."""
    jobs = page["jobs"]
    if not jobs:
        return
    row = jobs[world.schedule.seed % len(jobs)]
    answer = world.command("explain", row["name"])
    if answer.code not in (0, 3):
        yield f"`explain {row['name']}` ends with {answer.code}"
    if f"is {row['state']}" not in answer.said:
        yield f"{row['name']} is {row['state']}, and `explain` says: {answer.said.splitlines()[:1]}"


def _walltimes(world: World) -> Iterator[str]:
    """When an allocation ends all has been saved and has left, unless something went wrong near its end."""
    for number, life in enumerate(world.lives, 1):
        if life.late and not disturbed_near(world, life.over or 0.0):  # with work left
            yield f"life {number} had not saved all when its allocation ended"


def disturbed_near(world: World, end: float, within_s: float = 8.0) -> bool:
    """Whether something went wrong so shortly before."""
    return any(end - within_s < at <= end for at, _ in world.disturbed)


def _left(world: World) -> Iterator[str]:
    began = time.monotonic()
    while left := [one for one in world.processes() if not _of_a_batch_system(one.words)]:
        waiting = all(one.role == "node agent" for one in left)  # for a head that died before it was heard of
        if time.monotonic() - began > GONE_WITHIN_S + HEAD_ANSWERS_WITHIN_S * waiting:
            for one in left:
                yield f"a process is left: {one.role} {one.pid} {' '.join(one.words)[:200]}"
            break
        time.sleep(0.05)
    root = world.bench.dir
    for pattern in ("*.tmp", ".*.tmp", "held.*", "join*.json", "inbox/tmp/*"):
        for path in root.rglob(pattern) if "/" not in pattern else root.glob(pattern):
            yield f"a file is left: {path.relative_to(root)}"


def _of_a_batch_system(words: tuple[str, ...]) -> bool:
    """A stand-in of a batch system's command, which hangs: its caller was killed."""
    return "300" in words or any(word.endswith(("/squeue", "/scontrol")) for word in words)
