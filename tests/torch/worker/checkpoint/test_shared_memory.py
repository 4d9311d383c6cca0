"""State in shared memory: comes back as it was, and the newest whole one survives everything."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.errors import StoreError  # noqa: E402
from hpcsched.worker.checkpoint import layout  # noqa: E402
from hpcsched.worker.checkpoint import shared_memory as module  # noqa: E402
from hpcsched.worker.checkpoint.files import CheckpointStore  # noqa: E402
from hpcsched.worker.checkpoint.load import load_checkpoint  # noqa: E402
from hpcsched.worker.checkpoint.shared_memory import Arena, Held  # noqa: E402
from hpcsched.worker.process import memory  # noqa: E402
from hpcsched.worker.process.storable import storable  # noqa: E402
from hpcsched.worker.session.sampler import Sampler  # noqa: E402
from hpcsched.worker.session.session import Session  # noqa: E402

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64),
]
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda t: t,
    "turned": lambda t: t.permute(tuple(reversed(range(t.ndim)))),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t,
    "with gaps": lambda t: t[::2] if t.ndim else t,
    "repeated": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "with an offset": lambda t: t[1:] if t.ndim and len(t) else t,
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
}


@contextlib.contextmanager
def opened() -> Iterator[tuple[int, Arena]]:
    """A launcher's descriptor, and an arena that a rank has made of it."""
    descriptor = os.memfd_create("arena")
    arena = Arena.open(descriptor)
    assert arena is not None
    try:
        yield descriptor, arena
    finally:
        arena.close()
        os.close(descriptor)


def state(step: int, size: int = 1000) -> dict[str, Any]:
    return {"step": step, "samples": 10 * step, "model": {"w": torch.full((size,), float(step))}}


