"""Recorded journals: what a machine was told, and digests of what it answered and of what it was like then.

They are replayed to see that a change of the core changes neither. A group of journals is a compressed file:
for each a head in JSON, then its events, one a line: type, body as the store writes it (without what is as
usual), and the digest of the actions that it led to ("-": none; of a decision that cannot be: of what the
machine said). `record_journals` makes these files.

`picture` is the only place that knows how a machine is made inside.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

from impossible import any_policy

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, MakePlan
from hpcsched.core.jobs import Job, Target
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.elastic.mechanism import Elastic
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.errors import InvalidTransition
from hpcsched.policy.background import why_waiting as why_beside
from hpcsched.policy.packing import why_waiting as why_packed
from hpcsched.store import journal
from hpcsched.testing.invariants import check

EVERY = 25
"""Events from one picture to the next."""

DIGITS = 10
"""Of a float, that count: sums and logarithms differ in the last ones between machines."""


# -- what is compared ----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """What a value says, as JSON: of records what differs from their defaults."""
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        return float(f"{value:.{DIGITS}g}")
    if kind is tuple or kind is list:
        return [plain(part) for part in value]
    if is_dataclass(kind):
        found = [(name, getattr(value, name), usual) for name, usual in defaults(kind)]
        return {name: plain(said) for name, said, usual in found if said is not usual and said != usual}
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    return [plain(part) for part in value]


@cache
def defaults(kind: Any) -> list[tuple[str, Any]]:
    """What the fields of a record usually are."""
    return [
        (part.name, part.default if part.default_factory is MISSING else part.default_factory())
        for part in fields(kind)
    ]


def digest(value: Any) -> str:
    """Six hexadecimal digits of something plain."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=3).hexdigest()


def digest_of_actions(actions: Sequence[Action]) -> str:
    """What stands for actions; for none "-"."""
    return digest([[type(action).__name__, plain(action)] for action in actions]) if actions else "-"


