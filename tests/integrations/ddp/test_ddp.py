"""Loops with DistributedDataParallel are suspended, go on, and keep their global batch over the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from adapted import Job, apart, example
from places import ROOT

from hpcsched.errors import ConfigError
from hpcsched.store.metrics import read_points

STEPS = ("--steps", "24")  # 20 make an epoch


def alone(name: str, folder: Path, *more: str) -> dict[int, str]:
    """The losses of an undisturbed training on one rank."""
    ran = example(name, "elastic.py", folder / "alone").run(*STEPS, *more)
    assert ran.codes == [0] and len(ran.losses) == 24, ran.output
    return ran.losses


def test_a_training_behind_torchrun_is_suspended_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    job = example("ddp", "elastic.py", tmp_path / "job")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    job.folder.mkdir()
    (job.folder / "stop.1").touch()
    told = {"JOB_ID": "1", "ATTEMPT": "1", "JOB_DIR": str(job.folder), "RUN_DIR": str(job.folder)}
    ran = subprocess.run(
        [*launcher, job.program, *STEPS],
        env=os.environ | {f"HPCSCHED_{name}": value for name, value in told.items()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, f"75 would be a failure to torchrun: {ran.stderr[:3000]}"
    assert (job.folder / "ready.1").read_text() == "{}" and (job.folder / "left.1").exists()
    made = {int(line.split()[1]): line.split()[3] for line in ran.stdout.splitlines()}
    assert made.keys() == {1, 2}, "what is asked after a step is answered after the next one"
    job.attempts = 1
    rest = job.run(*STEPS)
    assert rest.codes == [0] and not made.keys() & rest.losses.keys(), rest.output
    assert apart({**made, **rest.losses}, alone("ddp", tmp_path)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "gpt"])
def test_a_suspended_training_ends_as_one_that_was_not(tmp_path: Path, name: str) -> None:
    more = ["--dropout=0.1"] if name == "ddp" else []
    job, losses = example(name, "elastic.py", tmp_path / "job"), {}
    for stop_at in (3, 20, None):
        ran = job.run(*STEPS, *more, stop_at=stop_at)
        assert ran.codes == [0 if stop_at is None else 75], ran.output
        losses |= ran.losses
    assert losses == alone(name, tmp_path, *more)


@pytest.mark.slow
def test_two_ranks_that_were_suspended_end_as_two_that_were_not(tmp_path: Path) -> None:
    """With periodic checkpoints after each step, of which two stay."""
    job, losses = example("ddp", "elastic.py", tmp_path / "job"), {}
    for stop_at, codes in ((3, [75, 75]), (None, [0, 0])):
        ran = job.run(*STEPS, "--dropout=0.1", ranks=2, stop_at=stop_at, HPCSCHED_CHECKPOINT_EVERY_S="0")
        assert ran.codes == codes, ran.output
        losses |= ran.losses
        assert len([*(job.folder / "checkpoint").iterdir()]) == 2
    whole = example("ddp", "elastic.py", tmp_path / "alone").run(*STEPS, "--dropout=0.1", ranks=2)
    assert losses == whole.losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "gpt"])
def test_the_number_of_ranks_may_change_in_the_middle_of_an_epoch(tmp_path: Path, name: str) -> None:
    job, losses = example(name, "elastic.py", tmp_path / "job"), {}
    for ranks, stop_at in ((1, 2), (2, 8), (1, 12), (2, None)):
        ran = job.run(*STEPS, ranks=ranks, stop_at=stop_at)
        assert ran.codes == [0 if stop_at is None else 75] * ranks, ran.output
        losses |= ran.losses
    assert apart(losses, alone(name, tmp_path)) < 1e-5


PROGRAM = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hpcsched.integrations.ddp import Elastic

workers, drop_last, saved = int(sys.argv[1]), sys.argv[2] == "drop", sys.argv[3:]
torch.manual_seed(0)
x = torch.randn(45, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = Elastic(model=model, optimizer=optimizer)
dataset = TensorDataset(x, torch.arange(45))
loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, drop_last=drop_last)
loader = elastic.loader(loader)
for epoch in elastic.epochs(2):
    for number, (inputs, names) in enumerate(loader):
        model(inputs).square().mean().backward()
        if number % 2:  # two batches a step
            optimizer.step()
            optimizer.zero_grad()
        print("seen", epoch, *names.tolist(), flush=True)
        print(f"step {elastic.step} drawn {torch.rand(()).item()}", flush=True)
elastic.finish({"last": elastic.step})
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [("0", "keep"), ("2", "keep"), ("0", "drop")])
def test_each_sample_once_an_epoch(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def seen(*outputs: str) -> list[str]:
        lines = [line for output in outputs for line in output.splitlines()]
        return [line for line in lines if line.startswith(("seen", "step"))]

    whole = Job(tmp_path / "program.py", tmp_path / "alone").run(*how)
    assert whole.codes == [0], whole.output
    names = [int(name) for line in seen(whole.output)[::2] for name in line.split()[2:]]
    full = 44 if how[1] == "drop" else 45
    assert len(names) == 2 * (44 if how[1] == "drop" else 48)
    assert len(set(names[: len(names) // 2])) == full
    job = Job(tmp_path / "program.py", tmp_path / "job")
    parts = [job.run(*how, stop_at=at) for at in (1, 4)] + [job.run(*how)]
    assert [part.codes for part in parts] == [[75], [75], [0]], parts[-1].output
    assert seen(*(part.output for part in parts)) == seen(whole.output)
    assert job.totals and min(job.totals) >= int(whole.output.splitlines()[-1].split()[1])


OVER = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hpcsched.integrations.ddp import Elastic

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = Elastic(model=model, optimizer=optimizer)

def train(inputs, step):
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
    return loss

if sys.argv[1] == "steps":
    for step in elastic.steps(6):
        loss = train(torch.ones(2, 4), step + 1)
else:
    loader = elastic.loader(DataLoader(TensorDataset(torch.randn(9, 4)), batch_size=3, shuffle=True))
    for epoch in elastic.epochs(2):
        for number, (inputs,) in enumerate(loader):
            loss = train(inputs, elastic.step + 1)
        with torch.no_grad():
            print("over", epoch, number, *[model(inputs).sum().item() for (inputs,) in loader], flush=True)
elastic.log({"last": 1})
print("done", loss.item(), flush=True)
"""


