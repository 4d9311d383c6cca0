"""Any event that can be made can be written and read back as the same event."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from zlib import crc32

import msgspec
import pytest
from budget import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcsched.core.events import RULES, AgentStarted, JobsSubmitted
from hpcsched.core.model import (
    Array,
    ComputeMode,
    Container,
    Device,
    HostCores,
    JobSpec,
    Kind,
    Progress,
    PythonEnvironment,
    Restart,
    Training,
)
from hpcsched.core.needs import Needs
from hpcsched.core.plan import Plan, Stage
from hpcsched.core.profile import Profile
from hpcsched.core.shared_use import SharedUse
from hpcsched.store import journal
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import NewerRun

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(1e-6, 1e6)
number = st.integers(-(2**62), 2**62)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | number | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
tables = st.dictionaries(st.integers(1, 64), positive, min_size=1, max_size=4)
costs = st.none() | st.floats(0, 1e6) | tables

BY_TYPE = {
    float: finite,
    int: number,
    str: text,
    bool: st.booleans(),
    int | None: st.none() | number,
    int | str: number | text,
    float | None: st.none() | finite,
    str | None: st.none() | text,
    Mapping[str, typing.Any]: st.dictionaries(text, values, max_size=3),
    Mapping[str, str]: st.dictionaries(text, text, max_size=3),
    Mapping[str, float | None]: st.dictionaries(text, st.none() | finite, max_size=3),
    Mapping[str, float]: st.dictionaries(text, finite, max_size=3),
    Mapping[int, float]: st.dictionaries(number, finite, max_size=3),
    Mapping[int, int]: st.dictionaries(number, number, max_size=3),
    Mapping[int, tuple[str, ...]]: st.dictionaries(number, st.lists(text).map(tuple), max_size=3),
    tuple[str, ...]: st.lists(text, max_size=3).map(tuple),
    tuple[str, int, int]: st.tuples(text, number, number),
    tuple[int, ...]: st.lists(number, max_size=3).map(tuple),
    tuple[float, ...]: st.lists(finite, max_size=3).map(tuple),
    tuple[tuple[str, str], ...]: st.lists(st.tuples(text, text), max_size=3).map(tuple),
    tuple[tuple[int, int], ...]: st.lists(st.tuples(number, number), max_size=3).map(tuple),
    Kind: st.sampled_from(Kind),
    ComputeMode: st.sampled_from(ComputeMode),
}


def of(kind):
    """Instances of a dataclass of such fields."""
    hints = typing.get_type_hints(kind)
    of_fields = {f.name: BY_TYPE[hints[f.name]] for f in fields(kind) if f.init}
    if "rules" in of_fields:
        of_fields["rules"] = st.integers(1, RULES)
    return st.builds(kind, **of_fields)


BY_TYPE[tuple[HostCores, ...]] = st.lists(of(HostCores), max_size=2).map(tuple)
profiles = st.builds(
    Profile,
    model=text,
    device=text,
    throughput=tables,
    start_s=costs,
    suspend_s=costs,
    resume_s=costs,
    grow_s=costs,
    shrink_s=costs,
    memory_mib=st.none() | tables,
    packed_s=st.none() | tables,
    note=text,
)
BY_TYPE[Training | None] = st.none() | of(Training)
kinds = st.sampled_from(["python", "venv", "conda"])
BY_TYPE[Array | None] = st.none() | st.builds(Array, name=text, index=number, at_once=st.none() | number)
BY_TYPE[Container | None] = st.none() | st.builds(Container, image=text, options=st.tuples(text))
BY_TYPE[PythonEnvironment | None] = st.none() | st.builds(PythonEnvironment, kind=kinds, name=text)
BY_TYPE[typing.get_type_hints(Restart)["batch"]] = st.sampled_from(["fixed", "scales", "kept"])
BY_TYPE[Needs | None] = st.none() | of(Needs)
BY_TYPE[Restart | None] = st.none() | of(Restart)
BY_TYPE |= {
    tuple[Device, ...]: st.lists(of(Device), max_size=2).map(tuple),
    tuple[JobSpec, ...]: st.lists(of(JobSpec), max_size=2).map(tuple),
    Mapping[int, JobSpec]: st.dictionaries(number, of(JobSpec), max_size=2),
    tuple[Progress, ...]: st.lists(of(Progress), max_size=2).map(tuple),
    tuple[Profile, ...]: st.lists(profiles, max_size=2).map(tuple),
    tuple[Stage, ...]: st.lists(of(Stage), max_size=2).map(tuple),
    tuple[SharedUse, ...]: st.lists(of(SharedUse), max_size=2).map(tuple),
}
BY_TYPE |= {Plan: of(Plan)}
CONCRETE = sorted(set(journal._EVENTS) - {"Event", "JobEvent", "AttemptEvent"})
any_event = st.sampled_from(CONCRETE).flatmap(lambda name: of(journal._EVENTS[name]))


@pytest.mark.parametrize("name", CONCRETE)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_every_event_survives(name, data):
    event = data.draw(of(journal._EVENTS[name]))
    line = journal.encode(7, event)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert journal.decode(line) == (7, event)


def test_a_pattern_of_0_6_0_is_the_jobs_own():
    spec = JobSpec(
        name="a", kind=Kind.COMMAND, model="m", command=("x",), restart=Restart(resume_command=("[ -e x ]",))
    )
    pattern = r'"\"step\" (\\d+)"'
    event = msgspec.json.encode(JobsSubmitted(at=0.0, first_id=1, jobs=(spec, replace(spec, restart=None))))
    old = event.replace(b',"progress_pattern":""', b"", 1)
    old = old.replace(
        b'"resume_command":["[ -e x ]"]',
        f'"resume_command":["[ -e x ]"],"progress_pattern":{pattern}'.encode(),
    )
    assert old.count(b"progress_pattern") == 2
    head = f'{{"v":1,"seq":1,"crc":"{crc32(old, crc32(b"1 JobsSubmitted ")):08x}","type":"JobsSubmitted",'
    _, read = journal.decode(head.encode() + b'"event":' + old + b"}\n")
    assert [job.progress_pattern for job in read.jobs] == [r'"step" (\d+)', ""]
    assert read.jobs[0].restart == spec.restart


@pytest.mark.parametrize("rules", [0, RULES + 1])
def test_rules_that_were_never_released_are_refused_in_one_line(tmp_path, rules):
    path = tmp_path / "journal.jsonl"
    started = AgentStarted(at=0.0, wall=1e9, devices=(), policy="marble", rules=rules)
    path.write_bytes(journal.encode(1, started))
    with pytest.raises(NewerRun, match=rf"not of this hpcsched: record 1: .*version {rules} of the rules"):
        list(journal.read(path))


@settings(
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(events=st.lists(any_event, min_size=1, max_size=5), data=st.data())
def test_a_journal_cut_anywhere_has_its_whole_records(tmp_path, events, data):
    path = tmp_path / "journal.jsonl"
    path.unlink(missing_ok=True)
    writer = Journal(path)
    ends = []
    for event in events:
        writer.append([event], sync=False)
        ends.append(path.stat().st_size)
    writer.close()
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = [event for event, end in zip(events, ends, strict=True) if end <= cut]
    assert [event for event, _ in journal.read(path)] == whole
