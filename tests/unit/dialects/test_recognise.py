"""What a command is recognised to speak, and above all what it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcsched import jobfile
from hpcsched.core.model import Restart
from hpcsched.dialects import NAMES, recognise, restart_of, what_was_recognised, why_not
from hpcsched.dialects.script import MOST_BYTES

RUN_CLM = """
import os, sys
from dataclasses import dataclass
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

@dataclass
class ModelArguments:
    name: str = "x"

def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    trainer = Trainer(model=1, args=training_args)
    checkpoint = None
    if training_args.resume_from_checkpoint is not None:
        checkpoint = training_args.resume_from_checkpoint
    elif last_checkpoint is not None:
        checkpoint = last_checkpoint
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
"""

PLAIN_TRAINER = """
import argparse, os
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out", default="out")
args = parser.parse_args()
training = TrainingArguments(output_dir=args.out, max_steps=args.steps, enable_jit_checkpoint=True)
trainer = Trainer(args=training)
last = get_last_checkpoint(args.out) if os.path.isdir(args.out) else None
trainer.train(resume_from_checkpoint=last)
"""

SFT = """
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model="x", args=SFTConfig("runs/sft", save_steps=5))
import sys
from transformers.trainer_utils import get_last_checkpoint
trainer.train(resume_from_checkpoint=get_last_checkpoint("runs/sft"))
"""

LIT = """
import argparse
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
args = parser.parse_args()
trainer = L.Trainer(callbacks=[ModelCheckpoint(dirpath=args.out, save_last=True, save_on_exception=True)])
trainer.fit(1, 2, ckpt_path="last")
"""

CLI = """
from lightning.pytorch.cli import LightningCLI
from mine import Model, Data
def main():
    LightningCLI(Model, Data)
main()
"""

SNAPSHOT = """
import os, torch
class Trainer:
    def __init__(self, snapshot_path):
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            self.epochs_run = snapshot["EPOCHS_RUN"]
    def _save(self, epoch):
        torch.save({"MODEL_STATE": 1, "EPOCHS_RUN": epoch}, self.snapshot_path)
def main(snapshot_path: str = "snapshot.pt"):
    Trainer(snapshot_path)
"""

NANOGPT = """
out_dir = 'out'
init_from = 'scratch' # 'scratch' or 'resume' or 'gpt2*'
exec(open('configurator.py').read())
if init_from == 'scratch':
    pass
elif init_from == 'resume':
    ckpt_path = os.path.join(out_dir, 'ckpt.pt')
"""

ACCELERATE = """
import argparse
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=str, default=".")
parser.add_argument("--checkpointing_steps", type=str, default=None)
parser.add_argument("--resume_from_checkpoint", type=str, default=None)
args = parser.parse_args()
accelerator = Accelerator()
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
accelerator.save_state(f"step_{1}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = {
        "run_clm": RUN_CLM, "plain": PLAIN_TRAINER, "sft": SFT, "lit": LIT, "cli": CLI, "snap": SNAPSHOT,
        "gpt": NANOGPT, "acc": ACCELERATE,
    }  # fmt: skip
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def seen(folder: Path, line: str, **env: str) -> Restart | None:
    return recognise(line.split(), folder, env)


