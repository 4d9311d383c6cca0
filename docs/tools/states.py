"""The states of jobs and of their attempts: tables and pictures.

Which job state may follow which is read from the core's own table. How an attempt goes on is said here, in
the words of the core (fields of a job, kinds of events, ends), each of which is looked up there.
"""

from __future__ import annotations

from dataclasses import fields

from svg import PALE, Picture

from hpcsched.core import events
from hpcsched.core.jobs import Job
from hpcsched.core.model import Ended, JobState
from hpcsched.core.transitions.outcome import NEXT_STATES

WAITING, ACTIVE, FINAL = "waiting", "has processes and a lease", "ended"
_WORDS = {
    JobState.PENDING: "waits; the reason says for what",
    JobState.HELD: "(reason `JobHeldUser`) kept from starting by `hold`, until `release`",
    JobState.STARTING: "its processes are being started",
    JobState.RUNNING: "also while its GPU count changes in place: it trains on, and holds the old GPUs and "
    "the new ones until that is done",
    JobState.SUSPENDING: "asked to save and leave",
    JobState.SUSPENDED: "saved; waits for GPUs, or for `resume` if you suspended it (reason `UserSuspended`)",
    JobState.COMPLETED: "exit code 0",
    JobState.FAILED: "failed more often in a row than `retries` allows, or in the same way at once again and "
    "again",
    JobState.CANCELLED: "by you, or because a job in its `after` did not complete (reason "
    "`DependencyNeverSatisfied`)",
    JobState.TIMEOUT: "it has run for its `time`, and was asked to save and leave",
    JobState.OUT_OF_MEMORY: "it took more main memory than its `memory`, or the kernel's OOM killer ended it",
}

WAITS, STARTS, RUNS, RESIZES, LEAVES = "no attempt", "starting", "running", "resizing", "leaving"
PHASES = {
    STARTS: (("ready",), "its processes start; they have not said that they can be suspended"),
    RUNS: (
        ("ready", "target", "becoming", "wanted"),
        "`ready`, and nothing is asked of it: a policy may change it",
    ),
    RESIZES: (
        ("becoming", "target"),
        "told to go over to the lease `becoming`, and holds both leases until it has; `target` is that lease "
        "as long as it is wanted",
    ),
    LEAVES: (
        ("wanted", "target"),
        "asked to save and leave, or told to end; `wanted` says why (`cancel`, `suspend`, a lost device), "
        "`target` the lease that it starts on again",
    ),
}
"""What an attempt does, to the job's fields that say so, and to what it means."""

POLICY = "(policy)"
ANY = "SuspendRequested CancelRequested DrainRequested DeviceLost CoresLost EventVoided TimerFired"
STEPS: tuple[tuple[str, str, str], ...] = (
    (STARTS, RUNS, "WorkersReady RestartSeen"),
    (STARTS, LEAVES, f"{ANY} {POLICY}"),
    (RUNS, RESIZES, POLICY),
    (RUNS, LEAVES, f"{ANY} {POLICY}"),
    (RESIZES, RUNS, "WorkersResized ResizeFailed"),
    (RESIZES, LEAVES, f"{ANY} ResizeFailed"),
)
"""From what to what, and by which events; `POLICY`: by a decision of the policy, after any event."""

ENDS: dict[Ended, tuple[tuple[str, ...], str, str]] = {
    Ended.COMPLETED: ((STARTS, RUNS, RESIZES, LEAVES), "exit code 0", "COMPLETED"),
    Ended.SUSPENDED: (
        (STARTS, RUNS, RESIZES, LEAVES),
        "exit code 75, and it has saved; any, of a program that saves by itself and was asked to",
        "SUSPENDED; starts again at once on `target`; TIMEOUT if its time was up",
    ),
    Ended.RESIZED: (
        (RESIZES,),
        "it has gone over in place",
        "RUNNING, in the next attempt, from that step on",
    ),
    Ended.FAILED: (
        (STARTS, RUNS, RESIZES, LEAVES),
        "any other exit; one that is asked to leave: it could not be started",
        "waits again, or FAILED, OUT_OF_MEMORY",
    ),
    Ended.CANCELLED: ((LEAVES,), "it was to end for good", "CANCELLED; TIMEOUT if its time was up"),
    Ended.LOST: (
        (STARTS, RUNS, RESIZES, LEAVES),
        "through no fault of the job's: the agent was gone, a GPU was lost, it did not leave in time, "
        "a disk was full",
        "waits again; FAILED after too many in a row without a new checkpoint",
    ),
}
"""How an attempt ends: from where, when, and what the job does then."""