def picture(machine: Machine) -> dict[str, Any]:
    """All that can be said of a run, in sections, in words that are nobody's attributes.

    After a change of the machine's inside this function is adapted, and nothing else.
    """
    m, jobs = machine, list(machine.run.jobs.values())
    run, ledger, own, waiting = m.run, m.ledger, m.own, m.waiting
    known_of, deadline, decisions = m.estimates, m.deadline, m.decisions
    background, packing = m.mechanism(Background), m.mechanism(Packing)
    cpu, elastic = m.mechanism(Cpu), m.mechanism(Elastic)
    lanes, packed, cores, observed = (
        background.lanes,
        packing.packs,
        cpu.cores,
        known_of.observed,
    )
    view, lane_view, pack_view, cores_view = decisions.view(), background.view(), packing.view(), cpu.view()
    known: dict[int, tuple[Any, Any]] = {}

    def profile(found: Any) -> Any:
        """A profile in plain words; jobs of a model share it."""
        if id(found) not in known:
            known[id(found)] = found, found and digest(plain(found))
        return known[id(found)][1]

    def told(key: tuple[str, int, str]) -> Any:
        """The key of a profile; the run's own type of GPU goes without saying."""
        return key if key[2] else key[:2]

    def kept() -> str:
        """Which rule of every state does not hold."""
        try:
            check(m)
        except (AssertionError, KeyError, IndexError, AttributeError) as error:
            return type(error).__name__
        return ""

    def line(queue: Any) -> list[int]:
        return list(queue.walk())

    def lease(target: Target | None) -> Any:
        """What a job is to have; of cores what it has of them is told elsewhere."""
        found = plain(target)
        return {k: v for k, v in found.items() if k not in ("host", "grant")} if found else found

    def said(job: Job) -> dict[str, Any]:
        """A job's own facts."""
        return {
            "name": job.spec.name,
            "definition": plain(job.spec),
            "came": plain(job.submit_s),
            "state": str(job.state),
            "unmet": job.unmet,
            "kept away": job.held,
            "GPUs": list(job.gpus),
            "role": plain(job.role),
            "lease to come": lease(job.target),
            "lease it was told of": lease(job.becoming),
            "ready": job.ready,
            "can be resized in place": job.in_place,
            "traits": plain(replace(job.traits, excuses=(), losses=0, repeated=0, trained=())),
            "wanted": job.wanted,
            "attempt": job.attempt,
            "attempts": plain(job.attempts),
            "kind of attempts": sorted({type(attempt).__name__ for attempt in job.attempts}),
            "processes": plain(job.processes),
            "timers": plain(job.timers),
            "steps": [job.step, job.saved_step, job.repeated, job.remaining, job.steps_repeated],
            "reports": job.reports,
            "rate": plain(job.rate),
            "suspensions": job.suspensions,
            "failures": job.failures,
            "losses": job.traits.losses,  # as the next one, a field of its own when they were recorded
            "excuses": list(job.traits.excuses),
            "exit": job.exit,
            "began, ended": plain([job.started_s, job.ended_s]),
            "metrics": plain(job.metrics),
            "reason": plain(job.reason),
            "waits for": plain(m.waiting_reason(job)),
        }

    def expected(job: Job) -> dict[str, Any]:
        """What is known or taken for granted of a job that is not over."""
        on = max(1, job.spec.gpus_min)
        facts: dict[str, Any] = {
            "profile": profile(known_of.profile(job)),
            "curve": profile(known_of.curve(job)),
            "loaded": profile(known_of.loaded(job)),
            "shape": plain(known_of.shape(job)),
            "launch": plain([view.launch_s(job, on, first=True), view.launch_s(job, on + 1, first=False)]),
            "save": plain(view.save_s(job)),
            "most": m.rooms.most_for(job),
            "not beside": plain(list(why_beside(lane_view, job))) if job.spec.background else [],
            "not packed": plain(list(why_packed(pack_view, job))) if packing.used else [],
            "first checkpoint": plain(known_of.first_checkpoint_s(job)),
        }
        if job.id in run.active:
            facts["hosts"] = plain(ledger.hosts_of(job))
            facts["switch"] = plain([view.switch_s(job, on), view.switch_s(job, on + 1)])
            facts["stand"] = plain(view.stand_s(job, job.width or 1, on + 1))
            facts["built"] = plain(view.built_s(job, on))
            facts["left"] = plain([view.resize_left_s(job), view.start_left_s(job)])
        return facts

    known_to_all = [run.job_of(key) for job in jobs for key in (str(job.id), job.spec.name)]
    leases = {
        "devices": plain(list(ledger.devices.values())),
        "lost": plain(ledger.lost),
        "foreground": plain(sorted(own.holder.items())),
        "free": sorted(ledger.free),
        "free by host": ledger.free_by_host().by_host(),
        "there by host": ledger.capacity().by_host(),
        "run": [job.id for job in run.running],
        "secondaries": [job.id for job in run.secondaries],
        "have processes": list(run.active),
        "started from": plain(sorted(run.spawned_on.items())),
    }
    lent = {
        "lanes": sorted(lanes.holder.items()),
        "guests": [
            [g.job_id, g.gpu, plain([g.since_s, g.pace, g.most, g.paused_s])]
            for _, g in sorted(lanes.guests.items())
        ],
        "speeds": [
            [
                *(job_id, s.attempt, s.step, s.since_step, s.anew, s.measured_only),
                *plain([s.alone, s.beside, s.own, s.own_s, s.heard_s, s.since_s, s._open]),
            ]
            for job_id, s in sorted(lanes.speeds.items())
        ],
        "costly": [[*pair, plain(why)] for pair, why in sorted(lanes.costly.items())],
        "alone": plain(sorted(lanes.quarantined.items())),
        "used": [background.used, background.busy],
        "until": plain(lane_view.until),
    }
    riding = {
        "riders": plain(sorted(packed.riders.items())),
        "rides on": sorted(packed.gpu_of.items()),
        "alone": plain(sorted(packed.alone.items())),
        "holds since": [[*key, plain(at)] for key, at in sorted(packed.inherited_s.items())],
        "a GPU idles since": plain(packed.idle_s),
        "have parted": sorted(packed.parted),
        "used": packing.used,
    }
    on_cores = {
        "hosts": plain(sorted(cores.hosts.items())),
        "have": [
            [job_id, a.host, *map(plain, (a.seats, a.grant, a.next_grant, a.usage, a.memory))]
            for job_id, a in sorted(cores.of.items())
        ],
        "free": {host: plain(sorted(cores.free(host).items())) for host in cores.hosts},
        "loans": plain(sorted(cores.loans.items())),
        "run": [job.id for job in cores_view.running],
        "used": cpu.used,
    }
    queues = {
        "GPUs": line(own.queue),
        "lanes": line(background.queue),
        "cores": line(cpu.queue),
        "late": sorted(waiting.late),
        "no room": plain(sorted(waiting.delays.items())),
        "to come": plain(sorted(waiting.arrivals)),
        "wait for others": [
            [i, sorted(others)] for i, others in sorted(waiting.dependents.items()) if others
        ],
        "names": [job.id if job else None for job in known_to_all],
        "stuck": m.stuck,
    }
    estimates = {
        "profiles": [[*told(key), profile(found)] for key, found in sorted(known_of.profiles.items())],
        "parallel": sorted(map(list, known_of.parallel)),
        "seen": [
            [*told(key), gpus, plain([seen.rates, seen.steps, seen.told])]
            for key, counts in sorted(observed.seen.items())
            for gpus, seen in sorted(counts.items())
        ],
        "beliefs": [[*told(key), profile(found)] for key, found in sorted(observed.beliefs.items())],
        "curves": [[*told(key), profile(found)] for key, found in sorted(observed.curves.items())],
        "stretches": [
            [job_id, plain([s.attempt, s.step, s.at])] for job_id, s in sorted(observed._open.items())
        ],
        "costs": plain(sorted(known_of.costs.items())),
        "proposals": [
            [i, profile(p.profile), plain(p.batch)] for i, p in sorted(elastic.proposals.of.items())
        ],
        "grown": plain(sorted(elastic.proposals.grown.items())),
        "jobs": {str(job.id): expected(job) for job in jobs if not job.state.final},
    }
    plan = {
        "policy": [type(decisions.policy).__name__, plain(decisions.options)],
        "plan": plain(run.plan),
        "asked": decisions.plan_asked,
        "news": run.news,
        "watched": [job.id for job in run.running if decisions.policy and decisions.policy.watches(job)],
    }
    end = {
        "now": plain(run.now),
        "deadline": plain([deadline.at, deadline.reserve_s, run.grace_s]),
        "leaves": [deadline.draining, deadline.cause, plain(deadline.leave_by), m.stopped],
        "room": plain([deadline.left_s(), deadline.margin_s(), deadline.saves_before(background)]),
        "due": plain(
            [deadline._timer_due, decisions._look_due, background._due, packing._due, deadline._late_since]
        ),
    }
    counts = {
        "lives": plain(run.lives),
        "run": run.run_id,
        "left": [run.unfinished, run.finished],
        "stale": run.stale,
        "changed": sorted(run.changed),
        "broken": kept(),
        "definitions": [plain(sorted(run.kept.items())), plain(sorted(run.updated.items()))],
    }
    return {
        "jobs": {str(job.id): said(job) for job in jobs},
        "stories": {
            str(job.id): [[plain(note.at), str(note.reason), plain(note.reason)] for note in job.story]
            for job in jobs
        },
        "leases": leases,
        "background": lent,
        "packs": riding,
        "cores": on_cores,
        "queues": queues,
        "estimates": estimates,
        "plan": plan,
        "deadline": end,
        "counts": counts,
    }