def numbers(tensor: Any) -> Any:
    """Its bytes, in the order of its elements."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(loaded: Any, saved: Any, *, dense: bool = True) -> None:
    if isinstance(saved, torch.Tensor):
        assert (loaded.dtype, loaded.shape) == (saved.dtype, saved.shape)
        assert torch.equal(numbers(loaded), numbers(saved))
        if dense:
            assert loaded.untyped_storage().nbytes() == saved.numel() * saved.element_size()
        assert torch.empty_like(loaded).stride() == torch.empty_like(saved).stride()  # in the same order
    elif isinstance(saved, dict):
        assert type(loaded) is type(saved)
        assert list(loaded) == list(saved)
        for key in saved:
            assert_same(loaded[key], saved[key], dense=dense)
    elif isinstance(saved, (list, tuple)):
        assert type(loaded) is type(saved)
        assert len(loaded) == len(saved)
        for one, other in zip(loaded, saved, strict=True):
            assert_same(one, other, dense=dense)
    else:
        assert loaded == saved
        assert type(loaded) is type(saved)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    count = torch.Size(shape).numel()
    values = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](torch.tensor(values).to(dtype).reshape(shape))


plain = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    *(st.complex_numbers(allow_nan=False), st.sampled_from(DTYPES), st.just(torch.device("cpu"))),
)
nested = st.recursive(
    plain | tensors(),
    lambda part: st.one_of(
        st.lists(part, max_size=4),
        st.lists(part, max_size=4).map(tuple),
        st.dictionaries(st.text() | st.integers(), part, max_size=4),
        st.dictionaries(st.text(), part, max_size=4).map(OrderedDict),
        st.lists(part, min_size=1, max_size=1).map(lambda parts: [*parts, *parts]),
    ),
    max_leaves=12,
)


@settings(max_examples=examples(150))
@given(states=st.lists(st.dictionaries(st.text(), nested, max_size=4), min_size=1, max_size=4))
def test_any_state_comes_back(states: list[dict[str, Any]]) -> None:
    with opened() as (descriptor, writer), opened_again(descriptor) as reader:
        former = None
        for step, parts in enumerate(states, start=1):
            saved = {**parts, "step": step, "samples": 7 * step}
            assert writer.save(saved) == step
            assert reader.newest() == Held(step, 7 * step, step)
            assert_same(reader.load(), storable(saved))
            with reader.keeping() as viewed:
                assert_same(viewed, storable(saved))
            # Into tensors that are there, which may be alike or not, and share memory otherwise.
            for own in (saved, former):
                into = copy.deepcopy(own)
                assert_same(reader.load(into=into), storable(saved), dense=False)
            if former is not None:
                assert_same(reader.load(step - 1), storable(former))
            former = saved


def test_a_state_is_loaded_into_the_tensors_that_are_there() -> None:
    flat = torch.zeros(8)
    saved = {
        "like": torch.arange(4.0),
        "wider": torch.arange(6.0),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "new": torch.arange(2.0),
        "parts": [torch.full((4,), 1.0), torch.full((4,), 2.0)],
    }
    own = {
        "like": torch.zeros(4),
        "wider": torch.zeros(4),
        "turned": torch.zeros(3, 2),
        "gone": torch.zeros(2),
        "parts": [flat[:4], flat[:4]],  # one memory here, two there
    }
    with opened() as (_, arena):
        arena.save({**state(1), **saved})
        loaded = arena.load(into=own)
    assert_same({key: loaded[key] for key in saved}, saved, dense=False)
    same = {key: loaded[key] is own.get(key) for key in ("like", "wider", "turned", "new")}
    assert same == {"like": True, "wider": False, "turned": False, "new": False}
    assert [part is mine for part, mine in zip(loaded["parts"], own["parts"], strict=True)] == [True, False]
    assert own["gone"].tolist() == [0, 0]


@contextlib.contextmanager
def opened_again(descriptor: int) -> Iterator[Arena]:
    arena = Arena.open(descriptor)
    assert arena is not None
    yield arena
    arena.close()


def test_a_tensor_whose_bytes_are_not_its_numbers_is_none_to_copy_to() -> None:
    saved = state(1) | {"model": {"conj": torch.randn(9, dtype=torch.complex64), "neg": torch.randn(9)}}
    own = {"conj": torch.zeros(9, dtype=torch.complex64).conj(), "neg": torch._neg_view(torch.zeros(9))}
    with opened() as (_, arena):
        arena.save(saved)
        assert_same(arena.load(into={"model": own}), saved)


def test_a_real_training_comes_back_with_its_ties() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = {"step": 3, "samples": 30, "counts": Counter({4: 2}), **parts}
    with opened() as (_, arena):
        arena.save(saved)
        loaded = arena.load()
        with arena.keeping() as viewed:
            for one in (loaded, viewed):
                assert one["model"]["0.weight"].data_ptr() == one["model"]["2.weight"].data_ptr()
    assert_same(loaded, saved)
    assert loaded["model"]._metadata == model.state_dict()._metadata


def test_what_was_one_tensor_is_one_only_where_it_was_one_before() -> None:
    weight = torch.arange(4.0)
    tied, apart = torch.zeros(4), {"a": torch.zeros(4), "b": torch.zeros(4)}
    with opened() as (_, arena):
        arena.save({**state(1), "model": {"a": weight, "b": weight}, "extra": {"best": weight}})
        together = arena.load(into={"model": {"a": tied, "b": tied.detach()}})
        separate = arena.load(into={"model": apart})
    addresses = {together["model"][name].data_ptr() for name in "ab"}
    assert addresses == {tied.data_ptr()}
    assert together["extra"]["best"].data_ptr() != tied.data_ptr()  # goes its own way from here on
    assert all(separate["model"][name] is apart[name] for name in "ab")
    for one in (tied, *apart.values(), together["extra"]["best"]):
        assert one.tolist() == weight.tolist()


def test_a_resumed_training_changes_its_own_tensors_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning rate that is a tensor belongs to the user, who computes later ones from it."""

    def training(rate: Any) -> tuple[Any, Any]:
        model = torch.nn.Linear(3, 1)
        return model, torch.optim.Adam(model.parameters(), lr=rate)

    saved, optimizer = training(torch.tensor(0.05))
    saved(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    base = torch.tensor(0.1)
    resumed, going_on = training(base)
    addresses = [parameter.data_ptr() for parameter in resumed.parameters()]
    with opened() as (descriptor, arena):
        parts = {"model": saved.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": None}
        rest = {"sampler": Sampler(8, 0).state(12), "rng": [], "shards": None, "extra": {}}
        arena.save({"schema": 1, "step": 3, "samples": 12, **parts, **rest})
        places = {"JOB_DIR": tmp_path, "CHECKPOINT_DIR": tmp_path / "checkpoint", "ARENA_FD": descriptor}
        for name, value in {"JOB_ID": 1, "ATTEMPT": 2, "RANK": 0, "RESUME": 1, **places}.items():
            monkeypatch.setenv(f"HPCSCHED_{name}", str(value))
        session = Session(model=resumed, optimizer=going_on, dataset_size=8, global_batch=4, total_steps=3)
        session.finish()
    assert (session.step, session.resumed) == (3, True)
    assert_same(resumed.state_dict(), saved.state_dict())
    assert_same(going_on.state_dict(), optimizer.state_dict())
    assert [parameter.data_ptr() for parameter in resumed.parameters()] == addresses
    assert float(base) == float(torch.tensor(0.1))


def test_a_tied_tensor_takes_room_once() -> None:
    weight = torch.ones(1 << 20)
    with opened() as (descriptor, arena):
        arena.save({**state(1), "model": {"a": weight, "b": weight.view_as(weight), "c": weight}})
        assert os.fstat(descriptor).st_blocks * 512 < 3 * weight.numel() * 4


def test_an_optimizer_that_goes_on_cannot_write_into_the_arena() -> None:
    """torch's optimizers keep the tensors they load."""

    def training() -> tuple[Any, Any]:
        weight = torch.nn.Parameter(torch.ones(8))
        return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def train(weight: Any, optimizer: Any) -> None:
        weight.square().sum().backward()
        optimizer.step()

    weight, optimizer = training()
    train(weight, optimizer)
    with opened() as (_, arena):
        arena.save({**state(1), "optimizer": optimizer.state_dict()})
        before = arena.load()
        other, going_on = training()
        loaded = arena.load()
        going_on.load_state_dict(loaded["optimizer"])
        for _ in range(3):
            train(other, going_on)
        assert_same(arena.load(), before)


def test_later_saves_do_not_reach_what_a_module_has_kept() -> None:
    class Keeping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(4)

        def get_extra_state(self) -> Any:
            return self.kept

        def set_extra_state(self, state: Any) -> None:
            self.kept = state

    saved = Keeping()
    with opened() as (_, arena):
        for value in (1.0, 2.0, 3.0):
            saved.kept.fill_(value)
            arena.save({**state(1), "model": saved.state_dict()})
            if value == 1.0:
                resumed = Keeping()
                resumed.load_state_dict(arena.load()["model"])
        assert resumed.kept.tolist() == [1.0] * 4


def test_saving_a_view_to_a_file_saves_nothing_else(tmp_path: Path) -> None:
    with opened() as (_, arena):
        arena.save({**state(5), "other": torch.zeros(1 << 20)})
        with arena.keeping() as viewed:
            path = CheckpointStore(tmp_path).save({key: viewed[key] for key in ("step", "samples", "model")})
    assert path.stat().st_size < 20_000
    assert torch.equal(load_checkpoint(path)["model"]["w"], state(5)["model"]["w"])


@pytest.mark.parametrize("what", [torch.eye(2).to_sparse(), object(), lambda: None])
def test_what_it_cannot_hold_is_refused_and_nothing_is_lost(what: Any) -> None:
    with opened() as (_, arena):
        arena.save(state(1))
        assert not arena.reserve({**state(2), "extra": what})
        with pytest.raises(StoreError):
            arena.save({**state(2), "extra": what})
        assert_same(arena.load(), state(1))


@pytest.mark.parametrize("size", [0, 100])
def test_an_arena_without_a_state_says_so(size: int) -> None:
    with opened() as (descriptor, arena):
        os.truncate(descriptor, size)
        assert arena.newest() is None
        with pytest.raises(StoreError, match="no good state"):
            arena.load()


def test_no_arena_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert Arena.open(None) is None
    assert capsys.readouterr().err == ""
    assert Arena.open(99_999) is None
    assert "descriptor 99999" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [0, 1])
def test_where_no_thread_is_to_be_had_it_saves_and_loads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the limit of processes is reached."""
    left = [threads]

    def start(self: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        usual(self)

    usual = threading.Thread.start
    saved = state(1, size=3 * layout.PIECE)  # some pieces
    with opened() as (_, arena):
        monkeypatch.setattr(threading.Thread, "start", start)
        arena.save(saved)
        left[0] = threads
        assert_same(arena.load(), saved)


def test_a_thread_that_outlives_the_programs_main_part_can_save() -> None:
    program = (
        "import os, threading, torch\n"
        "from hpcsched.worker.checkpoint.shared_memory import Arena\n"
        "arena = Arena.open(os.memfd_create('arena'))\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    print(arena.save({'step': 1, 'samples': 2, 'w': torch.ones(9)}))\n"
        "threading.Thread(target=work).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"1\n", done.stderr


def test_room_is_made_once_and_grows_under_what_is_held() -> None:
    def blocks() -> int:
        return os.fstat(descriptor).st_blocks

    with opened() as (descriptor, arena), opened_again(descriptor) as reader:
        assert arena.reserve(state(1))
        room = blocks()
        assert arena.reserve(state(1))
        for step in (1, 2, 3):
            arena.save(state(step))
        assert blocks() <= room + 8  # the head
        with reader.keeping() as viewed:
            assert arena.reserve(state(4, size=1 << 20))
            assert_same(viewed, state(3))
        assert_same(arena.load(), state(3))
        assert_same(arena.load(2), state(2))
        grown = blocks()
        assert grown * 512 > 2 * (4 << 20)
        arena.save(state(4, size=1 << 20))
        assert blocks() == grown
        assert_same(reader.load(), state(4, size=1 << 20))


@pytest.mark.parametrize("fails_at", [1, 2])
def test_without_memory_nothing_is_saved_and_nothing_is_taken(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    allocate, calls = os.posix_fallocate, []

    def full(descriptor: int, offset: int, size: int) -> None:
        calls.append(offset)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, size)

    with opened() as (descriptor, arena):
        arena.save(state(1))
        before = os.fstat(descriptor)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="not enough memory"):
            arena.save(state(2, size=1 << 20))
        after = os.fstat(descriptor)
        assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        monkeypatch.setattr(module, "available", lambda: 4 << 20)
        with pytest.raises(StoreError, match="not enough memory"):
            arena.save(state(2, size=1 << 20))
        arena.save(state(2))  # small enough for the room there is
        assert_same(arena.load(), state(2))


def test_a_record_is_as_it_always_was() -> None:
    """The next attempt, or the keeper, may be of another version."""
    with opened() as (descriptor, arena):
        saved = {**state(1), "other": torch.randn(70_000), "gaps": torch.arange(9)[::2]}
        slot = arena.save(saved) % 2
        record = os.pread(descriptor, 44, 512 * (1 + slot))
        generation, step, samples, area, skeleton, checksum = struct.unpack("<QQQQQI", record)
        assert (generation, step, samples, area % 65536) == (1, 1, 10, 0)
        found = os.pread(descriptor, area + skeleton, (1 + slot) << 40)
        sums = [sum(struct.unpack("<8192q", found[at : at + 65536])) for at in range(0, area, 65536)]
        wrapped = [(number + (1 << 63)) % (1 << 64) - (1 << 63) for number in sums]
        head = zlib.crc32(found[area:], zlib.crc32(record[:40] + bytes(4)))
        assert checksum == zlib.crc32(struct.pack(f"<{len(sums)}q", *wrapped), head)


@pytest.mark.parametrize("where", ["tensor", "pickle", "record", "record's sizes"])
def test_a_damaged_state_is_passed_over(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    with opened() as (descriptor, arena):
        arena.save(state(1))
        generation = arena.save(state(2))
        slot = module._slot_offset(generation % 2)
        place = {
            "tensor": slot + 1234,
            "pickle": slot + (1 << 16) + 20,
            "record": module._record_offset(generation % 2) + 9,
            "record's sizes": module._record_offset(generation % 2) + 31,
        }[where]
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 1]), place)
        assert_same(arena.load(), state(1))
        assert capsys.readouterr().err.count("\n") == 1
        with pytest.raises(StoreError, match="no good state 2"):
            arena.load(generation)
        os.pwrite(descriptor, b"\xff", module._slot_offset(1) + 100)
        with pytest.raises(StoreError, match="no good state"):
            arena.load()


def test_no_code_in_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foul:
        def __reduce__(self) -> Any:
            return os.abort, ()

    monkeypatch.setattr(module, "storable", lambda state: state)
    with opened() as (_, arena):
        arena.save({**state(1), "extra": Foul()})
        with pytest.raises(StoreError, match=r"posix\.abort"):
            arena.load()


def test_a_job_that_starts_over_forgets() -> None:
    with opened() as (descriptor, arena):
        arena.clear()
        assert os.fstat(descriptor).st_size == 0
        for step in (1, 2, 3):
            arena.save(state(step))
        arena.clear()
        assert arena.newest() is None
        arena.save(state(1))
        assert arena.newest() == Held(1, 10, 1)
        with pytest.raises(StoreError):
            arena.load(2)


# Between processes.

KEEPER = """
import os, sys
from hpcsched.worker.checkpoint.shared_memory import Arena
arena = Arena.open(int(sys.argv[1]))
with arena.keeping() as state:
    print(state["step"], flush=True)
    sys.stdin.readline()
    print(state["model"]["w"].unique().tolist(), flush=True)
    sys.stdin.readline()
"""


def child(program: str, *arguments: str, descriptor: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(descriptor), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_a_keeper_reads_is_not_overwritten_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with opened() as (descriptor, arena):
        arena.save(state(1))
        with child(KEEPER, descriptor=descriptor) as keeper:
            assert keeper.stdin and keeper.stdout
            assert keeper.stdout.readline() == "1\n"
            arena.save(state(2))  # into the other slot
            with pytest.raises(StoreError, match="someone else"):
                arena.save(state(3))
            assert arena.newest() == Held(2, 20, 2)
            assert_same(arena.load(1), state(1))  # many may read
            keeper.stdin.write("\n")
            keeper.stdin.flush()
            assert keeper.stdout.readline() == "[1.0]\n"
            keeper.send_signal(signal.SIGKILL)
            keeper.wait()
        arena.save(state(3))
        assert_same(arena.load(), state(3))


TAKER = """
import os, sys
from hpcsched.worker.process.memory import alone_on_host
with alone_on_host(60) as alone:
    print(alone, flush=True)
    sys.stdin.readline()
"""


def test_while_another_job_takes_memory_none_is_promised_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as (descriptor, arena):
        arena.save(state(1))
        with child(TAKER, descriptor=descriptor) as taker:
            assert taker.stdout
            assert taker.stdout.readline() == "True\n"
            monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
            assert not arena.reserve(state(2, size=1 << 20))
            arena.save(state(2))  # in the room there is
            taker.send_signal(signal.SIGKILL)
            taker.wait()
        monkeypatch.setattr(module, "_PATIENCE_S", 60.0)  # tests that run beside this one take memory too
        assert arena.reserve(state(2, size=1 << 20))


def test_memory_is_looked_at_and_taken_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are shut out from the look to the last allocation, and no longer."""
    allocate, others = os.posix_fallocate, []

    def look() -> int:
        with memory.alone_on_host(0.0) as alone:
            others.append(alone)
        return 1 << 40

    def take(descriptor: int, offset: int, size: int) -> None:
        allocate(descriptor, offset, size)
        look()

    monkeypatch.setattr(module, "available", look)
    monkeypatch.setattr(os, "posix_fallocate", take)
    with opened() as (_, arena):
        assert arena.reserve(state(1))
    assert others == [False, False, False]


def test_a_process_forked_meanwhile_does_not_keep_others_from_memory() -> None:
    with memory.alone_on_host(60.0) as alone:
        assert alone
        forked = os.fork()
        if not forked:
            signal.pause()
    try:
        with memory.alone_on_host(60.0) as again:
            assert again
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


KILLS = """
import json, os, random, signal, sys, time
import torch
from hpcsched.worker.checkpoint import shared_memory as module

torch.set_num_threads(1)
descriptor = int(sys.argv[1])

def state(step, size):
    model = {f"w{i}": torch.full((size,), float(step)) for i in range(3)}
    return {"step": step, "samples": step, "model": model, "extra": [step] * (step % 7)}

def held():
    arena = module.Arena.open(descriptor)
    state = arena.load()
    arena.close()
    values = {float(v) for w in state["model"].values() for v in w.unique()}
    assert values == {float(state["step"])}, values
    assert state["extra"] == [state["step"]] * (state["step"] % 7)
    return state["step"]

def forked(work):
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)

def save(step, kill_at):
    lines = 0
    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != module.__file__:
            return None
        lines += event == "line"
        if lines == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    arena = module.Arena.open(descriptor)
    what = state(step, 3000)
    sys.settrace(trace)
    arena.save(what)

module.Arena.open(descriptor).save(state(1, 3000))
step, old, new, status = 1, 0, 0, signal.SIGKILL
while status == signal.SIGKILL:  # until it is through before its line comes
    _, status = os.waitpid(forked(lambda: save(step + 1, old + new + 1)), 0)
    found = held()
    assert found in (step, step + 1)
    old, new = old + (found == step), new + (found != step)
    step = found

def save_on():
    arena = module.Arena.open(descriptor)
    for number in range(step + 1, step + 10**6):
        arena.save(state(number, 200_000))
        os.write(write, b".")

moments = 0
for _ in range(30):
    read, write = os.pipe()
    pid = forked(save_on)
    os.close(write)
    told = len(os.read(read, 1))
    time.sleep(random.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while data := os.read(read, 65536):
        told += len(data)
    os.close(read)
    found = held()
    assert step + told <= found <= step + told + 1, (step, told, found)
    step, moments = found, moments + 1
print(json.dumps({"old": old, "new": new, "moments": moments}))
"""


def test_a_writer_killed_anywhere_leaves_the_former_state_or_the_new_one() -> None:
    """At every line of a save, and at 30 moments inside of copies."""
    descriptor = os.memfd_create("arena")
    with child(KILLS, descriptor=descriptor) as kills:
        assert kills.stdout
        counts = json.loads(kills.stdout.read())
    os.close(descriptor)
    assert counts["old"] > 30
    assert counts["new"] > 0
    assert counts["moments"] == 30


# How much memory there is.


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     700 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_half_of_what_is_available_stays_for_others() -> None:
    assert memory.admits(50, 100)
    assert not memory.admits(51, 100)


def test_the_host_has_the_say_where_no_group_limits_us(tmp_path: Path) -> None:
    assert memory.available(host(tmp_path, {})) == 700 * 1024
    assert memory.available(tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    ("line", "prefix", "limit", "usage", "cache", "unlimited"),
    [
        ("0::/job/step", "", "memory.max", "memory.current", "inactive_file", "max"),
        (
            *("4:cpu,memory:/job/step", "memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            *("total_inactive_file", "9223372036854771712"),
        ),
    ],
)
def test_the_tightest_group_around_us_has_the_say(
    tmp_path: Path, line: str, prefix: str, limit: str, usage: str, cache: str, unlimited: str
) -> None:
    root = f"sys/fs/cgroup/{prefix}"
    files = {
        "proc/self/cgroup": f"9:pids:/elsewhere\n{line}\n",
        f"{root}job/step/{limit}": f"{unlimited}\n",
        f"{root}job/step/{usage}": "2000\n",
        f"{root}job/{limit}": "10000\n",
        f"{root}job/{usage}": "3000\n",
        f"{root}job/memory.stat": f"anon 1000\n{cache} 500\nactive_file 700\n",
    }
    assert memory.available(host(tmp_path, files)) == 10000 - 3000 + 500
    assert memory.available(host(tmp_path, {f"{root}job/{usage}": "20000\n"})) == 0


def test_this_host_has_some_memory() -> None:
    assert memory.available() > 0
