"""The head of a joinable run dies, or its allocation ends: what runs elsewhere goes on under another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from livebench import FOREVER, Bench, saves

HERE = ("--devices", "cpu:1", "--hosts", "home", "--launcher", "local", "--joinable", "--margin", "3")
THERE = ("--hosts", "far", "--launcher", "local")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_what_runs_elsewhere_goes_on_without_the_head_and_under_the_next(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
    first = bench.start(file, *HERE, "--grace", "2")
    bench.ready("a")
    guest = bench.start(*THERE, command="join")
    bench.ready("b")
    first.kill()
    first.wait()
    bench.until(lambda: "starts one here" in guest.said, "the guest takes over")
    bench.until(
        lambda: bench.status()["run"]["stale"] is False and bench.states().get("a") == "RUNNING", "goes on"
    )
    machine, _ = bench.replayed()
    assert [len(machine.run.jobs[i].attempts) for i in (1, 2)] == [1, 1]
    bench("cancel", "a", "b")
    assert guest.wait() == 0
    assert bench.all_gone()
