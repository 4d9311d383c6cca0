"""A training behind a launcher that is not ours: torchrun, with ranks in sessions of their own."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from hpcsched.agent.attempts import read_record
from hpcsched.core.model import Device, JobSpec, Kind
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.plans import plan_attempt

DEADLINE_S = 120.0

LOOP = """
import os, time, torch
from hpcsched.worker import Session

model = torch.nn.Linear(1, 1)
session = Session(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), dataset_size=64, global_batch=8,
    total_steps=1_000_000,
)
mine = open(f"mine.{session.rank}", "w")  # gets the number of a descriptor that the launcher has closed
print(f"rank {session.rank} of {session.world_size}: {os.environ.get('HPCSCHED_RANK')}", flush=True)
x = torch.ones(64, 1)
for indices in session.steps():
    session.backward(model(x[indices]).square().mean())
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_session_behind_torchrun_is_one_world_and_hears_the_order(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    run_dir = tmp_path / "run"
    folder = run_dir / "jobs" / "1"
    folder.mkdir(parents=True)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "loop.py")
    spec = JobSpec(
        name="t",
        model="m",
        kind=Kind.COMMAND,
        command=(sys.executable, *launcher),
        processes="one",
        workdir=str(tmp_path),
    )
    output = folder / "out"
    devices = tuple(Device(index=i, host="h", kind="cpu", handle=str(i)) for i in range(2))
    plan = plan_attempt(
        spec,
        job_id=1,
        attempt=1,
        run_id=str(tmp_path),
        run_dir=run_dir,
        output=output,
        devices=devices,
        resume=False,
        per_gpu=False,
    )
    workers = LocalLauncher().launch(plan)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not (folder / "ready.1").exists() or "rank 1" not in output.read_text():
            assert time.monotonic() < deadline and workers.reap() is None, output.read_text()
            time.sleep(0.02)
        workers.signal(signal.SIGTSTP)
        while (code := workers.reap()) is None:
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
    finally:
        workers.signal(signal.SIGKILL)
        workers.close()
    said = output.read_text()
    assert (folder / "ready.1").read_text() == "{}", "the launcher is not one of several ranks"
    assert code == 75, said
    ranks = sorted(line for line in said.splitlines() if line.startswith("rank "))
    assert ranks == ["rank 0 of 2: None", "rank 1 of 2: None"], "and none was started again"
    record = read_record(folder)
    assert record is not None and record.attempt == 1
    assert {path.name for path in folder.glob("*.1")} == {"ready.1", "stop.1", "left.1"}
    assert (tmp_path / "mine.0").read_text() == (tmp_path / "mine.1").read_text() == ""
