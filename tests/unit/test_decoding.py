"""What comes from outside: one exception for all that can be wrong with it; nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from budget import examples

import hpcsched
from hpcsched import trust
from hpcsched.agent.attempts import WatchedAttempt, read_ready, read_record
from hpcsched.agent.inbox import Command, Inbox
from hpcsched.agent.progress import ProgressMeter
from hpcsched.contract.codec import is_deeper
from hpcsched.contract.progress import Line
from hpcsched.contract.state import State
from hpcsched.contract.words import Held, Ready
from hpcsched.decoding import decode, read_file
from hpcsched.errors import BadInput, ConfigError, HpcschedError
from hpcsched.launch.remote import protocol
from hpcsched.printing import printable
from hpcsched.store.batches import read_batches
from hpcsched.store.rundir import RunDir, last_status
from hpcsched.store.status import read_page, read_status
from hpcsched.store.summaries import my_runs

INPUTS = examples(1000)
"""To each door."""

NASTY = [
    b"\xe8",
    b"\xff\xfe\x00",
    b"1e400",
    b"-1e308",
    b"9" * 30,
    b"9" * 5000,
    b"null",
    b'"\\ud800"',
    b'"\\u0000\\u001b"',
    b"[" * 2000,
    b"[" * 20_000,
    b"[" * 3000 + b"]" * 3000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b"\0" * 64,
    b"NaN",
    b"-1",
    b"{}",
    b"[]",
    b"",
]

SAMPLES: dict[Any, bytes] = {
    State: b'{"step":12,"samples":64,"checkpoint":"/c","attempt":1,"metrics":{"loss":0.5}}',
    Ready: b'{"in_place":true,"step":3,"stopped_s":0.1}',
    Held: b'{"step":3,"samples":5}',
    Line: b'{"step":3,"t":1.7e9,"loss":0.5,"scaling":{"rates":{"1":2.5},"batch":64.0},'
    b'"usage":{"attempt":1,"rate":2.0,"cpu":[1.0],"net":[0.5],"samples":5}}',
    Command: b'{"command":"submit","jobs":[{"name":"a","kind":"command","model":"m","command":["true"],'
    b'"strategy":{"kind":"ddp"},"args":{"x":[1,2]}}],"targets":[1]}',
}


def mutated(sample: bytes, rng: random.Random) -> bytes:
    """Something that was a good document."""
    data = bytearray(sample)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = rng.choice(NASTY)
            case 1:
                del data[at : at + rng.randint(1, 9)]
            case 2 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 3:
                if values := list(re.finditer(rb'(?<=:)("[^"]*"|[-0-9.e]+|true|\[[^]]*\])', bytes(data))):
                    found = rng.choice(values)
                    data[found.start() : found.end()] = rng.choice(NASTY)
            case _:
                return rng.choice(NASTY)
    return bytes(data)


def inputs(sample: bytes) -> list[bytes]:
    rng = random.Random(sample)
    return [mutated(sample, rng) for _ in range(INPUTS)]


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_a_document_is_as_it_should_be_or_bad_input(kind):
    told = set()
    read = getattr(kind, "decode", lambda data: decode(data, kind))
    assert read(SAMPLES[kind])
    for data in inputs(SAMPLES[kind]):
        try:
            read(data)
        except BadInput as error:
            told.add(str(error))
    assert len(told) > 10
    assert all(text.isprintable() and len(text) < 320 for text in told)


class Gone:
    """Workers that say nothing but through files."""

    ready = refused = record = held = None


def test_what_programs_write_costs_the_agent_nothing(tmp_path):
    attempt = WatchedAttempt(
        job_id=1,
        attempt=1,
        workers=Gone(),
        gpus=(0,),
        ranks=1,
        folder=tmp_path,
        output=tmp_path / "o",
        measured=True,
    )  # type: ignore[arg-type]
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    meter = ProgressMeter(reader)
    unreadable = 0
    doors = zip(inputs(SAMPLES[State]), inputs(SAMPLES[Ready]), inputs(SAMPLES[Held]), strict=True)
    for state, ready, held in doors:
        (tmp_path / "STATE.json").write_bytes(state)
        (tmp_path / "ready.1").write_bytes(ready)
        (tmp_path / "held.1").write_bytes(held)
        attempt.record()
        unreadable += bool(attempt.unreadable)
        assert isinstance(attempt.ready_report(), Ready)
        assert (attempt.held_step() or 0) >= 0
        assert isinstance(read_ready(ready), Ready)
    assert unreadable > INPUTS / 3
    for line in inputs(SAMPLES[Line]):
        os.write(writer, line[:30_000].replace(b"\n", b"") + b"\n")
        assert meter.read()
        meter.new_scaling()
        meter.new_usage(1)
    os.close(reader)
    os.close(writer)


def test_commands_are_read_or_refused(tmp_path):
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    for number, data in enumerate(inputs(SAMPLES[Command])):
        (rundir.inbox / "new" / f"{number:04}").write_bytes(data)
    found = Inbox(rundir).read()
    assert len(found) == INPUTS
    assert sum(isinstance(command, str) for _, command in found) > INPUTS / 3


def test_messages_of_hosts_are_read_or_bad_input():
    beat = protocol.Beat(1.5, (protocol.Reading(0.5, 100.0),))
    sample = msgspec.msgpack.encode((3, 2, beat))
    rng, bad = random.Random(1), 0
    deep = b"\x93\x00\x00" + b"\x91" * 100_000
    for data in [deep, *(mutated(sample, rng) for _ in range(INPUTS))]:
        for read in (protocol.read_to_head, protocol.read_to_node):
            try:
                read(data)
            except BadInput:
                bad += 1
    assert bad > INPUTS


def test_a_damaged_status_is_told_and_breaks_no_other_run(tmp_path):
    page = (
        b'{"run":{"dir":"/x","state":"RUNNING","stale":false,"seq":1,"written_at":"2026-01-01T00:00:00Z","policy":"m",'
        b'"agent":{"host":"h","pid":1},"allocation":{},"clock_s":1.0,"speed":1.0,"lost_gpus":{}},"gpus":[],"jobs":[]}'
    )
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    runs = tmp_path / "hpcsched" / "runs"
    runs.mkdir(parents=True)
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    (runs / "a.json").write_bytes(msgspec.json.encode({"id": "a", "dir": str(rundir.root), "at": 1.0}))
    (runs / "b.json").write_bytes(b'{"id":"\xe8"}')
    (runs / "c.json").mkdir()
    odd = [page.replace(b"2026-01-01T00:00:00Z", when) for when in (b"soon", b"0001-01-01", b"\xe8")]
    for data in [*odd, *inputs(page)[:300]]:
        rundir.status.write_bytes(data)
        for read in (read_status, read_page):
            with contextlib.suppress(HpcschedError):
                read(rundir)
        last_status(rundir)
        assert [line.id for line in my_runs(environ)] == ["a"]


def test_lines_of_batches_are_passed_over(tmp_path):
    path = tmp_path / "batches.jsonl"
    path.write_bytes(b"\n".join(NASTY))
    assert read_batches(path) == []


def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "STATE.json")
    with pytest.raises(BadInput, match="no file"):
        read_record(tmp_path)
    with pytest.raises(BadInput, match="longer than 10 bytes"):
        (tmp_path / "long").write_bytes(b"x" * 11)
        read_file(tmp_path / "long", most_bytes=10)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_folder_in_place_of_a_file_costs_no_descriptor(tmp_path):
    before = descriptors()
    for _ in range(5):
        with pytest.raises(BadInput, match="no file"):
            read_file(tmp_path)
        with pytest.raises(ConfigError, match="not a regular file"):
            trust.read(tmp_path)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("data", "depth"),
    [
        (b"[]", 1),
        (b'{"a":[{"b":[]}]}', 4),
        (b'["[[[[", "\\"[[["]', 1),
        (b"[" * 70 + b"]" * 70, 70),
        (b'{"a":[' * 20 + b"1" + b"]}" * 20, 40),
        (b"[" + b"[]," * 500 + b"[]]", 2),
        (b'["\\\\",[["\\""]]]', 3),
    ],
)
def test_depth_is_counted_outside_of_texts(data, depth):
    assert [is_deeper(data, most) for most in (depth - 1, depth, depth + 1)] == [True, False, False]


def test_nothing_of_others_reaches_a_terminal_as_an_order():
    assert printable("a\x1b]0;x\x07\u202eb\udce9\n\t") == r"a\x1b]0;x\x07\u202eb\udce9\n\t"
    assert printable("a\n\tb\r", lines=True) == "a\n\tb\\x0d"


def test_bytes_of_others_are_decoded_in_one_place():
    """The worker's own pipes and shared memory are between processes of one job."""
    root = Path(hpcsched.__file__).parent
    allowed = {"decoding.py"}
    bare = re.compile(r"msgspec\.(json|msgpack)\.(decode\(|Decoder\()")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if bare.search(path.read_text()) and "worker" not in path.parts
    }
    # Their decoders are handed to `decode_message`.
    assert found - allowed == {"launch/remote/protocol.py", "store/checkpoint.py"}