def _looked_up() -> None:
    """SystemExit where what is said here is not what the core has."""
    known = {field.name for field in fields(Job)}
    missing = [name for names, _ in PHASES.values() for name in names if name not in known]
    missing += [
        name for *_, kinds in STEPS for name in kinds.split() if name != POLICY and not hasattr(events, name)
    ]
    missing += [ended for ended in Ended if ended not in ENDS]
    missing += [state for state in JobState if state not in _WORDS]
    if missing:
        raise SystemExit(f"states.py: not known, or not said: {missing}")


def phase(job: Job) -> str:
    """What a job's attempt does, by the job's fields."""
    if not job.state.active:
        return WAITS
    if job.state is JobState.SUSPENDING or job.wanted:
        return LEAVES
    return RESIZES if job.becoming else RUNS if job.ready else STARTS


def may_become(before: str, kind: str) -> set[str]:
    """What an attempt may do after an event of this kind; the policy may decide after any."""
    found = {before}
    for by in (kind, POLICY):
        found |= {to for start, to, kinds in STEPS if start in found and by in kinds.split()}
    return found


def table_of_jobs() -> str:
    rows = [f"| {s} | {s.code} | {_WORDS[s]} | {_after(s)} |" for s in JobState]
    return "\n".join(["| state | in tables | | then |", "|---|---|---|---|", *rows])


def _after(state: JobState) -> str:
    return ", ".join(other for other in JobState if other in NEXT_STATES[state])


def table_of_attempts() -> str:
    _looked_up()
    phases = [f"| {name} | {words} |" for name, (_, words) in PHASES.items()]
    ends = [f"| *{ended}* | {when} | {then} |" for ended, (_, when, then) in ENDS.items()]
    ways = ["", "| it ended | when | the job then |", "|---|---|---|", *ends]
    return "\n".join(["| an attempt is | |", "|---|---|", *phases, *ways])


# --- pictures -------------------------------------------------------------------------------


def _group(state: JobState) -> str:
    return FINAL if state.final else ACTIVE if state.active else WAITING


_WIDE, _HIGH, _ROW, _PAD, _TOP = 118, 30, 76, 24, 70
_LEFT = {WAITING: 20, ACTIVE: 300, FINAL: 580}
_COLUMNS = {name: [s for s in JobState if _group(s) == name] for name in _LEFT}
_DEEP = _TOP + 2 * _PAD + (max(map(len, _COLUMNS.values())) - 1) * _ROW + _HIGH + 50


def picture_of_jobs() -> str:
    """Three columns of states; an arrow from a column's border is one from each state in it."""
    picture = Picture("The states of a job", 770, _DEEP + 40)
    for name, states in _COLUMNS.items():
        right, below = _border(name)
        picture.box(_LEFT[name], _TOP, right - _LEFT[name], below - _TOP, PALE, "4 3")
        picture.text(_LEFT[name] + 2, _TOP - 8, name, bold=True, anchor="start")
        for state in states:
            x, y = _place(state)
            picture.box(x, y, _WIDE, _HIGH)
            picture.text(x + _WIDE / 2, y + 20, state)
    for name, states in _COLUMNS.items():
        common = frozenset.intersection(*(NEXT_STATES[state] for state in states))
        whole = [other for other, group in _COLUMNS.items() if common.issuperset(group)]
        for other in whole:
            y = _place(_COLUMNS[other][1])[1] + _HIGH / 2
            picture.line((_border(name)[0], y), (_LEFT[other], y))
        for to in JobState:
            if to in common and _group(to) not in whole:
                _from_border(picture, name, to)
        for state in states:
            for to in (to for to in JobState if to in NEXT_STATES[state] - common):
                _between(picture, state, to)
    picture.text(
        20,
        _DEEP + 28,
        "An arrow from or to a dashed border: from or to each state in it.",
        size=11,
        anchor="start",
    )
    return str(picture)


