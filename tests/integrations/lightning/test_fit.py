"""Trainer.fit, suspended and resumed in this process, against one that was not."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from hpcsched.integrations.lightning import HpcschedCallback
from hpcsched.store.metrics import read_points
from hpcsched.worker.link import Link, Wish
from tests.integrations.lightning.trainings import Gan, Head, Job, Net, Stream, Thaw, loader, of, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    numbers = (signal.SIGTSTP, signal.SIGTERM, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    yield Job(tmp_path, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


def other(job: Job) -> Job:
    return Job(job.folder / "other", job.patch)


def same(one: Job, two: Job) -> None:
    """To the last digit: samples, losses, draws, rates, validations, logs, other checkpoints, weights."""
    for mine, others in zip(one.seen, two.seen, strict=True):
        assert mine == others
    assert one.logged == two.logged
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, two.model.state_dict()[name]), name


HOW: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_steps": 17},
    "accumulation": {"max_epochs": 3, "accumulate_grad_batches": 3, "val_check_interval": 0.5},
    "validation": {"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None},
    "gan": {"max_epochs": 2, "model": Gan, "val_check_interval": 3},
    "plateau": {"max_epochs": 3, "plateau": True},
    "averaged": {
        "max_epochs": 4,
        "more": lambda: pl.callbacks.StochasticWeightAveraging(0.3, swa_epoch_start=2, annealing_epochs=2),
    },
    "scheduled": {
        "max_epochs": 3,
        "more": lambda: pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3}),
    },
    "finetuned": {
        "max_epochs": 3,
        "model": Head,
        "more": lambda: pl.callbacks.BackboneFinetuning(1, train_bn=False),
    },
    "thawed": {"max_epochs": 3, "more": Thaw},
    "limits": {"max_epochs": 4, "limit_train_batches": 4, "gradient_clip_val": 0.1},
    "amp": {"max_epochs": 2, "precision": "bf16-mixed"},
}


QUICK = ("epochs", "accumulation", "averaged", "scheduled", "finetuned")


@pytest.mark.parametrize(
    "how", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in HOW]
)
def test_suspended_in_the_middle_it_is_the_same_training(job: Job, how: str) -> None:
    job.through(stops=(3, 14), **HOW[how])
    assert job.attempts == 3
    two = other(job)
    two.through(**HOW[how])
    assert two.attempts == 1
    same(job, two)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_suspended_after_any_batch_it_is_the_same_training(job: Job, how: str) -> None:
    if how == "finetuned" and not hasattr(pl.loops._FitLoop, "restarted_mid_epoch"):
        pytest.skip("before 2.5 Lightning itself has it hear twice that an epoch begins")
    whole = other(job)
    whole.through(**HOW[how])
    for stop in range(1, len(of(whole.seen, "batch"))):
        one = Job(job.folder / str(stop), job.patch)
        one.through(stops=(stop,), **HOW[how])
        assert one.attempts == 2
        same(one, whole)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader(job: Job, persistent: bool) -> None:
    how = {"max_epochs": 3, "data": lambda: loader(num_workers=2, persistent_workers=persistent)}
    job.through(stops=(3, 14), **how)
    two = other(job)
    two.through(**how)
    same(job, two)


@pytest.mark.slow
def test_loaders_anew_for_each_epoch(job: Job) -> None:
    how = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    job.through(stops=(3, 10, 15), **how)
    two = other(job)
    two.through(**how)
    same(job, two)


@pytest.mark.slow
def test_two_loaders_of_other_lengths(job: Job) -> None:
    class Both(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(("second", batch["second"][0].tolist()))
            return super().training_step(batch["first"], batch_idx)

    how = {"max_epochs": 2, "model": Both, "data": lambda: {"first": loader(), "second": loader(12)}}
    job.through(stops=(2, 8, 14), **how)
    two = other(job)
    two.through(**how)
    same(job, two)


def test_what_is_on_record(job: Job) -> None:
    job.begin()
    fit(job, stops=(5,), max_steps=8, val_check_interval=4)
    points = read_points(job.folder / "job" / "metrics.jsonl")
    losses = [float(one[5]) for one in of(job.seen, "batch")]
    assert [p.step for p in points] == [1, 2, 3, 4, 4, 5]
    assert [p.values["loss"] for p in points if "loss" in p.values] == pytest.approx(losses)
    assert [[*p.values] for p in points if "loss" not in p.values] == [["val_loss"]]
    assert json.loads(job.progress.read_bytes().splitlines()[0])["total"] == 8
    assert job.state["step"] == 5
    assert (job.folder / "job" / "ready.1").exists()
    assert Path(job.state["checkpoint"]).name == "step-5-attempt-1"
    job.begin()
    fit(job, max_steps=8)
    assert job.state["step"] == 8
    assert Path(job.state["checkpoint"]).name == "done-0"


def fit(job: Job, stops: Any = (), **options: Any) -> pl.Trainer:
    trainer = trainer_of(job.folder, HpcschedCallback(), **options)
    try:
        trainer.fit(Net(job.seen, stops), loader(), loader(8, shuffle=False))
    except SystemExit as error:
        assert error.code == 75
    return trainer


def test_what_is_done_is_not_done_again(job: Job) -> None:
    """A program that ends after its fit, in a test or an export: the fit is over at once."""
    job.begin()
    fit(job, max_epochs=2)
    done = len(job.seen)
    job.begin()
    trainer = fit(job, max_epochs=2)
    assert len(job.seen) == done
    assert trainer.global_step == 20


def test_what_was_stopped_early_stays_so(job: Job) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 4

    for _ in range(2):
        job.begin()
        trainer = trainer_of(job.folder, Stop(), HpcschedCallback(), max_epochs=3)
        trainer.fit(Net(job.seen), loader())
        assert len(of(job.seen, "batch")) == 4


def test_a_second_fit_is_another_one(job: Job) -> None:
    """And goes on by itself, where the first one is not done again."""

    def program(stops: Any = ()) -> None:
        pl.seed_everything(7)
        callback = HpcschedCallback()
        model = Net(job.seen, stops)
        trainer_of(job.folder, callback, max_steps=6, logger=False).fit(model, loader())
        trainer_of(job.folder, callback, max_steps=5, logger=False).fit(model, loader())

    job.begin()
    with pytest.raises(SystemExit):
        program(stops=(8,))
    assert job.state["step"] == 8
    job.begin()
    program()
    assert job.state["step"] == 11
    steps = [one[3] for one in of(job.seen, "batch")]
    assert steps == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]


def test_signals_are_given_back(job: Job) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGTSTP)
    job.begin()
    fit(job, max_steps=1)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGTSTP)) == before


def test_a_stream_goes_on_with_its_first_samples_and_says_so(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job.through(stops=(3,), max_epochs=1, data=lambda: DataLoader(Stream(), batch_size=4))
    assert (
        "an IterableDataset has no order: a training that goes on begins its epoch" in capfd.readouterr().err
    )
    assert of(job.seen, "batch")[3][4] == [0, 1, 2, 3]


def test_a_checkpoint_that_cannot_be_written_ends_with_its_code(job: Job) -> None:
    job.begin()
    trainer = trainer_of(job.folder, HpcschedCallback(), max_steps=9)
    job.patch.setattr(pl.Trainer, "save_checkpoint", no_room)
    with pytest.raises(SystemExit) as error:
        trainer.fit(Net(job.seen, stops=(2,)), loader())
    assert error.value.code == 74


@pytest.mark.slow
def test_saved_after_each_step_it_is_the_same_training(job: Job) -> None:
    job.patch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "0")
    job.patch.setenv("HPCSCHED_KEEP", "2")
    job.through(max_steps=12)
    assert sorted(one.name for one in (job.folder / "job" / "checkpoint").iterdir()) == [
        *("done-0", "step-10-attempt-1", "step-11-attempt-1")
    ]
    job.patch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "600")
    two = other(job)
    two.through(max_steps=12)
    same(job, two)


def test_after_a_crash_what_was_logged_since_the_checkpoint_is_not_there_twice(job: Job) -> None:
    saved = lambda link: Wish.SAVE if link._record.step == 5 else Wish.NOTHING  # noqa: E731
    job.patch.setattr(Link, "wishes", saved)

    class Crash(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.trainer.global_step == 8 and job.attempts == 1:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ArithmeticError):
        job.through(model=Crash, max_steps=12)
    assert job.state["step"] == 5
    job.through(model=Crash, max_steps=12)
    assert [one[3] for one in of(job.seen, "batch")] == [*range(8), *range(5, 12)]
    two = other(job)
    two.through(max_steps=12)
    assert [row for row in job.logged["version_0"] if "," in row] == [
        row for row in two.logged["version_0"] if "," in row
    ]


@pytest.mark.slow
def test_a_checkpoint_that_is_written_in_a_thread_is_waited_for(job: Job) -> None:
    for stops in ((3,), ()):
        job.begin()
        fit(job, stops, max_steps=6, plugins=[pl.plugins.AsyncCheckpointIO()])
    assert [one[3] for one in of(job.seen, "batch")] == list(range(6))


@pytest.mark.slow
def test_a_fit_that_tunes_is_left_alone(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.tuner import Tuner

    class Tuned(Net):
        lr = 0.01

    job.begin()
    trainer = trainer_of(job.folder, HpcschedCallback(), max_steps=4)
    model = Tuned(job.seen)
    Tuner(trainer).lr_find(model, loader(), num_training=5)
    assert "BatchSizeFinder cannot be suspended" in capfd.readouterr().err
    assert not (job.folder / "job" / "STATE.json").exists()
    trainer.fit(model, loader())
    assert job.state["step"] == 4


@pytest.mark.slow
def test_a_checkpoint_of_another_job_goes_on_with_its_next_sample(job: Job) -> None:
    job.through(max_steps=13)
    last = next((job.folder / "logs").rglob("last.ckpt"))
    two = other(job)
    two.begin()
    pl.seed_everything(7)
    trainer = trainer_of(two.folder, HpcschedCallback(), max_steps=20)
    trainer.fit(Net(two.seen), loader(), ckpt_path=str(last))
    whole = Job(job.folder / "whole", job.patch)
    whole.through(max_steps=20)
    begun = of(two.seen, "batch")[0][3]
    assert begun in (12, 13)
    assert [one[4] for one in of(two.seen, "batch")] == [one[4] for one in of(whole.seen, "batch")][begun:]


@pytest.mark.slow
def test_a_compiled_model(job: Job) -> None:
    def compiled(*words: Any, **options: Any) -> Any:
        model = Net(*words, **options)
        model.net.compile(backend="eager")
        return model

    job.through(stops=(3, 7), max_steps=9, model=compiled)
    two = other(job)
    two.through(max_steps=9, model=compiled)
    same(job, two)


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("how", [{}, {"devices": "auto", "strategy": "auto"}])
@pytest.mark.parametrize(("here", "hosts"), [(2, 1), (1, 2), (1, 1), (4, 2)])
def test_auto_is_what_hpcsched_gives(job: Job, here: int, hosts: int, how: dict[str, Any]) -> None:
    job.begin()
    cpu = pl.accelerators.CPUAccelerator
    job.patch.setattr(cpu, "auto_device_count", staticmethod(cpu.auto_device_count))
    job.patch.setenv("PL_TRAINER_NUM_NODES", "1")
    job.patch.delenv("PL_TRAINER_NUM_NODES")
    told = {"RANK": here * hosts - 1, "WORLD_SIZE": here * hosts, "LOCAL_RANK": here - 1}
    told |= {"LOCAL_WORLD_SIZE": here, "GROUP_RANK": hosts - 1, "GROUP_WORLD_SIZE": hosts}
    for name, number in told.items():
        job.patch.setenv(name, str(number))
    job.patch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    trainer = trainer_of(job.folder, HpcschedCallback(), **how)
    assert (trainer.world_size, trainer.global_rank) == (here * hosts, here * hosts - 1)
    assert trainer.num_nodes == hosts


def test_without_hpcsched_nothing_changes(tmp_path: Path) -> None:
    seen: list[Any] = []
    pl.seed_everything(7)
    trainer_of(tmp_path, HpcschedCallback(), max_steps=3).fit(Net(seen), loader())
    others: list[Any] = []
    pl.seed_everything(7)
    trainer_of(tmp_path, max_steps=3).fit(Net(others), loader())
    assert seen == others


@pytest.mark.slow
def test_tensorboard_goes_on_in_its_folder(job: Job) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    for stops in ((2,), ()):
        job.begin()
        fit(job, stops, max_steps=4, logger=pl.loggers.TensorBoardLogger(job.folder / "logs"))
    versions = [one.name for one in (job.folder / "logs" / "lightning_logs").iterdir()]
    assert versions == ["version_0"]


@pytest.mark.slow
def test_by_lightning_cli_no_line_changes(job: Job) -> None:
    pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
    from lightning.pytorch.cli import LightningCLI

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

    for stops in ((4,), ()):
        job.begin()
        words = ["fit", "--trainer.callbacks=hpcsched.integrations.lightning.HpcschedCallback"]
        words += ["--trainer.max_steps=9", "--trainer.logger=false", "--trainer.accelerator=cpu"]
        words += [f"--trainer.default_root_dir={job.folder}", "--seed_everything=7"]

        class Model(Net):
            def __init__(self, stops: Any = stops) -> None:
                super().__init__(job.seen, stops)

        try:
            LightningCLI(Model, Data, args=words, save_config_callback=None)
        except SystemExit as error:
            assert error.code == 75
    assert [one[3] for one in of(job.seen, "batch")] == list(range(9))
    assert len({index for one in of(job.seen, "batch") for index in one[4]}) == 36
