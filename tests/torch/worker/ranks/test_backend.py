"""What carries tensors between ranks, and which GPU a rank has: as with GPUs, which are not here."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.distributed as dist  # noqa: E402
from burstranks import Ranks, cases  # noqa: E402

from hpcsched.errors import ConfigError, LaunchError  # noqa: E402
from hpcsched.worker.burst.channels import Channels  # noqa: E402
from hpcsched.worker.ranks import backend, point_to_point  # noqa: E402
from hpcsched.worker.ranks.process_group import own_device  # noqa: E402

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_nccl_is_for_gpus_and_gloo_for_cpus_unless_something_else_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HPCSCHED_RANKS_BACKEND", raising=False)
    assert [backend.backend_for(device) for device in (GPU, CPU)] == ["nccl", "gloo"]
    assert not backend.ranks_share_gpus()
    monkeypatch.setenv("HPCSCHED_RANKS_BACKEND", "gloo")
    assert [backend.backend_for(device) for device in (GPU, CPU)] == ["gloo", "gloo"]
    assert backend.ranks_share_gpus()


@pytest.mark.parametrize("word", ["smoke-signals", "GLOO", "undefined", "cpu:gloo", "nccl"])
def test_a_backend_that_there_is_not_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("HPCSCHED_RANKS_BACKEND", word)
    with pytest.raises(ConfigError, match=f"HPCSCHED_RANKS_BACKEND: '{word}'; accepted: gloo$"):
        backend.backend_for(CPU)


@pytest.mark.parametrize(("given", "gpus"), [("", 1), ("0", 1), ("MIG-1", 1), ("0,1", 2)])
def test_ranks_share_a_gpu_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: str, gpus: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "0")
    monkeypatch.setenv("HPCSCHED_CUDA_DEVICES", given)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ranks: list[Any] = [SimpleNamespace(local_rank=rank) for rank in range(gpus + 1)]
    monkeypatch.delenv("HPCSCHED_RANKS_BACKEND", raising=False)
    assert [own_device(rank).index for rank in ranks[:gpus]] == list(range(gpus))
    with pytest.raises(LaunchError, match=f"no GPU for local rank {gpus}: CUDA shows this process {gpus}"):
        own_device(ranks[gpus])
    monkeypatch.setenv("HPCSCHED_RANKS_BACKEND", "gloo")
    assert [own_device(rank).index for rank in ranks] == [*range(gpus), 0]


def test_all_groups_are_aborted_in_older_torches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world, ended = object(), []

    def abort(group: Any = None) -> None:  # torch 2.5 to 2.7; later None is all groups as well
        ended.append("all" if group is world else "one")

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(backend.distributed_c10d, "_abort_process_group", abort)
    backend.end_groups()
    assert ended == ["all"]


class Event:
    """A CUDA event that is reached when it is asked for the n-th time."""

    def __init__(self, asked: float) -> None:
        self.asked = asked

    def record(self, stream: object) -> None:
        assert stream == "current"

    def query(self) -> bool:
        self.asked -= 1
        return self.asked <= 0


def test_a_gpu_that_does_not_end_its_work_has_nothing_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(3))
    backend.settle(GPU, 60.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(float("inf")))
    with pytest.raises(LaunchError, match=r"cuda:0 has not ended its work within 0\.01 s"):
        backend.settle(GPU, 0.01)
    backend.settle(CPU, 0.0)


def test_gloo_sends_what_is_on_a_gpu_from_the_cpu_and_nccl_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = torch.empty(2, device="meta")
    for name, copied in (("gloo", True), ("nccl", False)):
        monkeypatch.setattr(dist, "get_backend", lambda group, name=name: name)
        assert point_to_point.by_cpu(on_gpu, None) is copied
        assert not point_to_point.by_cpu(torch.empty(2), None)
        room = point_to_point._room_for(on_gpu, None)
        assert (room.device.type, room is on_gpu) == (("cpu", False) if copied else ("meta", True))


def copying(wires: Channels, seed: int) -> list[tuple[float, str]]:
    usual = point_to_point.by_cpu
    point_to_point.by_cpu = lambda tensor, group: True  # type: ignore[assignment]
    try:
        return cases(wires, [seed], 2, torch.float64, True, 4)
    finally:
        point_to_point.by_cpu = usual


def impatient(wires: Channels) -> str:
    """What becomes of rank 0, which waits for one that never comes."""
    group = dist.new_group()
    backend.set_patience(group, 0.2)
    if wires.rank == 0:
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError:
            return "not for long"
    return ""


def patient(wires: Channels) -> float:
    """A message, and a sum, that come late in a group that was made in a hurry."""
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    backend.set_patience(group, 60.0)
    room = torch.zeros(1)
    if wires.rank == 1:
        time.sleep(0.5)
        point_to_point.post([(0, torch.ones(1))], [], group)()
        time.sleep(0.5)
    else:
        point_to_point.post([], [(1, room)], group)()
    dist.all_reduce(room, group=group)
    return float(room)


def test_between_two_ranks() -> None:
    """What is copied by the CPU arrives; groups are as patient as they are told later, messages too."""
    group = Ranks(2)
    try:
        found = [case for seed in (90, 91) for case in group.ask(copying, seed)[0]]
        assert len(found) == 4 and max(found)[0] < 1e-12, max(found)
        if backend.patience_can_change():
            assert group.ask(patient) == [1.0, 1.0]
            assert group.ask(impatient) == ["not for long", ""]
    finally:
        group.close()
