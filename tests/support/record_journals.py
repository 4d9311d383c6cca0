"""Makes the recorded journals of tests/data/journals, from what tests, runs and simulations left.

    mkdir -p /var/tmp/raw; export RECORD_JOURNALS=/var/tmp/raw PYTHONPATH=.:tests/support
    python -m pytest -p journal_recorder -m "not slow" tests/unit
    python -m pytest --basetemp=/var/tmp/runs -o tmp_path_retention_policy=all tests/process/agent
    python tests/support/record_journals.py play
    python tests/support/record_journals.py choose /var/tmp/raw /var/tmp/runs tests/data/runs

The first two leave what tests and real runs told their machines; `play` simulates the job scripts and plays
scenes. `choose` takes the journals that reach most of the core and of the policies, short ones first, and all
of real runs and job scripts; `add GROUP` in its place keeps those that are stored. After a change that is
meant to change what machines do, `again` has the present code answer the same events; whoever does that looks
at why they differ. `reach` prints which lines no replay reaches.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import coverage
import msgspec
import recorded
from impossible import any_policy

from hpcsched.core import events as ev
from hpcsched.core.actions import MakePlan
from hpcsched.core.machine import Machine
from hpcsched.errors import HpcschedError, InvalidTransition
from hpcsched.store.replay import valid_events

HERE = Path(__file__).parent.parent
STORED = HERE / "data" / "journals"
ROOMS = ("core", "policy")

MOST_EVENTS = 700
MOST_OF_A_TEST = 150
MOST_JOURNALS = 480
"""Besides those of real runs and of job scripts."""

PLANS_S = 0.1
"""Seconds for plans in one journal."""

MOST_BYTES = 26_000_000
"""Of all bodies together."""


@dataclass
class Found:
    """A journal that may be chosen; `features` are what it would show."""

    group: str
    name: str
    stories: bool
    events: list[tuple[str, str]]
    features: set[Any] = field(default_factory=set)
    plans: int = 0

    @property
    def size(self) -> int:
        """Characters of all bodies."""
        return sum(len(body) for _, body in self.events)


def say(text: object) -> None:
    """A line for whoever waits."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# -- what there is -------------------------------------------------------------------------------------------

_PATHS = re.compile(r"/(?:tmp|var/tmp|home|root|work|usr|opt|dev/shm)/[^\s\"\\',:;)=]*")
_RUN = re.compile(r'"run_id":"[^"]+"')


def clean(body: str) -> str:
    """The body of an event without what is of this machine and of who has recorded it."""
    body = _PATHS.sub(lambda path: "/srv/" + Path(path[0]).name, body)
    body = _RUN.sub('"run_id":"a-run"', body)
    for name in {socket.gethostname(), socket.getfqdn()}:
        body = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "node1", body)
    return re.sub(rf'"{re.escape(getpass.getuser())}"', '"ada"', body)


def lean(number: int, kind: str, body: str) -> tuple[str, str]:
    """An event, without what is as usual; its own body where that does not say the same."""
    event = recorded.decoded(number, kind, clean(body))
    short = msgspec.json.encode(_spoken(event)).decode()
    assert recorded.decoded(number, kind, short) == event, short
    return kind, short


def _spoken(value: Any) -> Any:
    if recorded.is_dataclass(value):
        found = [(name, getattr(value, name), usual) for name, usual in recorded.defaults(type(value))]
        return {
            name: _spoken(said)
            for name, said, usual in found
            if type(said) is not type(usual) or said != usual
        }
    if isinstance(value, (tuple, list)):
        return [_spoken(part) for part in value]
    if isinstance(value, dict):
        return {key: _spoken(part) for key, part in value.items()}
    return value


def of_tests(path: Path) -> Iterator[Found]:
    """The journals that a process of the tests wrote down, as far as a replay answers the same."""
    of_each = Counter[str]()
    for line in path.read_text().splitlines():
        told = json.loads(line)
        of_each[told["test"]] += 1
        if of_each[told["test"]] > MOST_OF_A_TEST:
            continue
        events = [(kind, body) for kind, body in told["events"]]
        machine, good = Machine(any_policy, stories=told["stories"]), 0
        for (kind, body), said in zip(events, told["answers"], strict=False):
            try:
                found = recorded.digest_of_actions(machine.handle(recorded.decoded(good + 1, kind, body)))
            except InvalidTransition as error:
                found = f"InvalidTransition: {error}"
            except Exception:
                break  # what comes then is not what the core is made for
            if found != said:
                break
            good += 1
        test = told["test"]
        room = test.split("/")[2] if test.startswith("tests/unit/") else test.split("/")[0]
        group = room if room in ("core", "policy", "sim", "scenes", "jobscripts") else "other"
        if good:
            yield Found(group, test, told["stories"], events[:good])