# -- journals ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Recorded:
    """A journal, and what came of it.

    `events` are types and bodies, `answers` the digests of what each led to; `pictures` are digests by the
    number of events before them, `sections` those of the parts of the last picture. Of the plans that are
    asked for, the first `plans` are made, and are part of the answer (others take too long).
    """

    name: str
    stories: bool = True
    plans: int = 0
    events: list[tuple[str, str]]
    answers: list[str] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)

    def decoded(self) -> Iterator[ev.Event]:
        """Its events, read by the store."""
        for number, (kind, body) in enumerate(self.events, 1):
            yield decoded(number, kind, body)


def decoded(number: int, kind: str, body: str) -> ev.Event:
    """An event as the store reads it from a record."""
    checksum = crc32(body.encode(), crc32(f"{number} {kind} ".encode()))
    head = f'{{"v":{journal.VERSION},"seq":{number},"crc":"{checksum:08x}","type":"{kind}","event":'
    return journal.decode(f"{head}{body}}}\n".encode())[1]


class Answering:
    """A machine that answers with digests; it makes the first `plans` plans that it is asked for. `packs`:
    the jobs that are over are packed after each event."""

    def __init__(self, *, stories: bool, plans: int, packs: bool = False) -> None:
        self.machine = Machine(any_policy, stories=stories)
        self._plans, self._packs = plans, packs

    def answer(self, event: ev.Event) -> str:
        """What it does about an event; a decision that cannot be is an answer too."""
        try:
            actions = self.machine.handle(event)
        except InvalidTransition as error:
            return digest(str(error))
        finally:
            if self._packs:
                self.machine.run.jobs.pack()
        said = digest_of_actions(actions)
        if self._plans and any(isinstance(action, MakePlan) for action in actions):
            self._plans -= 1
            said = digest([said, plain(self.machine.make_plan())])
        return said