@pytest.mark.parametrize("how", ["steps", "epochs"])
def test_after_a_last_step_what_follows_is_done(tmp_path: Path, how: str) -> None:
    """An epoch's is left after it, the training's not at all: its loop would not be entered again."""
    (tmp_path / "program.py").write_text(OVER)
    whole = Job(tmp_path / "program.py", tmp_path / "alone").run(how)
    assert whole.codes == [0], whole.output
    job = Job(tmp_path / "program.py", tmp_path / "job")
    parts = [job.run(how, stop_at=at) for at in (3, 6)]
    assert [part.codes for part in parts] == [[75], [0]], parts[-1].output
    assert "".join(part.output for part in parts) == whole.output
    points = read_points(job.folder / "metrics.jsonl")
    assert [(points[at].step, points[at].values) for at in (0, -1)] == [(1, {"lr": 0.1}), (6, {"last": 1.0})]
    assert job.totals == {6}


LOOKING = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hpcsched.integrations.ddp import Elastic

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = Elastic(model=model, optimizer=optimizer)
loader = elastic.loader(DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=3, shuffle=True))
for epoch in elastic.epochs(2):
    if sys.argv[1:] != ["none"]:
        next(iter(loader))
        print("looked at", sum(len(inputs) for (inputs,) in loader), flush=True)
    for (inputs,) in loader:
        loss = model(inputs).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {elastic.step} loss {loss.item()!r}", flush=True)
