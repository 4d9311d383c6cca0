"""A node of eight GPUs that is not there: what a run does when something happens to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from livebench import FOREVER, Bench, job

from hpcsched.core import events as ev
from hpcsched.store import journal

NODE = """
schema = 1
gpus = 8
name = "NVIDIA H100 80GB HBM3"
memory_mib = 81559

[[happens]]
at_s = {early}
gpu = 5
what = "xid"
xid = 31

[[happens]]
at_s = {at_s}
gpu = 3
what = "xid"
xid = 79
"""
PROFILE = {"model": "m", "device": "replay", "nodes": 1, "throughput": {"1": 10.0}, "source": "measured"}
JOBS = 7


def lost(bench: Bench) -> list[ev.DeviceLost]:
    return [event for event, _ in journal.read(bench.rundir.journal) if isinstance(event, ev.DeviceLost)]


def begun(folder: Path, at_s: float) -> Bench | None:
    """A run whose jobs were all ready before it happened; None: this machine was too busy for that."""
    folder.mkdir()
    bench = Bench(folder)
    (folder / "8node.toml").write_text(NODE.format(at_s=at_s, early=at_s - 0.5))
    (folder / "profiles.json").write_text(json.dumps({"schema": 1, "profiles": [PROFILE]}))
    names = [f"j{i}" for i in range(JOBS)]
    jobs = bench.set_of(*(job(name, replay=True, model="m", steps=FOREVER, gpus=1) for name in names))
    words = ["--devices", "replay:8node.toml", "--profiles", folder / "profiles.json", "--monitor", "0.1"]
    bench.start(jobs, *words)
    bench.ready(*names)
    if not lost(bench):
        return bench
    bench.close()
    return None


def test_a_gpu_that_falls_off_the_bus_is_left_and_one_with_a_page_fault_is_not(tmp_path: Path) -> None:
    tries = (begun(tmp_path / str(at_s), at_s) for at_s in (4.0, 15.0, 60.0))
    bench = next((found for found in tries if found), None)
    if bench is None:
        pytest.fail("no job was ready within a minute")
    try:
        before = {f"j{i}": bench.job(f"j{i}") for i in range(JOBS)}
        on = {one["gpus"][0]: name for name, one in before.items()}
        if 3 not in on or 5 not in on:
            pytest.fail(f"not as the test wants it: {on}")
        bench.until(lambda: lost(bench), "the GPU is lost", 90.0)
        bench.until(lambda: bench.job(on[3]).get("attempt") == 2, "its job starts again")
        bench.ready(*before)
        after = {name: bench.job(name) for name in before}
        assert [(event.gpu, event.why) for event in lost(bench)] == [
            (3, "Xid 79 (GPU has fallen off the bus)")
        ]
        assert after[on[3]]["gpus"] == [7], "the one that was free"
        for name in before.keys() - {on[3]}:
            assert (after[name]["attempt"], after[name]["gpus"]) == (1, before[name]["gpus"])
        handles = [device.handle for device in bench.replayed()[0].ledger.devices.values()]
        assert len(set(handles)) == 7 and all(handle.startswith("GPU-") for handle in handles)
    finally:
        bench.close()


def test_a_description_that_is_wrong_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "node.toml").write_text("schema = 1\ngpus = 0\n")
    done = bench("run", bench.set_of(job("a", "true", gpus=1)), "--devices", "replay:node.toml@20")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["hpcsched: --devices node.toml: gpus: 0; accepted: GPUs: 1 to 64"]