@pytest.mark.parametrize(
    ("line", "restart"),
    [
        (
            "python run_clm.py --output_dir o --enable_jit_checkpoint --gradient_accumulation_steps 4",
            Restart(
                speaks="transformers",
                recognised="run_clm.py reads --resume_from_checkpoint, and saves when asked",
                checkpoints=("o/checkpoint-*",),
                complete="trainer_state.json",
                resume_args=(
                    "--resume_from_checkpoint", "{checkpoint}",
                    "--gradient_accumulation_steps", "{accumulation}",
                ),
                batch="kept",
                accumulation=4,
            ),
        ),
        (
            "torchrun --nproc-per-node 2 run_clm.py --output-dir=o/ --deepspeed zero.json",
            Restart(
                speaks="transformers",
                recognised="run_clm.py reads --resume_from_checkpoint, and saves only as it goes"
                " (enable_jit_checkpoint is not set)",
                signal="",
                checkpoints=("o/checkpoint-*",),
                complete="trainer_state.json",
                resume_args=("--resume_from_checkpoint", "{checkpoint}"),
            ),
        ),
        (
            "python3 -u plain.py --steps 5",
            Restart(
                speaks="transformers",
                recognised="plain.py looks for its last checkpoint, and saves when asked",
                checkpoints=("out/checkpoint-*",),
                complete="trainer_state.json",
            ),
        ),
        (
            "python lit.py --out=runs/a",
            Restart(
                speaks="lightning",
                recognised='lit.py goes on from its "last" checkpoint, and saves when asked',
                checkpoints=("runs/a/*.ckpt",),
            ),
        ),
        (
            "python cli.py fit --trainer.default_root_dir runs --trainer.max_epochs=3",
            Restart(
                speaks="lightning",
                recognised="cli.py is a LightningCLI, which reads --ckpt_path and saves after each epoch",
                signal="",
                checkpoints=("runs/lightning_logs/version_*/checkpoints/*.ckpt",),
                resume_args=("--ckpt_path={checkpoint}",),
            ),
        ),
        (
            "torchrun --standalone snap.py 50 10",
            Restart(
                speaks="torchrun-snapshot",
                recognised="snap.py keeps MODEL_STATE and EPOCHS_RUN in snapshot.pt",
                signal="",
                checkpoints=("snapshot.pt",),
            ),
        ),
        (
            "python gpt.py --batch_size=4 --out_dir=big",
            Restart(
                speaks="nanogpt",
                recognised="gpt.py reads --init_from, and keeps ckpt.pt in big",
                signal="",
                checkpoints=("big/ckpt.pt",),
                resume_args=("--init_from=resume",),
            ),
        ),
        (
            "accelerate launch --num_processes=2 acc.py --output_dir o --checkpointing_steps 50",
            Restart(
                speaks="accelerate",
                recognised="acc.py reads --resume_from_checkpoint and calls load_state,"
                " and saves only as it goes",
                signal="",
                checkpoints=("o/step_*", "o/epoch_*"),
                complete="random_states_0.pkl",
                resume_args=("--resume_from_checkpoint", "{checkpoint}"),
            ),
        ),
    ],
)  # fmt: skip
def test_what_is_sure_is_recognised(folder: Path, line: str, restart: Restart) -> None:
    assert seen(folder, line) == restart


def test_the_folders_of_an_accelerate_loop(folder: Path) -> None:
    text = ACCELERATE.replace('f"step_{1}"', 'str(args.output_dir / f"step_{n}")').replace(
        "type=str", "type=Path"
    )
    text = (
        text.replace('default="."', 'default=Path("runs/a")')
        + "accelerator.register_for_checkpointing(a, b)\n"
    )
    (folder / "acc.py").write_text(text)
    found = seen(folder, "python acc.py")
    assert found and found.checkpoints == ("runs/a/step_*",)
    assert found.complete == "custom_checkpoint_1.pkl"
    (folder / "acc.py").write_text(text.replace("step_{n}", "{n}"))
    assert seen(folder, "python acc.py") is None


def test_a_setting_may_hang_on_a_condition(folder: Path) -> None:
    table = '**({"enable_jit_checkpoint": True} if new else {})'
    for old, new, good in (
        ("enable_jit_checkpoint=True", table, True),
        ("enable_jit_checkpoint=True", '**({"save_strategy": "no"} if new else {})', False),
        ("enable_jit_checkpoint=True", "**({**more} if new else {})", False),
    ):
        (folder / "t.py").write_text(PLAIN_TRAINER.replace(old, new))
        found = seen(folder, "python t.py")
        assert (found is not None and found.signal == "SIGTERM") == good


def test_what_is_built_on_a_trainer_is_one(folder: Path) -> None:
    found = seen(folder, "python sft.py")
    assert found and found.speaks == "transformers" and found.checkpoints == ("runs/sft/checkpoint-*",)