"""


def test_a_look_at_the_samples_before_the_training_does_not_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LOOKING)
    whole = Job(tmp_path / "program.py", tmp_path / "alone").run()
    assert whole.codes == [0] and whole.losses.keys() == {*range(1, 9)}, whole.output
    job = Job(tmp_path / "program.py", tmp_path / "job")
    parts = [job.run(stop_at=2), job.run("none"), job.run()]
    assert [part.codes for part in parts] == [[75], [1], [0]], parts[-1].output
    assert "steps in loops 3 and 1 over `loader` in epoch 0" in parts[1].output, "not the third: begun anew"
    assert parts[2].output.count("looked at 12\n") == 2
    assert {**parts[0].losses, **parts[2].losses} == whole.losses


@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_a_loop_that_was_left_by_break_hears_no_order(elastic: type, kind: str) -> None:
    """What follows, such as an evaluation, would never act on it: the signals are given back."""
    before = signal.getsignal(signal.SIGTSTP)
    one = elastic(model=torch.nn.Linear(1, 1))
    assert signal.getsignal(signal.SIGTSTP) is not before
    for _ in getattr(one, kind)(3):
        break
    assert signal.getsignal(signal.SIGTSTP) is before
    assert not one.link.wishes()


def test_one_loop_of_an_epoch_makes_steps(elastic: type) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = elastic(model=model, optimizer=optimizer)
    loader = one.loader(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    for epoch in one.epochs(2):
        for _ in loader:
            optimizer.step()
            assert len([*loader]) == 3, "it sees all samples, and counts as nothing"
        assert one.step == 3 * (epoch + 1)
    for _ in one.epochs(3):
        with pytest.raises(ConfigError, match="in loops 1 and 2"):
            for _ in range(2):
                for _ in loader:
                    optimizer.step()


@pytest.fixture
def elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The class, in a job of one rank."""
    ddp = pytest.importorskip("hpcsched.integrations.ddp")
    for name, value in {"JOB_ID": "1", "ATTEMPT": "1", "RUN_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"HPCSCHED_{name}", value)
    before = [signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGTERM)]
    yield ddp.Elastic
    for number, handler in zip((signal.SIGTSTP, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


def test_what_does_not_fit_is_refused(elastic: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

    dataset = TensorDataset(torch.zeros(6, 1))
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="rate: float"):
        elastic(model=model, rate=0.1)
    one = elastic(model=model)
    with pytest.raises(ConfigError, match="WeightedRandomSampler"):
        one.loader(DataLoader(dataset, batch_size=2, sampler=WeightedRandomSampler([1.0] * 6, 6)))
    loader = elastic(model=model).loader(DataLoader(dataset, batch_size=2))
    with pytest.raises(ConfigError, match="outside of `epochs`"):
        next(iter(loader))
    monkeypatch.setenv("HPCSCHED_RANK", "0")
    monkeypatch.setenv("HPCSCHED_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group before"):
        elastic(model=model)


def test_without_hpcsched_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = pytest.importorskip("hpcsched.integrations.ddp")
    monkeypatch.delenv("HPCSCHED_JOB_ID", raising=False)
    one, loader = ddp.Elastic(model=None), object()
    assert one.loader(loader) is loader
    assert [*one.epochs(2)] == [*one.steps(2)] == [0, 1]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    one = ddp.Elastic(optimizer=optimizer)
    for epoch in one.epochs(2):
        optimizer.step()
        assert one.step == epoch + 1


def test_the_examples_change_few_lines() -> None:
    for name, most in (("accelerate", 2), ("ddp", 5), ("gpt", 5)):
        texts = [(ROOT / "examples" / name / file).read_text() for file in ("train.py", "elastic.py")]
        before, after = ({*text[text.index('"""', 3) :].splitlines()} for text in texts)
        assert len(after - before - {""}) <= most
