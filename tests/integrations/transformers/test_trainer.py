"""Transformers' Trainer: suspended and resumed, against one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

from hpcsched.errors import ConfigError
from hpcsched.integrations.transformers import HpcschedCallback, prepare_trainer
from hpcsched.integrations.transformers.note import Note
from tests.integrations.transformers.trainings import Job, StopAfter, Stream, make, plain, same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:mtime may not be reliable")]


@pytest.mark.parametrize(
    "how",
    [
        {"max_steps": -1, "num_train_epochs": 3},  # of 7 steps, the last of which has 2 samples
        {"eval_strategy": "steps", "eval_steps": 4},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
        {"eval_strategy": "epoch", "save_strategy": "no"},
        {"lr_scheduler_type": "linear", "max_grad_norm": 0.1, "weight_decay": 0.1, "logging_steps": 7},
        {"bf16": True},
        {"data": Stream(400)},
        {"data": Stream(400), "accelerator_config": {"dispatch_batches": True}},
        {"save_steps": 5, "save_total_limit": 1},
        {"metric_for_best_model": "loss", "load_best_model_at_end": True, "eval_strategy": "steps",
         "eval_steps": 5, "save_steps": 5, "save_total_limit": 1},
        {"logging_first_step": True, "logging_steps": 100},
        {"data_seed": 11, "seed": 5},
    ],
)  # fmt: skip
def test_whatever_the_arguments(job: Job, tmp_path: Path, how: dict[str, Any]) -> None:
    trainer = job.through(stops=(5, 7, 14), **how)
    one = plain(tmp_path / "plain", **how)
    same(trainer, one)
    assert job.seen == one.model.seen
    assert job.attempts == 4


@pytest.mark.parametrize("more", [{}, {"dataloader_persistent_workers": True}])
def test_workers_of_a_loader(job: Job, tmp_path: Path, more: dict[str, Any]) -> None:
    how = {"dataloader_num_workers": 2, **more}
    trainer = job.through(stops=(5, 14), **how)
    one = plain(tmp_path / "plain", **how)
    if not more:  # persistent ones draw no seed at the second epoch, new ones of a resumed attempt do
        same(trainer, one)
    assert job.seen == one.model.seen


def by_length() -> dict[str, Any]:
    if transformers.__version__ < "5":
        return {"group_by_length": True}
    return {"train_sampling_strategy": "group_by_length"}


def test_an_order_by_length_is_drawn_by_epoch(job: Job, tmp_path: Path) -> None:
    """By itself it would be another one after a resume from the second epoch on."""
    job.through(stops=(3, 10, 17), **by_length())
    other = Job(tmp_path / "other", job.patch)
    other.through(**by_length())
    assert job.seen == other.seen
    assert sorted(job.seen[:50]) == list(range(50))


def test_an_order_that_is_not_known_is_told(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.through(stops=(3,), accelerator_config={"use_seedable_sampler": False})
    assert "may be lost" not in capfd.readouterr().err  # in the first epoch it is the same
    other = Job(job.folder / "other", job.patch)
    other.through(stops=(10,), accelerator_config={"use_seedable_sampler": False})
    assert "use_seedable_sampler = False" in capfd.readouterr().err


def test_samples_that_come_again_are_told(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.through(stops=(3,), ignore_data_skip=True)
    assert "ignore_data_skip: samples of this epoch come again" in capfd.readouterr().err
    other = Job(job.folder / "other", job.patch)
    other.through(stops=(10,), data=Stream(50))
    assert "a dataset of unknown length, in pass 2" in capfd.readouterr().err


def test_what_belongs_to_the_end_of_an_epoch_is_done_before_it_leaves(job: Job) -> None:
    trainer = job.begin(stops=(7,), eval_strategy="epoch", save_strategy="epoch")
    assert job.train(trainer) is None
    assert job.state["step"] == 7
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [7]


def test_a_checkpoint_on_record_stays_while_its_step_is_saved_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of an epoch both strategies may save; a crash in the second must not cost the first."""
    trainer = job.begin(stops=(7,), eval_strategy="epoch", save_steps=7)
    saves = []

    def dies(*_: Any) -> None:
        saves.append(trainer.state.global_step)
        if len(saves) == 2:
            raise OSError("the disk is full")

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", dies)
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert saves == [7, 7] and left.value.code == 74
    assert Path(job.state["checkpoint"], "trainer_state.json").exists()
    assert checkpoints(job) == ["checkpoint-7"]
    again = job.begin()
    job.train(again)
    assert again.state.global_step == 20