def of_run(path: Path) -> Iterator[Found]:
    """The journal of a run, in a group of its own; its name is what the folders above it say."""
    try:
        events = [(type(e).__name__, msgspec.json.encode(e).decode()) for e in valid_events(path)]
    except HpcschedError:
        return
    words = [word for word in path.parts[:-1] if re.fullmatch(r"test_.*|[a-z]+|0\.1\.0.*", word)]
    if events:
        yield Found("live", "/".join(words[-3:]), True, events[:MOST_EVENTS])


def found_in(places: Iterable[Path]) -> list[Found]:
    """All journals there, each once."""
    once: dict[tuple[Any, ...], Found] = {}
    for place in places:
        journals = [*map(of_run, sorted(place.rglob("journal.jsonl")))]
        for those in (*journals, *map(of_tests, sorted(place.rglob("machines-*.jsonl")))):
            for one in those:
                if len(one.events) > MOST_EVENTS:
                    continue
                try:
                    one.events = [lean(n, *event) for n, event in enumerate(one.events, 1)]
                except (AssertionError, HpcschedError, ValueError) as error:
                    say(f"left out: {one.name}: {type(error).__name__} {str(error)[:100]}")
                    continue
                once.setdefault((one.stories, *one.events), one)
    return list(once.values())


# -- what they show ------------------------------------------------------------------------------------------


def looked_at(journals: list[Found]) -> list[Found]:
    """The journals whose replay goes through, with their features."""
    good = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        source = [str(HERE.parent / "hpcsched" / room) for room in ROOMS]
        tracer = coverage.Coverage(data_file=str(data), branch=True, source=source, config_file=False)
        tracer.start()
        for number, one in enumerate(journals):
            tracer.switch_context(str(number))
            try:
                one.features = _replayed(one)
                good.append(one)
            except Exception as error:
                say(f"left out: {one.name}: {type(error).__name__} {str(error)[:200]}")
        tracer.stop()
        tracer.save()
        with sqlite3.connect(data) as database:
            for context, path, begin, end in database.execute(
                "select context.context, file_id, fromno, tono from arc "
                "join context on context.id = arc.context_id"
            ):
                if context:
                    journals[int(context)].features.add((path, begin, end))
    return good


def _replayed(one: Found) -> set[Any]:
    """What its events lead to: reasons by event, policy and kind of job, and combinations of actions."""
    machine = Machine(any_policy, stories=one.stories)
    features: set[Any] = set()
    stories: dict[int, int] = defaultdict(int)
    planning_s = 0.0
    for number, (kind, body) in enumerate(one.events, 1):
        event = recorded.decoded(number, kind, body)
        try:
            actions = machine.handle(event)
        except InvalidTransition as error:
            features.add(("refused", kind, str(error)[:20]))
            actions = []
        if planning_s < PLANS_S and any(isinstance(action, MakePlan) for action in actions):
            begun_s = time.process_time()
            machine.make_plan()
            planning_s += time.process_time() - begun_s
            one.plans += 1
        policy = type(machine.decisions.policy).__name__
        told = tuple(sorted(Counter(type(action).__name__ for action in actions)))
        about = ""
        if isinstance(event, ev.JobEvent) and event.job_id in machine.run.jobs:
            job = machine.run.jobs[event.job_id]
            about = f"{job.spec.kind} {job.spec.strategy['kind']} {job.spec.background}"
            features.add((kind, about, str(job.state), job.wanted[:4], policy))
        features.add((kind, about, told, policy))
        for job_id in list(machine.run.changed):
            job = machine.run.jobs[job_id]
            story = job.story[-3:] if one.stories else ()
            news = tuple(str(note.reason.why) for note in story if note.at == machine.run.now)
            if news and stories[job_id] != len(job.story):
                features.add((kind, news[-1], policy, f"{job.spec.kind} {job.spec.strategy['kind']}"))
                features.add((kind, news, str(job.state)))
            stories[job_id] = len(job.story)
    recorded.picture(machine)
    return features


# -- the choice ----------------------------------------------------------------------------------------------


