"""A loop over epochs does what is due once an epoch once, and its sums are whole over changes of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from elasticjobs import Elastic  # noqa: E402
from rankjobs import Job, wait, woken_by  # noqa: E402

from hpcsched.contract import files  # noqa: E402
from hpcsched.store.metrics import read_curves  # noqa: E402

LOOP = """
import json, os, signal
import torch
from torch.nn.functional import mse_loss
from hpcsched.worker import Session

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
x = torch.arange(10.0).unsqueeze(1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
session = Session(model=model, optimizer=optimizer, scheduler=scheduler, dataset_size=10, global_batch=4)
at = int(os.environ.get("AT", -1))
for epoch in session.epochs(4):
    for indices in epoch:
        optimizer.zero_grad()
        loss = session.backward(mse_loss(model(x[indices]), 3 * x[indices]))
        optimizer.step()
        epoch.sum(samples=float(len(indices)), of=indices.sum())
        epoch.mean(index=indices.float().mean())
        if session.step == at and session.rank == 0:
            os.kill(os.getpid(), signal.SIGTSTP)
    scheduler.step()
    results = epoch.results()
    session.log({"train_index": results["index"]})
    with open(f"epochs.{session.rank}", "a") as file:
        line = [epoch.number, session.step, results, optimizer.param_groups[0]["lr"]]
        file.write(json.dumps(line) + "\\n")
session.finish()
"""


def loop(folder: Path) -> Job:
    job = Job(folder, program=str(folder / "loop.py"))
    (folder / "loop.py").write_text(LOOP)
    return job


def epochs(job: Job, rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in (job.folder / f"epochs.{rank}").read_text().splitlines()]


@pytest.mark.parametrize("at", [1, 2, 4, 7])
def test_suspended_anywhere_each_epoch_is_ended_once_and_whole(tmp_path: Path, at: int) -> None:
    plain, job = loop(tmp_path / "plain"), loop(tmp_path / "suspended")
    for one in (plain, job):
        one.steps = 10
    assert plain.run(1) == [0], plain.output
    job.env["AT"] = str(at)
    assert job.run(2) == [75, 75], job.output
    del job.env["AT"]
    assert job.run(1) == [0], job.output
    found = epochs(plain)
    # 10 samples in batches of 4: epochs end with steps 3, 5, 8 and 10.
    assert [(number, step, lr) for number, step, _, lr in found] == [
        (0, 3, 5e-4),
        (1, 5, 2.5e-4),
        (2, 8, 1.25e-4),
        (3, 10, 6.25e-5),
    ]
    assert [results["samples"] for _, _, results, _ in found] == [12, 8, 12, 8]
    assert epochs(job) == found
    assert [lr for *_, lr in epochs(job, 1)] == [lr for *_, lr in found][: len(epochs(job, 1))]
    curves = read_curves(job.dir / files.METRICS)
    assert [step for step, _ in curves["train_index"]] == [3, 5, 8, 10]


def test_without_a_number_of_steps_the_epochs_are_the_whole_work(tmp_path: Path) -> None:
    job = loop(tmp_path)
    job.env["HPCSCHED_STEPS"] = ""
    assert job.run(1) == [0], job.output
    assert job.state["step"] == 10
    job.env |= {"HPCSCHED_EPOCHS": "1"}
    assert job.run(1) == [0], job.output  # the job file goes first, and there is nothing left
    assert job.state["step"] == 10 and len(epochs(job)) == 4


RESIZED = """
import json, os, time
import torch
from torch.nn.functional import mse_loss
from hpcsched.worker import Session

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
x = torch.arange(400.0).unsqueeze(1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
session = Session(
    model=model, optimizer=optimizer, dataset_size=400, global_batch=4, total_steps=100, in_place=True
)
for epoch in session.epochs(1):
    for indices in epoch:
        if not os.path.exists("go"):
            time.sleep(0.5 if session.step > 60 else 0.02)
        optimizer.zero_grad()
        session.backward(mse_loss(model(x[indices]), x[indices]))
        optimizer.step()
        epoch.sum(samples=float(len(indices)), indices=indices.sum())
    with open("results." + str(session.rank), "w") as file:
        json.dump([session.step, epoch.results()], file)
session.finish()
"""


def test_sums_are_whole_when_ranks_come_and_go(tmp_path: Path) -> None:
    job = Elastic(tmp_path, steps=100)
    job.program = str(tmp_path / "resized.py")
    (tmp_path / "resized.py").write_text(RESIZED)
    with woken_by():
        ranks = job.begin(1)
        job.word()
        for old, new in ((1, 3), (3, 2)):
            ranks += job.resize(old, new)
            assert job.word()["in_place"]
        job.go()
        assert wait(ranks) == [0] * len(ranks), job.output
    for rank in (0, 1):
        step, results = json.loads((tmp_path / f"results.{rank}").read_text())
        assert step == 100 and results == {"samples": 400.0, "indices": 400 * 399 / 2}


def test_a_loop_that_leaves_an_epoch_is_told_so(tmp_path: Path) -> None:
    from hpcsched.worker import Session

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model=model, optimizer=optimizer, dataset_size=4, global_batch=2)
    with pytest.raises(RuntimeError, match="epoch 0: left after step 0 of 2"):
        for _ in session.epochs(2):
            pass
