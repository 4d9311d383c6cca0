"""Messages: what is encoded is decoded as it was; what is not one is BadInput, and nothing else."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract import codec, orders
from hpcsched.contract.orders import Forget, Pace, Resize, Suspend
from hpcsched.contract.progress import Batching, Line, Scaling, Usage
from hpcsched.contract.seats import Seat, of_table, to_table
from hpcsched.contract.state import State
from hpcsched.contract.words import Held, Ready, Stop, Unusable, Versions
from hpcsched.contract.zygote import Request, decode_answer, encode_answer
from hpcsched.errors import BadInput

wholes = st.integers(-(2**63) + 1, 2**63 - 1)
steps = st.integers(0, codec.MOST_STEPS)
numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
lists = {"max_size": 4}


def maybe(some: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | some


def tuples(some: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(some, max_size=4).map(tuple)


seats = tuples(st.builds(Seat, st.booleans(), numbers.map(abs), texts, tuples(wholes)))
states = st.builds(
    State,
    steps,
    maybe(wholes),
    maybe(texts),
    maybe(wholes),
    st.dictionaries(texts, maybe(numbers), max_size=4),
    maybe(numbers),
)
versions = st.from_regex(r"\A[0-9]{1,3}\.[0-9a-z+]{1,9}\Z")
words = st.one_of(
    st.builds(Ready, st.booleans(), st.booleans(), maybe(steps), maybe(numbers)),
    st.builds(Held, steps, maybe(wholes)),
    st.builds(Unusable, wholes, texts, texts, tuples(texts)),
    st.builds(Versions, versions, st.dictionaries(st.from_regex(r"\A[a-z]{1,9}\Z"), versions, max_size=4)),
    st.builds(Stop, texts),
)
lines = st.builds(
    Line,
    steps,
    numbers,
    maybe(numbers),
    maybe(
        st.builds(
            Batching, wholes, wholes, tuples(wholes), tuples(wholes), numbers, maybe(numbers), maybe(numbers)
        )
    ),
    maybe(st.builds(Scaling, st.dictionaries(st.integers(-(10**17), 10**17), numbers, max_size=4), numbers)),
    maybe(st.builds(Usage, wholes, numbers, tuples(numbers), tuples(numbers), wholes, st.booleans())),
)
resizes = st.integers(1, 5).flatmap(
    lambda world_size: st.builds(
        Resize,
        st.integers(1, 10**6),
        st.just(world_size),
        st.lists(st.integers(1, 9), unique=True, max_size=world_size - 1).map(lambda rest: (0, *rest)),
        st.booleans(),
        seats,
        maybe(texts),
    )
)
requests = st.builds(
    Request,
    st.lists(st.text(max_size=9), min_size=3, max_size=4).map(tuple),
    st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4),
    st.text(max_size=9),
    maybe(tuples(wholes)),
    tuples(st.text(max_size=9)),
    st.booleans(),
)
ordered = st.one_of(
    st.builds(Suspend, st.booleans()), resizes, st.builds(Forget, wholes), st.builds(Pace, st.floats(0, 1))
)


@pytest.mark.long
@given(states | words | lines | requests)
def test_what_a_program_says_is_heard_as_it_was(message: Any) -> None:
    assert type(message).decode(message.encode()) == message


@given(st.lists(ordered, max_size=4, unique_by=type))
def test_orders_arrive_as_they_were_given(given_: list[orders.Order]) -> None:
    line = orders.encode(*given_)
    assert line.endswith(b"\n") and b"\n" not in line[:-1]
    assert orders.decode(line) == given_


@given(st.builds(Pace, st.floats(0, 1)))
def test_a_pace_passes_through_a_variable(pace: Pace) -> None:
    assert Pace.decode(pace.encode()) == pace


@given(maybe(wholes))
def test_an_answer_arrives_as_it_was_given(pid: int | None) -> None:
    assert decode_answer(encode_answer(pid)) == pid
    assert decode_answer(b"") is None


@given(seats)
def test_seats_pass_through_json(some: tuple[Seat, ...]) -> None:
    assert of_table(json.loads(json.dumps(to_table(some)))) == some


# -- what others may send --------------------------------------------------------------------------------

DOORS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "state": (State.decode, State(3, 4, "/c", 1, {"a": 0.5}, 0.1).encode()),
    "ready": (Ready.decode, Ready(in_place=True, parallel=True, step=3, stopped_s=0.5).encode()),
    "held": (Held.decode, Held(3, 4).encode()),
    "unusable": (Unusable.decode, Unusable(1, "w", "/t", ("LD_PRELOAD",)).encode()),
    "versions": (Versions.decode, Versions("3.11.9", {"torch": "2.4.1+cu121"}).encode()),
    "stop": (Stop.decode, Stop("SIGTSTP").encode()),
    "line": (
        Line.decode,
        Line(
            3,
            1.7e9,
            0.5,
            Batching(64, 16, (2, 2), (1, 1), 0.5, 0.1),
            Scaling({1: 2.0}, 64.0),
            Usage(1, 2.0, (1.0,), (0.5,), 5),
        ).encode(),
    ),
    "orders": (
        orders.decode,
        orders.encode(
            Suspend(quick=True),
            Resize(4, 3, (0, 1), True, (Seat(True, 0.5, "h", (1,)),), "127.0.0.1:4711"),
            Forget(4),
            Pace(0.25),
        ),
    ),
    "request": (
        Request.decode,
        Request(("python", "-m", "x"), {"A": "\udce8"}, "/", (0, 1), ("B",), True).encode(),
    ),
    "answer": (decode_answer, encode_answer(4711)),
    "pace": (lambda data: Pace.decode(data.decode(errors="surrogateescape")), b"0.25"),
}

NASTY = [
    *(b"\xe8", b"\xff\xfe\x00", b"1e400", b"-1e308", b"9" * 30, b"9" * 5000, b"null", b"true", b"NaN", b"-1"),
    *(b'"\\ud800"', b'"\\u0000\\u001b"', b"\0" * 64, b"{}", b"[]", b"", b"-Infinity", b"0x1", b"1.5", b'"1"'),
    *(b"[" * 20_000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 90 + b"]" * 90),
    *(b'{"1":1e999}', b'{"-":1}', b'{"\\ud800":1}', b"[null]", b"[[1]]", b"\xef\xbb\xbf{}", b"\r\n{}\r\n"),
]


def mutated(sample: bytes, rng: random.Random) -> bytes:
    data = bytearray(sample)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(5)
        if what == 0:
            data[at:at] = rng.choice(NASTY)
        elif what == 1:
            del data[at : at + rng.randint(1, 9)]
        elif what == 2 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 3:
            values = list(re.finditer(rb'(?<=[:,\[])\s*("[^"]*"|[-0-9.e]+|true|\[[^]]*\])', bytes(data)))
            if values:
                found = rng.choice(values)
                data[found.start() : found.end()] = rng.choice(NASTY)
        else:
            return rng.choice(NASTY)
    return bytes(data)


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_message_is_bad_input_in_one_printable_line(door: str) -> None:
    decode, sample = DOORS[door]
    decode(sample)
    rng, told = random.Random(door), set()
    for _ in range(examples(1000)):
        data = mutated(sample, rng)
        try:
            decode(data)
        except BadInput as error:
            told.add(str(error))
    assert len(told) > 5
    assert all(text.isprintable() and len(text) < 320 for text in told)


@given(st.binary(max_size=200), st.sampled_from(sorted(DOORS)))
def test_any_bytes_are_a_message_or_bad_input(data: bytes, door: str) -> None:
    try:
        DOORS[door][0](data)
    except BadInput as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("door", sorted(DOORS.keys() - {"pace", "answer"}))
def test_what_is_not_known_is_passed_over(door: str) -> None:
    """A newer minor version may say more."""
    decode, sample = DOORS[door]
    more = {**json.loads(sample), "since_1_1": [{"a": None}]}
    assert decode(json.dumps(more).encode()) == decode(sample)


@pytest.mark.parametrize(
    ("decode", "data", "why"),
    [
        (State.decode, b"{}", "step is missing"),
        (State.decode, b'{"step": null}', "step is null"),
        (State.decode, b'{"step": -1}', "step -1, not one of 0 to 9007199254740992"),
        (State.decode, b'{"step": true}', "step: a whole number is expected, not true"),
        (State.decode, b'{"step": 1, "metrics": {"a": NaN}}', "NaN is no number of JSON"),
        (State.decode, b"[1]", "an object is expected, not a list"),
        (State.decode, b" " * (2**20 + 1), "longer than 1048576 bytes"),
        (Line.decode, b"\xff", "not UTF-8 text: byte 0xff"),
        (Line.decode, b'{"step": 1, "t": 1e400}', "t: a finite number is expected, not the number inf"),
        (Line.decode, b'{"step": 1, "t": 1, "loss": "low"}', "loss: a finite number is expected, not text"),
        (orders.decode, b'{"pace": 1.5}', "pace 1.5, not a share of the time, 0 to 1"),
        (
            orders.decode,
            b'{"resize": {"attempt": 2, "world_size": 2, "keep": [1], "one_host": true}}',
            "keep: ",
        ),
        (Ready.decode, b"[" * 65 + b"]" * 65, "more than 64 tables and lists within each other"),
    ],
)
def test_it_is_said_what_is_wrong(decode: Callable[[bytes], Any], data: bytes, why: str) -> None:
    with pytest.raises(BadInput) as raised:
        decode(data)
    assert str(raised.value).startswith(why)


def test_an_empty_ready_file_says_that_it_is_there() -> None:
    assert Ready.decode(b"") == Ready.decode(b"\n") == Ready()


def test_a_record_has_null_for_what_is_not_finite() -> None:
    state = State(1, metrics={"a": float("nan"), "b": 1.0}, loss=float("inf"))
    assert State.decode(state.encode()) == State(1, metrics={"a": None, "b": 1.0})