def test_one_that_was_set_aside_when_the_attempt_died_is_there_again(job: Job) -> None:
    assert job.train(job.begin(stops=(7,), save_steps=7)) is None
    folder = job.folder / "out" / "checkpoint-7"
    aside = folder.rename(folder.with_name(".checkpoint-7"))
    (folder / "half").mkdir(parents=True)
    record = job.folder / "job" / "STATE.json"
    record.write_text(json.dumps({**job.state, "checkpoint": str(aside)}))
    again = job.begin(save_steps=7)
    assert Path(job.state["checkpoint"]) == folder and not (folder / "half").exists()
    assert job.train(again) is not None and again.state.global_step == 20
    assert checkpoints(job) == ["checkpoint-14", "checkpoint-20", "checkpoint-7"]


@pytest.mark.parametrize("every", ["0", "1000"])
@pytest.mark.parametrize("stops", [(), (7, 14)])
def test_what_the_arguments_ask_for_at_the_end_of_an_epoch_stays(
    job: Job, stops: tuple[int, ...], every: str
) -> None:
    """It is written once more, by us, when all that belongs to the epoch's end is done."""
    job.patch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", every)
    job.through(stops=stops, max_steps=17, save_steps=7)
    assert checkpoints(job) == ["checkpoint-14", "checkpoint-17", "checkpoint-7"]


def checkpoints(job: Job) -> list[str]:
    return sorted(one.name for one in (job.folder / "out").iterdir())