def _row(state: JobState) -> int:
    return _COLUMNS[_group(state)].index(state)


def _place(state: JobState) -> tuple[float, float]:
    return _LEFT[_group(state)] + _PAD, _TOP + _PAD + _row(state) * _ROW


def _border(name: str) -> tuple[float, float]:
    """Right and lower end of a column."""
    return _LEFT[name] + _WIDE + 2 * _PAD, _TOP + 2 * _PAD + (len(_COLUMNS[name]) - 1) * _ROW + _HIGH


def _from_border(picture: Picture, name: str, to: JobState) -> None:
    x, y = _place(to)
    columns = list(_LEFT)
    steps = columns.index(_group(to)) - columns.index(name)
    right, below = _border(name)
    if steps == -1:
        picture.line((_LEFT[name], y + 22), (x + _WIDE, y + 22))
    elif _row(to) == 0:  # past the column between them: above it, or below
        start = _LEFT[name] + 70
        picture.line((start, _TOP), (start, 30), (x + 90, 30), (x + 90, y))
    else:
        start, low, end = (right - 30, _DEEP, x + 30) if steps < 0 else (right - 40, _DEEP - 20, x + 60)
        picture.line((start, below), (start, low), (end, low), (end, y + _HIGH))


def _between(picture: Picture, state: JobState, to: JobState) -> None:
    (x, y), (to_x, to_y) = _place(state), _place(to)
    down = _row(to) - _row(state)
    if _group(state) != _group(to):
        start, end = (x + _WIDE, to_x) if to_x > x else (x, to_x + _WIDE)
        picture.line((start, y + 10), (end, to_y + 10 + 4 * (down < 0)))
    elif abs(down) == 1:
        middle = x + _WIDE / 2 + (12 if down < 0 else -12)
        picture.line((middle, y + _HIGH * (down > 0)), (middle, to_y + _HIGH * (down < 0)))
    else:
        side = x + _WIDE + 12
        picture.line((x + _WIDE, y + 15), (side, y + 15), (side, to_y + 15), (x + _WIDE, to_y + 15))


_PHASE = (190, 62)
_PHASES_AT = {STARTS: (20, 20), RUNS: (350, 20), RESIZES: (720, 20), LEAVES: (350, 250)}


def picture_of_attempts() -> str:
    """What an attempt does, which events change that, and how it can end meanwhile."""
    _looked_up()
    picture = Picture("An attempt of a job", 950, 350)
    wide, high = _PHASE
    for name, (x, y) in _PHASES_AT.items():
        ends = [str(ended) for ended, (phases, *_) in ENDS.items() if name in phases]
        picture.box(x, y, wide, high)
        picture.text(x + wide / 2, y + 18, name, bold=True)
        for row, words in enumerate(["may end: " + ", ".join(ends[:2]), ", ".join(ends[2:])]):
            picture.text(x + wide / 2, y + 37 + 15 * row, words, size=11)
    for start, end, kinds in STEPS:
        (x, y), (to_x, to_y) = _PHASES_AT[start], _PHASES_AT[end]
        words = kinds.split()
        if y == to_y:
            line = y + (20 if to_x > x else 44)
            ends = (x + wide, to_x) if to_x > x else (x, to_x + wide)
            picture.line((ends[0], line), (ends[1], line))
            middle = sum(ends) / 2
            picture.text(middle, line + (-6 if to_x > x else 15), " ".join(words), size=11)
        else:
            bottom, side = x + wide / 2, x + wide / 2 + 8
            if x == to_x:
                picture.line((bottom, y + high), (bottom, to_y))
            else:
                picture.line((bottom, y + high), (bottom, to_y + 30), (to_x + (x > to_x) * wide, to_y + 30))
            for row, word in enumerate(words):
                picture.text(side, y + high + 22 + 16 * row, word, size=11, anchor="start")
    words = "On the arrows: events of hpcsched/core/events.py; (policy): its decision, after any event."
    picture.text(20, 338, words, size=11, anchor="start")
    return str(picture)
