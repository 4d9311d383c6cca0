"""What cannot be saved ends no training that is not told to leave; no rank waits for one that failed."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
import torch.distributed as dist
from forkserver import SERVER

from hpcsched.integrations.boundary import Boundary, bare
from hpcsched.worker.link import Link, Wish

DEADLINE_S = 60.0


def rank_of(rank: int, ranks: int, folder: Path, wish: Wish, codes: object) -> None:
    """A training whose last rank cannot save the first time; after step 1 `wish` is there."""
    told = {"JOB_ID": "1", "ATTEMPT": "1", "JOB_DIR": str(folder), "RUN_DIR": str(folder)}
    for name, value in {**told, "RANK": str(rank), "WORLD_SIZE": str(ranks)}.items():
        os.environ[f"HPCSCHED_{name}"] = value
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    within = datetime.timedelta(seconds=DEADLINE_S)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=within
        )
    link, failed = Link(), []

    def save(place: Path) -> None:
        if rank == ranks - 1 and not failed:
            failed.append(place)
            raise RuntimeError("no room")
        (place / f"part-{rank}").write_text("x")

    boundary = Boundary(link, save)
    wishes = iter([wish, Wish.NOTHING])
    link.wishes = lambda: next(wishes, Wish.SAVE)  # type: ignore[method-assign]
    try:
        for step in range(1, 5):
            boundary.made(step)
            boundary.act()
        code: object = link.step
        boundary.end(5)
        code = (code, link.step)
    except SystemExit as end:
        code = end.code
    codes.send(code)  # type: ignore[attr-defined]


def play(ranks: int, folder: Path, wish: Wish) -> list[object]:
    pipes = [SERVER.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        SERVER.Process(target=rank_of, args=(rank, ranks, folder, wish, pipes[rank][1]))
        for rank in range(ranks)
    ]
    for one in started:
        one.start()
    try:
        for one in started:
            one.join(DEADLINE_S)
        assert [one.exitcode for one in started] == [0] * ranks
        return [read.recv() for read, _ in pipes]
    finally:
        for one in started:
            one.kill()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_periodic_save_that_fails_ends_nothing(tmp_path: Path, ranks: int) -> None:
    assert play(ranks, tmp_path, Wish.SAVE) == [(4, 5)] * ranks
    kept = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert kept == ["step-4-attempt-1", "step-5-attempt-1"]


def test_one_that_fails_is_tried_again_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"JOB_ID": "1", "ATTEMPT": "1", "JOB_DIR": str(tmp_path), "RUN_DIR": str(tmp_path)}
    for name, value in {**told, "CHECKPOINT_EVERY_S": "1000"}.items():
        monkeypatch.setenv(f"HPCSCHED_{name}", value)
    link, tried = Link(), []

    def save(place: Path) -> None:
        tried.append(place)
        raise OSError("no room")

    boundary = Boundary(link, save)
    link._record.saved_at -= 1001
    for step in range(1, 5):
        boundary.made(step)
        boundary.act()
    link.close()
    assert len(tried) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_was_to_leave_and_cannot_save_says_so_on_all_ranks(tmp_path: Path, ranks: int) -> None:
    assert play(ranks, tmp_path, Wish.STOP | Wish.SAVE) == [74] * ranks
    assert not (tmp_path / "STATE.json").exists() and not list((tmp_path / "checkpoint").iterdir())


def test_names_of_parameters_are_those_of_the_bare_module() -> None:
    model, compiled = torch.nn.Linear(1, 1), torch.nn.Module()
    compiled._orig_mod = model  # as torch.compile wraps it, without seconds of imports
    assert bare(model) is bare(compiled) is model