def test_an_attribute_of_a_class_is_no_name_of_the_program(tmp_path: Path) -> None:
    """`last` is a checkpoint there, and the newest loss of a callback here."""
    callback = (
        "import math\nclass Printing:\n    last = math.nan\n    def on_log(self, logs): self.last = 1\n"
    )
    (tmp_path / "train.py").write_text(callback + PLAIN_TRAINER)
    found = seen(tmp_path, "python train.py")
    assert found and found.speaks == "transformers"
    inside = PLAIN_TRAINER.replace("last = ", "class C:\n    last = math.nan\n    ", 1)
    (tmp_path / "train.py").write_text(inside.replace("\ntrainer.train(", "\n    trainer.train("))
    assert seen(tmp_path, "python train.py") is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "bash -c 'python plain.py'",
        "./plain.py",
        "python",
        "python -",
        "python -c pass",
        "python -m plain",
        "python {script}.py",
        "python missing.py",
        "srun python plain.py",
        "mpirun -np 2 python plain.py",
        "apptainer exec image.sif python plain.py",
        "deepspeed plain.py",
        "env A=1 torchrun plain.py",
        "python plain.py --out",
        "python plain.py --ou o",  # argparse would take it for --out
        "python plain.py --out ../elsewhere",
        "python plain.py --out ../elsewhere",
        "python plain.py --out o/{world_size}",
        "python plain.py --out o/*",
        "python run_clm.py",
        "python run_clm.py settings.json",
        "python run_clm.py --output_dir o --save_strategy no",
        "python run_clm.py --output_dir o --save_only_model",
        "python run_clm.py --output_dir o --enable_jit_checkpoint maybe",
        "python run_clm.py --output_dir o --gradient_accumulation_steps many",
        "python cli.py fit --config c.yaml",
        "python cli.py validate",
        "python cli.py fit --trainer.logger false",
        "python cli.py fit --trainer.callbacks+=ModelCheckpoint",
        "python gpt.py config/train.py",
        "accelerate launch acc.py --output_dir o",  # it would save nothing
        "python -m submitit.core._submit folder",
    ],
)
def test_what_is_not_sure_is_not(folder: Path, line: str) -> None:
    assert seen(folder, line) is None
    assert why_not(line.split(), folder, {})


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (PLAIN_TRAINER, "resume_from_checkpoint=last", "resume_from_checkpoint=True"),
        (PLAIN_TRAINER, "resume_from_checkpoint=last", ""),
        (PLAIN_TRAINER, "get_last_checkpoint(args.out)", "get_last_checkpoint('other')"),
        (PLAIN_TRAINER, "get_last_checkpoint(args.out)", "newest(args.out)"),
        (PLAIN_TRAINER, "output_dir=args.out", "output_dir=make(args.out)"),
        (PLAIN_TRAINER, "output_dir=args.out, ", ""),
        (PLAIN_TRAINER, "args = parser.parse_args()", "args = mine()"),
        (PLAIN_TRAINER, "training = Tr", "args.out = 1\ntraining = Tr"),
        (PLAIN_TRAINER, "enable_jit_checkpoint=True", "**more"),
        (PLAIN_TRAINER, "enable_jit_checkpoint=True", "enable_jit_checkpoint=f()"),
        (PLAIN_TRAINER, "enable_jit_checkpoint=True", "save_strategy='no'"),
        (PLAIN_TRAINER, "enable_jit_checkpoint=True", "save_only_model=True"),
        (PLAIN_TRAINER, "parser.add_argument(\"--out\", default=\"out\")", "parser.add_argument('--out')"),
        (PLAIN_TRAINER, "from transformers import", "from mine import"),
        (PLAIN_TRAINER, "trainer.train(", "trainer.train(resume_from_checkpoint=last)\ntrainer.train("),
        (RUN_CLM, "    trainer = ", "    training_args.output_dir = 'x'\n    trainer = "),
        (LIT, 'ckpt_path="last"', 'ckpt_path="best"'),
        (LIT, 'ckpt_path="last"', "ckpt_path=None"),
        (LIT, 'ckpt_path="last"', ""),
        (LIT, "save_last=True, ", ""),
        (LIT, "dirpath=args.out, ", ""),
        (LIT, "import lightning as L", "import other as L"),
        (LIT, "save_last=True", "save_last=True, save_weights_only=True"),
        (CLI, "Model, Data)", "Model, Data, run=False)"),
        (CLI, "Model, Data)", "Model, Data, trainer_defaults={})"),
        (SNAPSHOT, '"snapshot.pt"', "None"),
        (SNAPSHOT, '"snapshot.pt"', '"snapshot.pt", other="b.pt"'),
        (SNAPSHOT, "os.path.exists", "os.path.isn"),
        (NANOGPT, "out_dir = 'out'", "out_dir = f()"),
        (ACCELERATE, "load_state", "load"),
        (ACCELERATE, "Accelerator()", "Accelerator(project_dir='x')"),
        (LIT + PLAIN_TRAINER, "", ""),
        (PLAIN_TRAINER, "import argparse", "import argparse, hpcsched.integrations.transformers as h"),
    ],
)  # fmt: skip
def test_another_line_makes_it_unsure(tmp_path: Path, base: str, old: str, new: str) -> None:
    assert old in base
    text = base.replace(old, new)
    (tmp_path / "t.py").write_text(text)
    words = {RUN_CLM: ["--output_dir", "o"], CLI: ["fit"], ACCELERATE: ["--output_dir", "o"]}.get(base, [])
    words += ["--checkpointing_steps", "5"] if base is ACCELERATE else []
    assert recognise(["python", "t.py", *words], tmp_path, {}) is None


