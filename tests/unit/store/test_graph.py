"""The codec of graphs takes what the core is made of, and nothing that it does not know is ever looked up."""

from __future__ import annotations

import math
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.core.environments import PythonEnvironment
from hpcsched.core.jobs import USUAL, Job, Target
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.speed import Speeds
from hpcsched.core.model import NOTHING, JobSpec, JobState, Kind, Role
from hpcsched.core.reasons import Note, Reason, Why
from hpcsched.core.resources.queue import Asked, WaitingQueue
from hpcsched.core.run import Run
from hpcsched.errors import BadInput
from hpcsched.policy import make_policy
from hpcsched.store import checkpoint
from hpcsched.store.graph import Decoder, Encoder, NotPlain, Tables
from hpcsched.testing.builders import Driver, a_job, a_profile


def packed(root: Any, **more: Any) -> tuple[Tables, Any]:
    """A graph as it is in a file."""
    tables = Tables()
    value = Encoder(tables, {"make_policy": make_policy}, **more).graph(root)
    data = msgspec.msgpack.encode((tables, value))
    return msgspec.msgpack.decode(data, type=tuple[Tables, Any])


def again(root: Any, **more: Any) -> Any:
    tables, value = packed(root, **more)
    return Decoder(tables, {"make_policy": make_policy}).graph(value)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**63 - 1, 2**64, -(2**80), 1.5, -0.0, math.inf, "", "é\x00", b"\xff"),
        *(
            (),
            (1, (2,)),
            [],
            [[1]],
            {},
            {1: {2: 3}},
            {(1, "a"): None},
            set(),
            {1, 2},
            {"b", 1.5},
            frozenset("ab"),
        ),
        Counter({"a": 2}),
        *(Role.PRIMARY, JobState.PENDING, {Role.CORES: Why.HELD}, JobState, {Job: 1}),
        *(Asked(1, 2), Reason(Why.HELD), Note(1.5, Reason(Why.DEPENDENCY, {"after": "a"}))),
        Target((1, 2), Role.PRIMARY, 3.0, grant={0: 50}),
    ],
)
def test_what_a_state_is_made_of_comes_back(value: Any) -> None:
    made = again(value)
    assert made == value and type(made) is type(value)
    assert repr(made) == repr(value) or isinstance(value, (set, frozenset))


def test_nan_comes_back() -> None:
    assert math.isnan(again([math.nan])[0])


def test_objects_are_the_same_ones_wherever_they_are() -> None:
    line: list[Any] = []
    job = Job(id=1, spec=JobSpec(name="a", kind=Kind.REPLAY, model="m"), submit_s=0.0)
    line += [job, {"line": line, "job": job}, line]
    made = again(line)
    assert made[2] is made and made[1]["line"] is made and made[1]["job"] is made[0]
    assert isinstance(made[0], Job) and made[0].spec == job.spec
    assert made[0].traits is USUAL and made[0].timers is NOTHING


def test_the_state_of_what_shares_it_goes_on_being_shared() -> None:
    run = Run()
    run.touch(1)
    made = again([run, run.touch, run.add])
    made[1](2)
    assert made[0].changed == {1, 2} and made[2].__self__ is made[0]


def test_dicts_with_attributes_have_both() -> None:
    class_of = again(Speeds())
    assert type(class_of) is Speeds and class_of == {}


def test_equal_ones_of_a_shared_kind_become_one() -> None:
    jobs = [PythonEnvironment(kind="venv", name="/v") for _ in range(3)]
    made = again(jobs, shared=(PythonEnvironment,))
    assert made == jobs and made[0] is made[1] is made[2]


def test_what_is_apart_is_asked_for_by_its_number() -> None:
    jobs = [Job(id=n, spec=JobSpec(name=f"j{n}", kind=Kind.REPLAY, model="m"), submit_s=0.0) for n in (1, 2)]
    tables, value = packed([jobs, jobs[1]], apart={Job: lambda job: job.id if job.id == 2 else None})
    made = Decoder(tables, {}, apart={2: jobs[1]}.__getitem__).graph(value)
    assert made[0][1] is made[1] is jobs[1] and made[0][0] is not jobs[0]
    with pytest.raises(BadInput):
        Decoder(tables, {}).graph(value)


def test_tables_that_go_on_keep_the_values_from_before() -> None:
    tables = Tables()
    first = Encoder(tables, {}, shared=(PythonEnvironment,)).graph(
        [PythonEnvironment(kind="venv", name="/a")]
    )
    second = Encoder(tables, {}, shared=(PythonEnvironment,)).graph(
        [Role.CORES, PythonEnvironment(kind="venv", name="/a"), PythonEnvironment(kind="venv", name="/b")]
    )
    decoder = Decoder(tables, {})
    assert decoder.graph(first)[0] is decoder.graph(second)[1]
    assert decoder.graph(second)[0] is Role.CORES and len(tables.shared) == 2