def chosen(journals: list[Found]) -> list[Found]:
    """Those that show most for their length, one after the other, until the others show nothing new; branches
    of the code count for more than all else."""
    seen, taken, size = set[Any](), list[Found](), 0

    def worth(one: Found) -> float:
        return sum(20 if isinstance(new[0], int) else 1 for new in one.features - seen) / (300 + one.size)

    heap = [(-worth(one), i, one) for i, one in enumerate(journals)]
    heapify(heap)
    while heap and len(taken) < MOST_JOURNALS and size < MOST_BYTES:
        before, i, best = heappop(heap)
        now = worth(best)
        if now < -before:  # it was worth more before others were taken
            if now:
                heappush(heap, (-now, i, best))
            continue
        taken.append(best)
        seen |= best.features
        size += best.size
    say(f"{len(taken)} of {len(journals)} journals show {len(seen)} things, {len(heap)} are left")
    return taken


def choose(places: list[Path], *, into: str = "") -> None:
    """Choose among what lies there, and store it; `into` this group, beside those that are stored."""
    journals = found_in(places)
    say(f"{len(journals)} journals, {sum(len(one.events) for one in journals)} events")
    journals = looked_at(journals)
    groups: dict[str, list[Found]] = defaultdict(list)
    for one in journals if into else ():
        one.group = into
    whole = [one for one in journals if one.group in ("live", "jobscripts")]
    rest = [one for one in journals if one.group not in ("live", "jobscripts")]
    for one in (*whole, *chosen(rest)):
        groups[one.group].append(one)
    STORED.mkdir(parents=True, exist_ok=True)
    for old in () if into else STORED.glob("*.gz"):
        old.unlink()
    for group, those in sorted(groups.items()):
        those.sort(key=lambda one: (one.name, one.events[0], len(one.events)))
        made, names = [], Counter[str]()
        for one in those:
            names[one.name] += 1
            name = f"{one.name} ({names[one.name]})"
            made.append(recorded.recorded(name, one.events, stories=one.stories, plans=one.plans))
        path = STORED / f"{group}.gz"
        recorded.write(path, made)
        events = sum(len(one.events) for one in made)
        say(f"{group}: {len(made)} journals, {events} events, {path.stat().st_size} bytes")


def play() -> None:
    """Record simulations of the job scripts under each policy, and the scenes."""
    import journal_recorder
    from click.testing import CliRunner
    from journal_scenes import play_all

    from hpcsched.cli.main import cli as command
    from hpcsched.policy import POLICIES

    journal_recorder.install()
    for script in sorted((HERE.parent / "jobscripts").glob("marble/*.toml")):
        for gpus, nodes in ((6, 1), (4, 2)):
            for policy in POLICIES:
                words = ["simulate", str(script), "--gpus", str(gpus), "--nodes", str(nodes)]
                words += ["--policy", policy, "--profiles", "marble-summit"]
                result = CliRunner().invoke(command, words)
                say(f"{script.name} {policy}: {result.output.splitlines()[:1]} {result.exception}")
                journal_recorder.flush(f"jobscripts/{script.name} {policy}")
    play_all(journal_recorder.flush)


def again() -> None:
    """Have the present code answer the events that are stored."""
    for path in sorted(STORED.glob("*.gz")):
        before = list(recorded.read(path))
        after = [
            recorded.recorded(one.name, one.events, stories=one.stories, plans=one.plans) for one in before
        ]
        differ = sum(old != new for old, new in zip(before, after, strict=True))
        recorded.write(path, after)
        say(f"{path.name}: {differ} of {len(after)} journals differ now")


def reach() -> None:
    """What of the core and of the policies the replays do not reach."""
    for name in list(sys.modules):
        if name.startswith("hpcsched") or name in ("recorded", "impossible"):
            del sys.modules[name]  # so that what runs at the import counts too
    source = [f"hpcsched.{room}" for room in ROOMS]
    tracer = coverage.Coverage(data_file=None, branch=True, source=source, config_file="pyproject.toml")
    tracer.start()
    import recorded as fresh

    for path in sorted(STORED.glob("*.gz")):
        for one in fresh.read(path):
            assert not fresh.difference(one)
    tracer.stop()
    tracer.report(show_missing=True)
    for room in ROOMS:
        with Path(os.devnull).open("w") as nowhere:
            reached = tracer.report(include=[f"*/hpcsched/{room}/*"], file=nowhere)
        say(f"{room}: {reached:.1f} %")


def main(words: list[str]) -> None:
    """Do what the command line says."""
    match words:
        case ["choose", *places]:
            choose([Path(place) for place in places])
        case ["add", group, *places]:
            choose([Path(place) for place in places], into=group)
        case ["play"]:
            play()
        case ["again"]:
            again()
        case ["reach"]:
            reach()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
