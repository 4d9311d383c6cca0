"""Accelerate's loops are suspended, go on, and keep their global batch over any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed")

from adapted import Job, apart, example

from hpcsched.integrations.accelerate_place import PLACE, At, Place
from hpcsched.store.metrics import read_points

STEPS = ("--steps", "12")


def alone(folder: Path, *more: str, ranks: int = 1) -> dict[int, str]:
    """The losses of an undisturbed training."""
    ran = example("accelerate", "elastic.py", folder / "alone").run(*STEPS, *more, ranks=ranks)
    assert ran.codes == [0] * ranks and len(ran.losses) == 12, ran.output
    return ran.losses


def test_a_training_that_was_suspended_ends_as_one_that_was_not(tmp_path: Path) -> None:
    job = example("accelerate", "elastic.py", tmp_path / "job")
    first = job.run(*STEPS, "--dropout=0.1", stop_at=0)
    assert first.codes == [75] and first.losses.keys() == {1}, first.output
    assert json.loads((job.folder / "STATE.json").read_text())["step"] == 1
    assert (job.folder / "ready.1").exists() and (job.folder / "left.1").exists()
    second = job.run(*STEPS, "--dropout=0.1")
    assert second.codes == [0], second.output
    assert {**first.losses, **second.losses} == alone(tmp_path, "--dropout=0.1")
    points = read_points(job.folder / "metrics.jsonl")
    assert [(point.step, [*point.values]) for point in points[:2]] == [(1, ["loss"]), (2, ["loss"])]
    assert job.totals == {20}  # of which the program makes 12


@pytest.mark.slow
def test_two_ranks_that_were_suspended_end_as_two_that_were_not(tmp_path: Path) -> None:
    """With periodic checkpoints after each step, of which two stay."""
    job, losses = example("accelerate", "elastic.py", tmp_path / "job"), {}
    for stop_at, codes in ((3, [75, 75]), (None, [0, 0])):
        ran = job.run(*STEPS, "--dropout=0.1", ranks=2, stop_at=stop_at, HPCSCHED_CHECKPOINT_EVERY_S="0")
        assert ran.codes == codes, ran.output
        losses |= ran.losses
        assert len([*(job.folder / "checkpoint").iterdir()]) == 2
    assert losses == alone(tmp_path, "--dropout=0.1", ranks=2)


@pytest.mark.slow
def test_the_number_of_ranks_may_change_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """1, 2, 1: the same samples in each step, of which none is lost or seen twice."""
    job, losses = example("accelerate", "elastic.py", tmp_path / "job"), {}
    for ranks, stop_at, codes in ((1, 2, [75]), (2, 5, [75, 75]), (1, None, [0])):
        ran = job.run(*STEPS, ranks=ranks, stop_at=stop_at)
        assert ran.codes == codes, ran.output
        assert not losses.keys() & ran.losses.keys()
        losses |= ran.losses
    assert apart(losses, alone(tmp_path)) < 1e-5


def test_without_hpcsched_it_is_accelerates(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = Job(tmp_path / "program.py", tmp_path / "job").run("2", "0", "", HPCSCHED_JOB_ID="")
    assert ran.codes == [0] and ran.losses.keys() == {*range(1, 19)}, ran.output
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"output.1"}


PROGRAM = """
import sys, torch
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from torch.utils.data import DataLoader, TensorDataset
from hpcsched.integrations.accelerate import Accelerator

