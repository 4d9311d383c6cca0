"""A run that a group watches: no secret gets on its record, and none that is there is opened to the group."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest
from livebench import FOREVER, Bench, job, saves

CPU = ["--devices", "cpu:1"]


def modes(bench: Bench) -> list[int]:
    run: Path = bench.rundir.root
    return [path.stat().st_mode & 0o7777 for path in (run, bench.rundir.journal)]


def test_no_secret_is_opened_to_a_group(bench: Bench) -> None:
    group = grp.getgrgid(os.getegid()).gr_name
    secret = job("a", "true", env={"WANDB_API_KEY": "not-to-be-seen"})
    private, shared = bench.set_of(secret), ["--share", group]
    assert bench("run", private, *CPU).returncode == 0
    before = modes(bench)
    done = bench("run", "--resume", *CPU, *shared)
    assert done.returncode == 2 and "--share: job a.env.WANDB_API_KEY" in done.stderr, done.stderr
    assert modes(bench) == before == [0o700, 0o600]


def test_a_shared_run_refuses_secrets_in_each_life(bench: Bench) -> None:
    group = grp.getgrgid(os.getegid()).gr_name
    assert bench("run", bench.set_of(job("a", "true")), *CPU, "--share", group).returncode == 0
    secret = job("b", "true", env={"WANDB_API_KEY": "not-to-be-seen"})
    done = bench("run", "--resume", bench.set_of(job("a", "true"), secret), *CPU)
    assert done.returncode == 2 and "job b.env.WANDB_API_KEY" in done.stderr, done.stderr
    assert "not-to-be-seen" not in bench.rundir.journal.read_text()
    assert modes(bench) == [0o2750, 0o640]


@pytest.mark.torch
def test_inbox_keys_and_checkpoints_stay_the_users_whatever_the_umask(bench: Bench) -> None:
    """Over two hosts, whose node agents need keys."""
    pytest.importorskip("torch")
    digits = job("t", trainer="hpcsched.examples.digits:Digits", args={"kind": "mlp"}, steps=3, gpus=1)
    own = job("own", "mkdir -p $HPCSCHED_CHECKPOINT_DIR; echo mine >$HPCSCHED_CHECKPOINT_DIR/it", gpus=1)
    jobs = bench.set_of(own, digits, saves("a", steps=FOREVER, gpus=1))
    hosts = ["--devices", "cpu:1", "--hosts", "x,y", "--launcher", "local"]
    before = os.umask(0)
    try:
        run = bench.start(jobs, *hosts, "--share", grp.getgrgid(os.getegid()).gr_name)
    finally:
        os.umask(before)
    bench.ready("a")
    bench.until(lambda: bench.states().get("t") == "COMPLETED", "t trained")
    assert bench.states()["own"] == "COMPLETED"
    root: Path = bench.rundir.root
    shown = {path for path in root.rglob("*") if path.is_file() and is_open(path, root)}
    assert {bench.rundir.journal, bench.rundir.record, *root.glob("jobs/*/*.out")} <= shown
    keys, saved = [*root.glob("join*")], [*root.glob("jobs/*/checkpoint/*")]
    inbox = [bench.rundir.inbox, *bench.rundir.inbox.rglob("*")]
    assert len(keys) == 1 and {path.parts[-3] for path in saved} >= {"1", "2"} and len(inbox) == 4
    assert [path for path in (*keys, *saved, *inbox) if is_open(path, root)] == []
    bench("cancel", "a")
    assert run.wait() == 0, run.said


def is_open(path: Path, root: Path) -> bool:
    """Whether anybody but the user gets at it, by the modes from the root on."""
    way = [one for one in path.parents if one.is_relative_to(root)]
    return bool(path.stat().st_mode & 0o077) and all(one.stat().st_mode & 0o011 for one in way)
