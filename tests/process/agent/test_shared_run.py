"""A run that a group watches: no secret gets on its record, and none that is there is opened to the group."""

from __future__ import annotations

import grp
import os
from pathlib import Path

from livebench import Bench, job

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