class Stranger:
    pass


def within_itself() -> Job:
    job = Job(id=1, spec=JobSpec(name="a", kind=Kind.REPLAY, model="m"), submit_s=0.0)
    job.reason = job  # type: ignore[assignment]
    return job


@pytest.mark.parametrize(
    "value",
    [
        *(lambda: None, make_policy.__code__, len, Stranger(), Stranger, Path("a"), deque([1]), iter([])),
        *(
            [1].append,
            {1}.remove,
            Stranger().__init__,
            bytearray(b"a"),
            object(),
            range(3),
            1j,
            math,
            within_itself(),
        ),
    ],
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        packed([value])


def test_what_is_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotPlain):
        Encoder(Tables(), {}).graph(deep)


# -- from others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "subprocess:Popen", "hpcsched.errors:BadInput", "hpcsched.core.jobs"),
        *(
            "hpcsched.core.jobs:median",
            "hpcsched.core.jobs:replace",
            "hpcsched.core.jobs:JobSpec",
            "",
            ":",
            "a:b:c",
        ),
        *(
            "hpcsched.core.jobs:Job.__init__",
            "hpcsched.core.jobs:Job.note",
            "hpcsched.core.jobs:__builtins__",
        ),
        *(
            "hpcsched.core.nothing:Job",
            "hpcsched.core.jobs:Nothing",
            "hpcsched.core..jobs:Job",
            "hpcsched.core.:x",
        ),
        *("hpcsched.corex:Job", "hpcsched.core:jobs.Job", "hpcsched.core.jobs:Job.__class__"),
    ],
)
def test_only_classes_of_the_core_are_looked_up(name: str) -> None:
    with pytest.raises(BadInput):
        Decoder(Tables(classes=[name]), {})


JOB, RUN, QUEUE = (
    "hpcsched.core.jobs:Job",
    "hpcsched.core.run:Run",
    "hpcsched.core.resources.queue:WaitingQueue",
)


@pytest.mark.parametrize(
    "value",
    [
        *(
            [],
            [-1],
            [99],
            ["a"],
            [None],
            [[0]],
            [True],
            [0, 0],
            [0, -1],
            [0, "a"],
            [8, 0],
            [8, -1],
            [9, 9],
            [7, "a"],
        ),
        *([10, 1, "add"], [10, [2], "append"], [10, [15], "__class__"], [10, [15], "changed"], [10, [15], 1]),
        *([11, "nothing"], [11], [12, 0], [13, 1], [14, 0], [14, 0, 1, 99, 2], [14, "id", 1], [14, -1, 1]),
        *(
            [15, "__class__", 1],
            [15, "__dict__", 1],
            [15, 1, 2],
            [15, "a"],
            [5, 1],
            [5, [2], 1],
            [3, [2]],
            [16, 1, 2],
        ),
    ],
)
def test_values_that_mean_nothing_are_bad_input(value: Any) -> None:
    with pytest.raises(BadInput):
        Decoder(Tables(classes=[JOB, RUN, QUEUE]), {}).graph(value)


@pytest.mark.parametrize("enums", [[(0, "PENDING")], [(1, "NOTHING")], [(-1, "PENDING")], [(9, "PENDING")]])
def test_members_that_no_enum_has_are_bad_input(enums: list[tuple[int, str]]) -> None:
    with pytest.raises(BadInput):
        Decoder(Tables(classes=[JOB, "hpcsched.core.states:JobState"], enums=enums), {})


def test_a_value_nested_too_deep_is_bad_input() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [2, value]
    with pytest.raises(BadInput):
        Decoder(Tables(), {}).graph(value)


@pytest.fixture(scope="module")
def body() -> bytes:
    driver = Driver(a_job("a", "m"), a_job("b", "m"), profiles=[a_profile("m", [1, 2, 3])])
    driver.runs("a", "b")
    driver.exits("b", 0, 100)
    return checkpoint.encode(driver.machine, make_policy, ())


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=examples(400), deadline=None)
def test_whatever_a_checkpoint_says_is_a_state_or_bad_input(body: bytes, data: st.DataObject) -> None:
    """With checksums that are right: as somebody writes it who means harm."""
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        machine, _ = checkpoint.decode(bytes(damaged), make_policy)
        for _job in machine.run.jobs.values():
            pass
    except BadInput:
        return
    assert isinstance(machine, Machine)


def test_the_queue_of_a_state_is_one(body: bytes) -> None:
    machine, _ = checkpoint.decode(body, make_policy)
    assert isinstance(machine.own.queue, WaitingQueue)
