"""Ranks agree on what to do after a step, and nobody waits for ever."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
from forkserver import SERVER

from hpcsched.errors import LaunchError
from hpcsched.integrations import agreement
from hpcsched.integrations.agreement import Agreement
from hpcsched.worker.link import Wish

DEADLINE_S = 60.0
NOTHING, SAVE, STOP = Wish.NOTHING, Wish.SAVE, Wish.STOP


def meet(rank: int, store: Path) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    within = datetime.timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=within)


def rank_of(rank: int, scene: Callable[[int, Path], object], store: Path, answers: object) -> None:
    meet(rank, store)
    answers.send(scene(rank, store))  # type: ignore[attr-defined]


def play(scene: Callable[[int, Path], object], tmp_path: Path) -> list[object]:
    """What a scene comes to on each of two ranks; they have to end by themselves."""
    pipes = [SERVER.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        SERVER.Process(target=rank_of, args=(rank, scene, tmp_path / "store", pipes[rank][1]))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0, 0]
        return [read.recv() for read, _ in pipes]
    finally:
        for process in ranks:
            process.kill()


def asked_one_step_apart(rank: int, store: Path) -> list[Wish]:
    """Rank 1 alone is told to stop, after step 2; rank 0 alone wants to save, after step 4."""
    agree = Agreement()
    wanted = {(1, 2): STOP, (0, 4): SAVE}
    found = [agree(wanted.get((rank, step), NOTHING)) for step in range(1, 7)]
    agree(STOP)  # the last step: nobody asks again
    dist.destroy_process_group()
    return found


def test_all_ranks_get_the_same_answer_after_the_same_step(tmp_path: Path) -> None:
    expected = [NOTHING, NOTHING, STOP, NOTHING, SAVE, NOTHING]
    assert play(asked_one_step_apart, tmp_path) == [expected, expected]


def asked_in_long_steps(rank: int, store: Path) -> list[Wish]:
    agreement._LONG_STEP_S = 0.0
    agree = Agreement()
    found = [agree(STOP if rank and step == 4 else NOTHING) for step in range(1, 6)]
    agree.close()
    return found


def test_long_steps_are_answered_at_once(tmp_path: Path) -> None:
    expected = [NOTHING, NOTHING, NOTHING, STOP, NOTHING]
    assert play(asked_in_long_steps, tmp_path) == [expected, expected]


def met_anew(rank: int, store: Path) -> list[Wish]:
    agree = Agreement()
    found = [agree(STOP), agree(NOTHING)]
    dist.destroy_process_group()
    meet(rank, store.with_name("other"))
    return [*found, agree(SAVE), agree(NOTHING)]


def test_a_process_group_may_be_made_anew(tmp_path: Path) -> None:
    assert play(met_anew, tmp_path) == [[NOTHING, STOP, NOTHING, SAVE]] * 2


def one_makes_fewer_steps(rank: int, store: Path) -> str:
    agree = Agreement(within_s=0.5)
    agree(NOTHING)
    if rank == 0:
        agree(NOTHING)
        began = time.monotonic()
        with pytest.raises(LaunchError) as raised:
            agree(NOTHING)
        assert time.monotonic() - began < 30
        (store.parent / "seen").touch()
        return str(raised.value)
    deadline = time.monotonic() + DEADLINE_S
    while not (store.parent / "seen").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return ""


def test_a_rank_that_makes_fewer_steps_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    said, _ = play(one_makes_fewer_steps, tmp_path)
    assert "has not made this step within 0.5 s" in str(said)


def one_fails(rank: int, store: Path) -> str:
    agree = Agreement()
    if rank:
        agree(NOTHING)
        return ""  # the process ends, perhaps before the other one has connected
    with pytest.raises(LaunchError) as raised:
        for _ in range(3):
            agree(NOTHING)
    return str(raised.value)


def test_a_rank_that_has_ended_is_seen(tmp_path: Path) -> None:
    said, _ = play(one_fails, tmp_path)
    assert "a rank has ended" in str(said)


def test_a_rank_that_ends_while_all_connect_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    group = SimpleNamespace(WORLD=object())
    played = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        group=group,
        new_group=refused,
    )
    monkeypatch.setattr(agreement, "dist", played)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(LaunchError, match="a rank has ended"):
        Agreement()(NOTHING)


def test_one_rank_answers_itself() -> None:
    assert Agreement()(STOP) is STOP


def test_once_all_are_to_leave_nothing_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo aborts a process that ends while a collective is under way."""
    begun: list[Any] = []

    def all_reduce(box: Any, **_: Any) -> Any:
        begun.append(box)
        return SimpleNamespace(wait=lambda: None)

    agree = Agreement()
    monkeypatch.setattr(agree, "_meet", lambda: True)
    played = SimpleNamespace(get_rank=lambda: 1, all_reduce=all_reduce, ReduceOp=SimpleNamespace(MAX=0))
    monkeypatch.setattr(agreement, "dist", played)
    assert agree(Wish.NOTHING) == Wish.NOTHING
    assert agree(Wish.STOP) == Wish.NOTHING
    assert len(begun) == 2
    assert agree(Wish.NOTHING) == Wish.STOP
    assert len(begun) == 2