def sections_of(machine: Machine) -> dict[str, str]:
    """A digest for each section of the picture."""
    return {name: digest(part) for name, part in picture(machine).items()}


def recorded(
    name: str, events: Iterable[tuple[str, str]], *, stories: bool = True, plans: int = 0
) -> Recorded:
    """What the present code makes of these events."""
    made = Recorded(name=name, stories=stories, plans=plans, events=list(events))
    one = Answering(stories=stories, plans=plans)
    for number, event in enumerate(made.decoded(), 1):
        made.answers.append(one.answer(event))
        if number % EVERY == 0:
            made.pictures[str(number)] = digest(sections_of(one.machine))
    made.sections = sections_of(one.machine)
    return made


def difference(before: Recorded, *, packs: bool = False) -> str:
    """Replay a journal: the first thing that is not as it was; "" where all is."""
    one = Answering(stories=before.stories, plans=before.plans, packs=packs)
    machine, number, last = one.machine, 0, 0
    for number, (event, expected) in enumerate(zip(before.decoded(), before.answers, strict=True), 1):
        try:
            found = one.answer(event)
        except Exception as error:
            return _where(before, number, f"{type(error).__name__}: {error}")
        if found != expected:
            return _where(before, number, f"its actions are {found}, and were {expected}")
        if number % EVERY == 0:
            if digest(sections_of(machine)) != before.pictures[str(number)]:
                sections = _differing(before, machine) if number == len(before.events) else ""
                return _where(before, number, f"the state after it differs (and not after {last}){sections}")
            last = number
    sections = _differing(before, machine)
    return _where(before, number, f"the last state differs{sections}") if sections else ""


def _differing(before: Recorded, machine: Machine) -> str:
    now = sections_of(machine)
    names = [
        name for name in before.sections.keys() | now.keys() if before.sections.get(name) != now.get(name)
    ]
    return f": its {', '.join(sorted(names))}" if names else ""


def _where(before: Recorded, number: int, what: str) -> str:
    kind, body = before.events[number - 1] if number else ("no event", "")
    return f"{before.name}: event {number} of {len(before.events)}, {kind} {body[:300]}: {what}"


# -- files ---------------------------------------------------------------------------------------------------


def write(path: Path, journals: Iterable[Recorded]) -> None:
    """A group of journals; the same journals give the same bytes."""
    lines = []
    for one in journals:
        head = {"name": one.name, "stories": one.stories, "plans": one.plans}
        head |= {"pictures": one.pictures, "sections": one.sections}
        lines.append(json.dumps(head, separators=(",", ":")))
        lines += [
            f"{kind}\t{body}\t{said}" for (kind, body), said in zip(one.events, one.answers, strict=True)
        ]
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), 9, mtime=0))


def read(path: Path) -> Iterator[Recorded]:
    """The journals of a group."""
    one = None
    for text in gzip.decompress(path.read_bytes()).decode().split("\n"):
        if text.startswith("{"):
            if one:
                yield one
            one = Recorded(events=[], **json.loads(text))
        elif text and one:
            kind, body, said = text.split("\t")
            one.events.append((kind, body))
            one.answers.append(said)
    if one:
        yield one