micro, workers, split = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "split"
set_seed(0)
options = {"dataloader_config": DataLoaderConfiguration(split_batches=True)} if split else {}
over_epochs = GradientAccumulationPlugin(num_steps=micro, sync_with_dataloader=sys.argv[3] != "over epochs")
accelerator = Accelerator(gradient_accumulation_plugin=over_epochs, **options)
torch.manual_seed(1)
x = torch.randn(44, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
loader = DataLoader(TensorDataset(x, torch.arange(44)), batch_size=4, shuffle=True, num_workers=workers)
held_out = DataLoader(TensorDataset(x, torch.arange(44)), batch_size=4)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
loader, held_out = accelerator.prepare(loader, held_out)
for epoch in accelerator.epochs(3):
    for inputs, names in loader:
        with accelerator.accumulate(model):
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen = accelerator.gather(names).tolist()
        accelerator.print("seen", epoch, *seen, flush=True)
        if accelerator.sync_gradients:
            rate = scheduler.get_last_lr()[0]
            accelerator.print(f"step {accelerator.completed_steps} loss {rate!r}", flush=True)
    for _ in held_out:
        pass
    accelerator.print("over", epoch, accelerator.completed_steps, flush=True)
accelerator.log({"accuracy": 0.5})
accelerator.end_training()
"""


def samples(output: str) -> list[tuple[int, int]]:
    lines = [line.split()[1:] for line in output.splitlines() if line.startswith("seen")]
    return [(int(epoch), int(name)) for epoch, *names in lines for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        *(("2", "0", ""), ("2", "2", ""), ("1", "0", ""), ("1", "0", "split"), ("3", "0", "")),
        ("2", "0", "over epochs"),
    ],
)
def test_each_sample_once_an_epoch_and_one_tick_a_step(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    whole = Job(tmp_path / "program.py", tmp_path / "alone").run(*how)
    assert whole.codes == [0], whole.output
    expected = sorted((epoch, name) for epoch in range(3) for name in range(44))
    assert sorted(samples(whole.output)) == expected
    job, seen, rates = Job(tmp_path / "program.py", tmp_path / "job"), [], {}
    for ranks, stop_at in ((1, 1), (2, 3), (1, 6), (2, None)):
        ran = job.run(*how, ranks=ranks, stop_at=stop_at)
        assert ran.codes == [0 if stop_at is None else 75] * ranks, ran.output
        seen += samples(ran.output)
        rates |= ran.losses
    assert rates == whole.losses
    steps = len(whole.losses)
    assert f"over 2 {steps}\n" in ran.output, "an epoch that was over is not begun again"
    # Of 11 batches the last one is filled up where two ranks share it, from the beginning of the epoch.
    begun = {epoch: [name for e, name in samples(whole.output) if e == epoch][:12] for epoch in range(3)}
    assert set(seen) == set(expected)
    assert all(name in begun[epoch] for epoch, name in seen if seen.count((epoch, name)) > 1)
    assert json.loads((job.folder / "STATE.json").read_text())["metrics"] == {"accuracy": 0.5}
    last = read_points(job.folder / "metrics.jsonl")[-1]
    assert (last.step, last.values) == (steps, {"accuracy": 0.5})
    assert min(job.totals) >= steps


EVALUATING = """
import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from hpcsched.integrations.accelerate import Accelerator

set_seed(0)
accelerator = Accelerator()
x = torch.randn(24, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x), batch_size=6, shuffle=True)
held_out = [DataLoader(TensorDataset(x), batch_size=size) for size in (24, 9)]
model, optimizer, loader, *held_out = accelerator.prepare(model, optimizer, loader, *held_out)
for epoch in accelerator.epochs(2):
    for (inputs,) in loader:
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {accelerator.completed_steps} loss {loss.item()!r}", flush=True)
        for one in held_out:
            with torch.no_grad():
                print("evaluated", *[model(inputs).square().sum().item() for (inputs,) in one], flush=True)
    print("over", epoch, loss.item(), flush=True)
"""


def test_an_evaluation_within_the_training_loop_is_no_part_of_its_steps(tmp_path: Path) -> None:
    """One batch of it or several: it is made whole, and does not count as a place in the data."""
    (tmp_path / "program.py").write_text(EVALUATING)
    whole = Job(tmp_path / "program.py", tmp_path / "alone").run()
    assert whole.codes == [0] and whole.losses.keys() == {*range(1, 9)}, whole.output
    job = Job(tmp_path / "program.py", tmp_path / "job")
    parts = [job.run(stop_at=2), job.run(stop_at=4), job.run()]
    assert [part.codes for part in parts] == [[75], [75], [0]], parts[-1].output
    assert parts[1].output.splitlines()[-1].startswith("over 0 "), "an epoch's last step: all of it is done"
    assert "".join(part.output for part in parts) == whole.output


LOOKING = """
import sys, torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from hpcsched.integrations.accelerate import Accelerator

