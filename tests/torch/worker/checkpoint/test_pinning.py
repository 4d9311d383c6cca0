"""Copies between a GPU and shared memory keep the rules of CUDA, for which there is a stand-in here."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cudarules import GPU, RuledCuda

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.errors import StoreError  # noqa: E402
from hpcsched.worker.checkpoint import layout, pinning, saving  # noqa: E402
from hpcsched.worker.checkpoint import shared_memory as module  # noqa: E402
from hpcsched.worker.checkpoint.pinning import Cuda  # noqa: E402
from hpcsched.worker.checkpoint.shared_memory import Arena  # noqa: E402
from hpcsched.worker.process.contract import JobEnv  # noqa: E402
from hpcsched.worker.session.state import TrainingState  # noqa: E402

PIECE = 1 << 16
AT_ONCE = 2 * PIECE
_DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PIECE", PIECE)
    monkeypatch.setattr(pinning, "PINNED_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(module, "PINNED_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(module, "_SLACK", 0)


@contextlib.contextmanager
def opened(cuda: RuledCuda) -> Iterator[Arena]:
    descriptor = os.memfd_create("arena")
    arena = Arena.open(descriptor, cuda)
    assert arena is not None
    yield arena
    arena.close()
    os.close(descriptor)


def state(cuda: RuledCuda, step: int = 1, size: int = 5 * PIECE // 4 + 7) -> dict[str, Any]:
    """Two tensors on the GPU and one beside them; none ends where a piece does."""
    model = {name: cuda.marked(torch.randn(size)) for name in ("a", "b")}
    return {"step": step, "samples": 10 * step, "model": {**model, "here": torch.arange(9.0)}}


def assert_holds(arena: Arena, saved: dict[str, Any]) -> None:
    with arena.keeping() as found:
        assert found["step"] == saved["step"]
        for name, tensor in saved["model"].items():
            assert torch.equal(found["model"][name], tensor), name


def in_a_thread(work: Any) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    assert not thread.is_alive()


def until(condition: Any) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# The rules that the stand-in has.


def test_the_stand_in_has_cudas_rules() -> None:
    cuda = RuledCuda(refuse_after=1)
    pinned, other = torch.zeros(8), torch.ones(8)
    assert cuda.host_register(pinned.data_ptr(), 32) == 0
    assert cuda.host_register(pinned.data_ptr(), 32) != 0
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        cuda.launch()
    cuda.launch()  # once
    source = cuda.marked(torch.ones(8))
    cuda.copy(pinned, source)
    event = cuda.event(source.device)
    assert pinned.sum() == 0  # not there yet
    event.synchronize()
    assert pinned.sum() == 8
    cuda.copy(other, source * 0)
    cuda.registered[other.data_ptr()] = 16
    with pytest.raises(RuntimeError, match="invalid argument"):
        cuda.copy(other, source)


# Pinning.


def test_a_save_pins_nothing() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        saved = state(cuda)
        arena.save(saved)
        assert not cuda.registered
        assert_holds(arena, saved)


@pytest.mark.parametrize("succeed", [0, 1])
def test_a_failed_registration_leaves_no_error(succeed: int) -> None:
    cuda = RuledCuda(refuse_after=succeed)
    with opened(cuda) as arena:
        saved = state(cuda)
        assert arena.reserve(saved)
        cuda.launch()  # the training's next step, if it were this thread's
        assert len(cuda.registered) == succeed
        arena.save(saved)  # from pinned memory into memory that is not
        assert_holds(arena, saved)
        cuda.launch()


def test_the_slot_that_is_saved_to_next_is_pinned() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        for step in (1, 2):
            saved = state(cuda, step)
            assert arena.reserve(saved)
            pinned = sum(cuda.registered.values())
            assert pinned == step * arena._head()[1]  # the first stays so
            cuda.most_queued = 0
            arena.save(saved)
            assert cuda.most_queued > 1
            assert_holds(arena, saved)
        assert arena.reserve(saved)
        assert sum(cuda.registered.values()) == pinned
    assert not cuda.registered


def test_states_on_the_cpu_are_not_pinned() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        assert arena.reserve({"step": 1, "samples": 1, "model": torch.zeros(PIECE)})
    assert not cuda.contexts


def test_a_thread_that_pins_touches_no_other_gpu() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        in_a_thread(lambda: arena.reserve(state(cuda)))
        assert cuda.contexts == {GPU}


def test_threads_that_copy_touch_no_other_gpu() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        saved = state(cuda)
        arena.save(saved)
        assert cuda.contexts == {GPU}
        cuda.contexts.clear()
        arena.load(into={"model": {"a": cuda.marked(torch.zeros_like(saved["model"]["a"]))}})
        assert cuda.contexts == {GPU}


def test_pinning_does_not_spoil_a_graph_that_is_captured_meanwhile() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        with cuda.capturing():
            in_a_thread(lambda: arena.reserve(state(cuda)))
        assert cuda.registered and not cuda.spoilt
        assert cuda.exchange_capture_mode(0) == 0


def test_who_saves_comes_before_who_pins() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        saved = state(cuda)
        saver = threading.Thread(target=arena.save, args=(saved,), daemon=True)

        def save_meanwhile() -> None:
            saver.start()
            until(lambda: arena._saves)

        cuda.on_register = save_meanwhile
        assert arena.reserve(saved)  # two pieces are to be pinned
        assert list(cuda.registered.values()) == [AT_ONCE]
        saver.join(_DEADLINE_S)
        assert_holds(arena, saved)


def test_who_saves_comes_before_who_looks_at_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(RuledCuda()) as arena:
        saved = {"step": 1, "samples": 1, "model": {"w": torch.randn(20 * PIECE)}}
        saver = threading.Thread(target=arena.save, args=(saved,), daemon=True)
        here, memory, looks = threading.get_ident(), arena._memory, []

        def look(slot: int, size: int) -> Any:
            if threading.get_ident() == here:
                looks.append(slot)
                if len(looks) == 1:
                    saver.start()
                    until(lambda: arena._saves)
            return memory(slot, size)

        monkeypatch.setattr(arena, "_memory", look)
        assert arena.reserve(saved)
        assert len(looks) == 1  # of about twenty
        saver.join(_DEADLINE_S)
        monkeypatch.undo()
        assert_holds(arena, saved)


def test_memory_that_moves_is_pinned_anew() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        assert arena.reserve(state(cuda))
        larger = state(cuda, size=20 * PIECE)
        assert arena.reserve(larger)
        assert sum(cuda.registered.values()) == arena._head()[1] > 20 * PIECE
        assert layout.bytes_of(arena._memory(1, 1)).data_ptr() in cuda.registered
        arena.save(larger)
        assert_holds(arena, larger)


# Saving and loading.


def test_a_piece_is_summed_when_it_has_arrived() -> None:
    """What is summed earlier has the wrong checksum, and is not found by who reads."""
    cuda = RuledCuda()
    with opened(cuda) as arena:
        for step in (1, 2, 3):
            saved = state(cuda, step)
            arena.reserve(saved)
            arena.save(saved)
            assert not cuda.queue
            assert_holds(arena, saved)


def test_a_step_on_another_stream_is_saved_too() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        saved = state(cuda)
        cuda.on_other_streams.append(lambda: saved["model"]["a"].fill_(7.0))
        arena.save(saved)
        with arena.keeping() as found:
            assert found["model"]["a"].unique().tolist() == [7.0]


def test_that_it_is_held_is_said_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = RuledCuda()
    descriptor = os.memfd_create("arena")
    names = {"JOB_ID": 1, "ATTEMPT": 3, "RANK": 0, "JOB_DIR": tmp_path, "CHECKPOINT_DIR": tmp_path / "c"}
    env = JobEnv.from_environ({f"HPCSCHED_{name}": str(value) for name, value in names.items()})
    saves = saving.Saves(env, None)
    saves.arena = Arena.open(descriptor, cuda)
    assert saves.arena is not None
    saved, said = state(cuda), []

    def mark_held(_env: Any, *, step: int, samples: int) -> None:
        assert not cuda.queue
        with contextlib.closing(Arena.open(descriptor)) as other:
            assert_holds(other, saved)
        said.append((step, samples))

    monkeypatch.setattr(JobEnv, "mark_held", mark_held)
    saves.arena.reserve(saved)
    assert saves.hold(saved)
    assert said == [(1, 10)]
    saves.arena.close()
    os.close(descriptor)


def test_a_copy_that_fails_is_not_a_state() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        former = state(cuda)
        arena.save(former)

        def fail(_target: Any, _source: Any) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        cuda.copy = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="launch failure"):
            arena.save(state(cuda, 2))
        assert arena.newest() is not None
        assert_holds(arena, former)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_state_is_loaded_when_it_has_arrived_on_the_gpu(pinned: bool) -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        saved = state(cuda)
        if pinned:
            arena.touch(torch.device("cuda", GPU))
            arena.reserve(saved)
        arena.save(saved)
        own = {name: cuda.marked(torch.zeros_like(tensor)) for name, tensor in saved["model"].items()}
        loaded = arena.load(into={"model": own})
        assert not cuda.queue
        for name, tensor in saved["model"].items():
            assert loaded["model"][name] is own[name]
            assert torch.equal(own[name], tensor)


def test_a_rank_that_joins_pins_what_it_is_about_to_read() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        arena.save(state(cuda, 1))
        arena.touch(torch.device("cpu"))
        assert not cuda.registered
        arena.touch(torch.device("cuda", GPU))
        assert sum(cuda.registered.values()) == arena._head()[1]
        saved = state(cuda, 2)
        cuda.most_queued = 0
        arena.save(saved)
        assert cuda.most_queued > 1
        assert_holds(arena, saved)


def test_an_optimizers_new_tensors_are_made_where_its_parameters_are() -> None:
    def training(device: str) -> TrainingState:
        model = torch.nn.Linear(3, 2, device=device)
        optimizer = torch.optim.AdamW(model.parameters())
        options: dict[str, Any] = {"scheduler": None, "also": None, "total_steps": 1, "seed": 0}
        return TrainingState(model=model, optimizer=optimizer, dataset_size=8, global_batch=4, **options)

    trained = training("cpu")
    trained.model(torch.ones(4, 3)).sum().backward()
    trained.optimizer.step()
    found = copy.deepcopy({name: trained.state_dict([])[name] for name in ("model", "optimizer")})
    filled, copies = layout.to_copy(found, training("meta").tensors())
    kinds = {
        (name, tensor.device.type)
        for values in filled["optimizer"]["state"].values()
        for name, tensor in values.items()
    }
    assert kinds == {("exp_avg", "meta"), ("exp_avg_sq", "meta"), ("step", "cpu")}
    assert len(copies) == 2 + 2 * 3
    with opened(RuledCuda()) as arena:
        arena.save({**trained.state_dict([]), "rng": []})
        other = training("cpu")
        other.load_state_dict(arena.load(into=other.tensors()), "shared memory")
    for key, values in other.optimizer.state_dict()["state"].items():
        for name, tensor in values.items():
            assert torch.equal(tensor, trained.optimizer.state_dict()["state"][key][name])


def test_one_pass_over_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is summed before the next one is copied."""
    done: list[str] = []
    move, add = ctypes.memmove, module.np.sum

    def copy_one(*arguments: int) -> None:
        done.append("copy")
        move(*arguments)

    def add_up(*arguments: Any, **options: Any) -> None:
        done.append("sum")
        add(*arguments, **options)

    monkeypatch.setattr(ctypes, "memmove", copy_one)
    monkeypatch.setattr(module.np, "sum", add_up)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with opened(RuledCuda()) as arena:
        arena.save({"step": 1, "samples": 1, "model": torch.ones(4 * PIECE)})
        assert done == ["copy", "sum"] * 16
        assert arena.load()["model"].sum() == 4 * PIECE


def test_what_does_not_lie_in_a_row_is_put_in_one_first() -> None:
    cuda = RuledCuda(refuse_after=1)
    with opened(cuda) as arena:
        wide = cuda.marked(torch.randn(300, 400))
        saved = {
            "step": 1,
            "samples": 1,
            "model": {"gaps": wide[:, ::2], "turned": wide.t(), "twice": wide[1]},
        }
        arena.reserve(saved)
        arena.save(saved)
        assert_holds(arena, saved)


def test_a_kind_of_device_that_is_not_known_is_left_to_torch() -> None:
    with opened(RuledCuda()) as arena, pytest.raises(NotImplementedError, match="meta"):
        arena.save({"step": 1, "samples": 1, "model": torch.zeros(9, device="meta")})


# Where there is no CUDA.


def test_without_cuda_there_is_nothing_to_pin_with() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert not Cuda().can_pin()
    assert not Cuda().has(torch.zeros(1))


def test_a_state_that_cannot_be_held_is_not_pinned_for() -> None:
    cuda = RuledCuda()
    with opened(cuda) as arena:
        assert not arena.reserve({**state(cuda), "extra": object()})
        with pytest.raises(StoreError):
            arena.save({**state(cuda), "extra": object()})
    assert not cuda.registered