def test_a_checkpoint_has_the_arguments_of_the_program(job: Job) -> None:
    trainer = job.begin(stops=(3,), save_steps=5, save_total_limit=2)
    assert job.train(trainer) is None
    kept = torch.load(job.folder / "out" / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert (kept.save_strategy, kept.save_total_limit) == ("steps", 2)


def test_a_newer_checkpoint_that_is_not_on_record_is_left_alone(job: Job) -> None:
    trainer = job.begin(stops=(6,), save_steps=9)
    assert job.train(trainer) is None
    half = job.folder / "out" / "checkpoint-9"
    shutil.copytree(job.folder / "out" / "checkpoint-6", half)
    (half / "trainer_state.json").write_text('{"global_step"')
    (half / "rng_state_1.pth").write_text("of another world")
    again = job.begin(save_steps=9)
    assert job.train(again, resume_from_checkpoint=str(half)) is not None
    assert len(again.model.seen) == 2 + 50 + 48  # after step 6: the rest of the epoch, another one, 6 steps
    assert not (half / "rng_state_1.pth").exists()


@pytest.mark.parametrize("given", [True, "checkpoint-9"])
def test_what_the_script_resumes_from_has_to_be_whole(
    job: Job, given: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    half = job.folder / "out" / "checkpoint-9"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    trainer = job.begin()
    assert job.train(trainer, resume_from_checkpoint=given if given is True else str(half)) is not None
    assert f"{half} is not whole" in capfd.readouterr().err


def test_what_the_script_resumes_from_is_taken_at_first(job: Job) -> None:
    other = plain(job.folder / "before", max_steps=10, save_steps=10)
    assert other.state.global_step == 10
    trainer = job.begin(max_steps=20)
    job.train(trainer, resume_from_checkpoint=str(job.folder / "before" / "checkpoint-10"))
    assert (
        trainer.state.global_step == 20 and len(job.seen) == 26 + 48
    )  # the rest of the second epoch, 6 steps


def test_checkpoints_that_only_we_want_do_not_stay(job: Job) -> None:
    job.through(stops=(3, 5, 11), save_strategy="no")
    assert checkpoints(job) == ["checkpoint-20"]


def test_save_total_limit_counts_what_is_on_record(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last good checkpoint goes only when the next one is on record."""
    trainer = job.begin(save_steps=5, save_total_limit=1)
    there = []

    class Looks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            there.append([one.name for one in (job.folder / "out").iterdir()])

    def dies(note: Note, folder: Path) -> None:
        if trainer.state.global_step == 15:
            raise OSError("the disk is full")
        write(note, folder)

    trainer.add_callback(Looks())
    write = Note.write
    monkeypatch.setattr(Note, "write", dies)
    with pytest.raises(OSError, match="full"):
        trainer.train()
    assert there == [["checkpoint-5"], ["checkpoint-10"]]
    assert job.state["step"] == 10 and Path(job.state["checkpoint"], "trainer_state.json").exists()


def test_a_periodic_checkpoint(job: Job) -> None:
    job.patch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "0")
    trainer = job.begin(max_steps=6, save_strategy="no")
    steps = []

    class Looks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)

    trainer.add_callback(Looks())
    assert job.train(trainer) is not None
    assert steps == [1, 2, 3, 4, 5, 6]  # and the last one


def test_a_full_disk_ends_no_training(job: Job, monkeypatch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that only we want fails in a line, and the next one counts."""
    job.patch.setenv("HPCSCHED_CHECKPOINT_EVERY_S", "0")
    trainer = job.begin(max_steps=6, save_strategy="no")
    save = trainer._save_optimizer_and_scheduler

    def dies(*more: Any) -> None:
        if trainer.state.global_step in (1, 6):
            raise RuntimeError("the disk is full")
        save(*more)

    class Uploads(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            heard.append(checkpoints(job))

    heard: list[list[str]] = []
    trainer.add_callback(Uploads())
    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", dies)
    assert job.train(trainer) is not None
    said = capfd.readouterr().err
    for step in (1, 6):
        assert f"step {step}: periodic checkpoint failed, training goes on: RuntimeError: the disk" in said
    assert job.state["step"] == 5 and checkpoints(job) == ["checkpoint-5"]
    assert heard == [[f"checkpoint-{step}"] for step in (2, 3, 4, 5)]


@pytest.mark.parametrize("how", [{"save_strategy": "no"}, {"save_steps": 5}])
def test_a_full_disk_at_a_suspension(
    job: Job, how: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = job.begin(stops=(5,), **how)

    def dies(*_: Any) -> None:
        raise RuntimeError("the disk is full")

    trainer._save_rng_state = dies
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 74
    assert "step 5 could not be saved: RuntimeError: the disk is full" in capfd.readouterr().err
    assert not (job.folder / "job" / "STATE.json").exists() and not [*(job.folder / "out").iterdir()]


@pytest.mark.parametrize("stops", [(2,), (2, 3), (2, 6)])
def test_a_checkpoint_of_ours_is_not_the_best(job: Job, tmp_path: Path, stops: tuple[int, ...]) -> None:
    """Step 2 is the best one, but not saved: by itself the Trainer has no best model in the end."""
    how = {
        "max_steps": 10, "metric_for_best_model": "loss", "greater_is_better": True,
        "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4,
    }  # fmt: skip
    trainer = job.through(stops=stops, **how)
    one = plain(tmp_path / "plain", **how)
    assert trainer.state.best_global_step == one.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint is one.state.best_model_checkpoint is None
    same(trainer, one)


def test_prepared_twice_is_once(job: Job) -> None:
    trainer = job.begin()
    train = trainer.train
    assert prepare_trainer(trainer).train == train
    assert sum(isinstance(one, HpcschedCallback) for one in trainer.callback_handler.callbacks) == 1


def test_one_training_a_program(job: Job) -> None:
    trainer = job.begin()
    job.train(trainer)
    with pytest.raises(ConfigError, match=r"train\(\): a second training"):
        trainer.train()


def test_a_checkpoint_of_another_trainer_is_not_taken(job: Job, tmp_path: Path) -> None:
    assert job.train(job.begin(stops=(4,))) is None
    job.begin()
    with pytest.raises(ConfigError, match=r"output_dir: .*/elsewhere; accepted: .*/out"):
        prepare_trainer(make(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"save_only_model": True}, "save_only_model"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"then": lambda trainer: setattr(trainer, "is_fsdp_enabled", True)}, "fsdp: not supported"),
        (
            {"then": lambda trainer: setattr(trainer, "is_deepspeed_enabled", True)},
            "deepspeed: not",
        ),
        ({"then": lambda trainer: setattr(trainer, "train", lambda: None)}, "cannot resume"),
    ],
)
def test_what_is_not_supported_is_told_in_a_line(job: Job, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job.begin(**how)


def test_a_global_batch_is_kept_or_refused(job: Job) -> None:
    assert job.train(job.begin(stops=(4,))) is None
    job.attempts += 1
    trainer = make(job.folder / "out", per_device_train_batch_size=2)
    for name, value in job.environment().items():
        job.patch.setenv(name, value)
    prepare_trainer(trainer)
    assert trainer.args.gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match="global_batch: 16; accepted: 8, as it was"):
        prepare_trainer(make(job.folder / "out"), global_batch=16)


def test_callbacks_that_are_added_later_have_their_say(job: Job) -> None:
    trainer = job.begin(save_strategy="no")
    closed = []

    class Closes(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            closed.append(type(self).__name__)
            raise ConnectionError("the server is away")

    class Logger(Closes):
        __module__ = "transformers.integrations.of_a_kind"

    class Mine(Logger):
        """Made of it in a program."""

        __module__ = "program"

    trainer.add_callback(StopAfter((5,)))
    trainer.add_callback(Logger())
    trainer.add_callback(Mine())
    trainer.add_callback(Closes())  # may merge a model, or upload it: the training has not ended
    assert job.train(trainer) is None
    assert closed == ["Logger", "Mine"]
    assert job.state["step"] == 5


def test_early_stopping_ends_a_training(job: Job) -> None:
    trainer = job.through(
        callbacks=(EarlyStoppingCallback(1),), stops=(8,), learning_rate=0.0, metric_for_best_model="loss",
        load_best_model_at_end=True, eval_strategy="steps", eval_steps=4, save_steps=4,
    )  # fmt: skip
    assert job.attempts == 1 and trainer.state.global_step == 8


def test_stopped_early_it_does_not_train_on(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """Suspended in the evaluation behind train(), by which time the callback's patience is forgotten."""
    how = {
        "learning_rate": 0.0, "metric_for_best_model": "loss", "load_best_model_at_end": True,
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4,
    }  # fmt: skip
    trainer = job.begin(callbacks=(EarlyStoppingCallback(1),), **how)
    job.train(trainer)
    os.kill(os.getpid(), signal.SIGTSTP)
    with pytest.raises(SystemExit):
        trainer.evaluate()
    again = job.begin(callbacks=(EarlyStoppingCallback(1),), **how)
    result = job.train(again)
    assert again.state.global_step == result.global_step == 8 and again.model.seen == []
    assert "the training had ended before, after step 8" in capfd.readouterr().err


def test_a_note_of_an_older_version(job: Job) -> None:
    assert job.train(job.begin(stops=(4,), save_strategy="no")) is None
    note = job.folder / "out" / "checkpoint-4" / "hpcsched.json"
    table = json.loads(note.read_text())
    assert table.pop("stopped") is False
    note.write_text(json.dumps(table))
    again = job.begin(save_strategy="no")
    assert job.train(again) is not None and again.state.global_step == 20


def test_restored_callbacks_are_not_ours(job: Job, tmp_path: Path) -> None:
    how = {"restore_callback_states_from_checkpoint": True}
    trainer = job.through(stops=(5, 11), **how)
    same(trainer, plain(tmp_path / "plain"))


@pytest.mark.skipif(transformers.__version__ < "5", reason="enable_jit_checkpoint is of transformers 5")
def test_with_jit_checkpoints_it_leaves_at_once(job: Job, tmp_path: Path) -> None:
    trainer = job.through(stops=(5, 12), number=signal.SIGTERM, enable_jit_checkpoint=True)
    assert job.attempts == 3
    same(trainer, plain(tmp_path / "plain"))


def test_all_done_is_not_a_step_more(job: Job) -> None:
    """The Trainer itself does step 21 when it is resumed in the midst of an epoch, at the end."""
    job.train(job.begin(save_steps=10))
    again = job.begin(save_steps=10)
    result = job.train(again)
    assert again.state.global_step == result.global_step == 20 and again.model.seen == []
    assert result.training_loss == pytest.approx(2.2, abs=0.3)
    assert again.evaluate()["eval_loss"] < 2.5


@pytest.mark.parametrize("how", [{"save_steps": 10}, {"save_strategy": "no"}])
def test_it_leaves_an_evaluation_after_the_training(job: Job, how: dict[str, Any]) -> None:
    trainer = job.begin(**how)
    job.train(trainer)
    os.kill(os.getpid(), signal.SIGTSTP)
    with pytest.raises(SystemExit) as left:
        trainer.evaluate()
    assert left.value.code == 75


def test_a_logger_has_one_run(job: Job) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    job.through(stops=(5, 11), report_to=["tensorboard"])
    assert len({one.parent for one in job.folder.rglob("events.out.*")}) == 1
    assert len(list(job.folder.rglob("events.out.*"))) == 3


def test_ids_of_runs_go_from_attempt_to_attempt(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    class WandbCallback(TrainerCallback):
        """Has the name of the one that needs W&B."""

    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setitem(os.environ, name, "")  # is taken back after the test
        del os.environ[name]
    assert job.train(job.begin(stops=(5,), callbacks=(WandbCallback(),))) is None
    first = os.environ.pop("WANDB_RUN_ID")
    assert os.environ.pop("WANDB_RESUME") == "allow"
    assert job.train(job.begin(callbacks=(WandbCallback(),))) is not None
    assert os.environ["WANDB_RUN_ID"] == first


def test_a_note_that_makes_no_sense(job: Job) -> None:
    assert job.train(job.begin(stops=(4,))) is None
    note = job.folder / "out" / "checkpoint-4" / "hpcsched.json"
    assert json.loads(note.read_text())["global_batch"] == 8
    note.write_text("[]")
    with pytest.raises(ConfigError, match=r"hpcsched.json cannot be used"):
        job.begin()