set_seed(0)
accelerator = Accelerator()
x = torch.randn(24, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x), batch_size=3, shuffle=True)
held_out = [DataLoader(TensorDataset(x), batch_size=size) for size in (24, 6)]
model, optimizer, loader, *held_out = accelerator.prepare(model, optimizer, loader, *held_out)
for epoch in accelerator.epochs(2):
    if sys.argv[1:] != ["none"]:
        next(iter(loader))
        print("looked at", sum(len(inputs) for (inputs,) in loader), flush=True)
    kept = [iter(one) for one in held_out]
    print("kept", [next(one)[0].sum().item() for one in kept], flush=True)
    had = []
    for (inputs,) in loader:
        loss = model(inputs).square().mean() / 2
        accelerator.backward(loss)
        had.append(loss.item())
        if len(had) == 2:
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {accelerator.completed_steps} loss {sum(had)!r}", flush=True)
            had = []
"""


def test_a_look_at_samples_does_not_take_the_trainings_place(tmp_path: Path) -> None:
    """Steps of two batches, which the program itself accumulates, and iterators that are kept beside."""
    (tmp_path / "program.py").write_text(LOOKING)
    whole = Job(tmp_path / "program.py", tmp_path / "alone").run()
    assert whole.codes == [0] and whole.losses.keys() == {*range(1, 9)}, whole.output
    job = Job(tmp_path / "program.py", tmp_path / "job")
    parts = [job.run(stop_at=1), job.run("none"), job.run(stop_at=3), job.run()]
    assert [part.codes for part in parts] == [[75], [1], [75], [0]], parts[-1].output
    assert parts[0].losses.keys() == {1, 2}, "after the first step none knows what the others are for"
    assert "steps in loops 3 and 1 over a loader in epoch 0" in parts[1].output
    del parts[1]
    assert {key: loss for part in parts for key, loss in part.losses.items()} == whole.losses
    looks = [line for part in parts for line in part.output.splitlines() if not line.startswith("step")]
    assert {*looks} == {line for line in whole.output.splitlines() if not line.startswith("step")}


def test_the_place_that_an_earlier_version_has_saved_is_behind_no_look(tmp_path: Path) -> None:
    kept = {"step": 3, "epoch": 1, "loaders": {"0": [2, False]}, "world_size": 1, "seeds": {}}
    (tmp_path / PLACE).write_text(json.dumps(kept))
    assert Place.load(tmp_path).loaders == {0: At(2, False, others=0)}


ORDER = """
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from hpcsched.integrations.accelerate import Accelerator

class Stream(IterableDataset):
    def __iter__(self):
        yield from range(6)

accelerator = Accelerator()
accelerator.prepare(DataLoader(Stream(), batch_size=2))
print("of a stream", flush=True)
accelerator.prepare(DataLoader(range(6), batch_size=2, sampler=WeightedRandomSampler([1.0] * 6, 6)))
"""


def test_an_order_that_is_not_kept_is_said_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ORDER)
    ran = Job(tmp_path / "program.py", tmp_path / "job").run()
    assert ran.codes == [0] and ran.output.startswith("of a stream\n"), ran.output
    assert "WeightedRandomSampler draws its order anew" in ran.output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("DataLoaderConfiguration(use_stateful_dataloader=True)", "use_stateful_dataloader=True"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_kept_is_refused(tmp_path: Path, line: str, said: str) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    text = PROGRAM.replace("if split else {}", "").replace(
        "DataLoaderConfiguration(split_batches=True)", line
    )
    (tmp_path / "program.py").write_text(text)
    ran = Job(tmp_path / "program.py", tmp_path / "job").run("2", "0", "")
    assert ran.codes == [1] and said in ran.output