def test_a_folder_below_the_job_s_may_be_absolute(folder: Path) -> None:
    found = seen(folder, f"python plain.py --out {folder}/runs/a")
    assert found and found.checkpoints == ("runs/a/checkpoint-*",)


def test_a_folder_elsewhere_is_absolute(folder: Path) -> None:
    found = seen(folder, "python plain.py --out /scratch/me/a")
    assert found and found.checkpoints == ("/scratch/me/a/checkpoint-*",)


def test_submitit_only_where_it_would_not_requeue_the_batch_job(tmp_path: Path) -> None:
    line = "python -u -m submitit.core._submit jobs"
    found = seen(tmp_path, line, SUBMITIT_EXECUTOR="local", SUBMITIT_LOCAL_JOB_ID="7")
    assert found and (found.signal, found.saved_codes) == ("SIGUSR2", (144,))
    assert found.checkpoints == ("jobs/7_submitted.pkl",)
    assert seen(tmp_path, line, SUBMITIT_EXECUTOR="slurm", SUBMITIT_LOCAL_JOB_ID="7") is None


def test_a_value_that_comes_from_itself_ends(tmp_path: Path) -> None:
    loop = PLAIN_TRAINER.replace("last = get", "last = last or other\nother = last or other\nlast = get")
    (tmp_path / "t.py").write_text(loop)
    assert recognise(["python", "t.py"], tmp_path, {}) is not None
    wide = "\n".join(f"a{i} = a{i + 1} / a{i + 1}" for i in range(40))
    (tmp_path / "t.py").write_text(PLAIN_TRAINER.replace("args = parser", f"{wide}\nargs = parser").replace(
        "output_dir=args.out", "output_dir=a0"
    ))  # fmt: skip
    assert recognise(["python", "t.py"], tmp_path, {}) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\1\2" * 1000,
        b"\xff\xfe not text",
        b"# -*- coding: rot13 -*-\nx",
        b"def broken(:",
        b"(" * 100_000,
        b"a = " + b"-" * 100_000 + b"1",
        b"a = " + b"+".join([b"1"] * 50_000),
        b"x" * (MOST_BYTES + 1),
        PLAIN_TRAINER.encode() + b"\nb = " + b"[" * 150 + b"]" * 150,
    ],
)
def test_files_that_are_no_script_do_no_harm(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.py").write_bytes(content)
    found = recognise(["python", "t.py"], tmp_path, {})
    assert found is None or found.speaks == "transformers"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    for name in ("fifo.py", "folder.py", "loop.py", "zero.py", "a\0b.py", "x" * 300 + ".py"):
        assert recognise(["python", name], tmp_path, {}) is None


def test_a_script_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text(PLAIN_TRAINER)
    assert recognise(["python", "t.py"], tmp_path, {}) is not None
    path.write_text("print(1)")
    assert recognise(["python", "t.py"], tmp_path, {}) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_is_believed(tmp_path: Path, name: str) -> None:
    found = restart_of(name, ["bash", "train.sh"], tmp_path, {})
    assert found.speaks == name and found.checkpoints == () and not found.recognised


def test_what_is_said_is_filled_in_from_the_script(folder: Path) -> None:
    found = restart_of("transformers", ["python", "plain.py"], folder, {})
    assert found.checkpoints == ("out/checkpoint-*",) and found.signal == "SIGTERM"
    other = restart_of("lightning", ["python", "plain.py"], folder, {})
    assert other.speaks == "lightning" and other.checkpoints == ()


def test_what_was_recognised_is_told_once_for_all_jobs_of_which_it_is_so(folder: Path) -> None:
    table = {"command": ["python", "plain.py"], "workdir": str(folder)}
    jobs = [{"name": f"a{n}", **table} for n in range(5)]
    jobs += [{"name": "b", **table, "speaks": "none"}, {"name": "c", **table, "speaks": "transformers"}]
    specs = jobfile.parse({"schema": 1, "job": jobs}, where="x", workdir=folder).jobs
    assert [spec.restart is not None for spec in specs] == [True] * 5 + [False, True]
    (line,) = what_was_recognised(specs)
    assert line.startswith("a0, a1, a2 and 2 more: recognised to speak transformers: plain.py looks for")
