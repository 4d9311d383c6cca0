"""The facts in docs/dialects.md, with the frameworks themselves: what is caught and saved, how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcsched.core.model import JobSpec, Kind, Restart
from hpcsched.dialects import progress_of, recognise, step_of

pytestmark = [pytest.mark.slow, pytest.mark.torch]

WITHIN_S = 120.0

TRANSFORMERS = """
import argparse, os, time, torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()
class Tokens(Dataset):
    x = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(0))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return {"input_ids": self.x[i], "labels": self.x[i]}
class Print(TrainerCallback):
    def on_step_end(self, args, state, control, **k): time.sleep(0.05)
    def on_log(self, args, state, control, logs=None, **k):
        if "loss" in logs: print("step", state.global_step, "loss", repr(float(logs["loss"])), flush=True)
set_seed(1)
args = TrainingArguments(output_dir="out", max_steps=options.steps, per_device_train_batch_size=8,
    logging_steps=1, save_steps=100000, report_to="none", use_cpu=True, enable_jit_checkpoint=True)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
    bos_token_id=0, eos_token_id=0))
last = get_last_checkpoint("out") if os.path.isdir("out") else None
trainer = Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[Print()])
done = trainer.train(resume_from_checkpoint=last)
print("done step", done.global_step)
"""

LIGHTNING = """
import argparse, time, torch, lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--on-exception", action="store_true")
options = parser.parse_args()
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
    def training_step(self, batch, i):
        time.sleep(0.05)
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        print("step", self.global_step + 1, "loss", repr(loss.item()), flush=True)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
saves = ModelCheckpoint(dirpath="out", every_n_train_steps=20, save_last=True,
    save_on_exception=options.on_exception)
trainer = L.Trainer(max_steps=options.steps, accelerator="cpu",
    logger=CSVLogger("out", flush_logs_every_n_steps=5),
    log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, callbacks=[saves])
x, y = torch.randn(512, 16), torch.randint(0, 4, (512,))
trainer.fit(Lit(), DataLoader(TensorDataset(x, y), batch_size=8), ckpt_path="last")
print("done step", trainer.global_step)
"""

SUBMITIT = """
import sys, time
from pathlib import Path
from submitit.core.utils import JobPaths
from submitit.helpers import DelayedSubmission
class Train:
    def __call__(self, first=0):
        for self.done in range(first, 200):
            time.sleep(0.05)
            print("step", self.done + 1, "loss 1", flush=True)
    def checkpoint(self, first=0):
        return DelayedSubmission(Train(), self.done)
if __name__ == "__main__":
    import train
    job = DelayedSubmission(train.Train(), 0)
    job.set_timeout(60, 3)
    path = JobPaths("jobs", "1", 0).submitted_pickle
    path.parent.mkdir()
    job.dump(path)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    caught: bool
    steps: list[int]
    last: str


def run(folder: Path, *words: str, sig: int = 0, at: int = 0, **env: str) -> Ended:
    """Run a program; once it has done step `at`, send it a signal."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **env}
    with (folder / "output").open("wb") as output:
        program = subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdout=output, stderr=output, env=environ
        )
    ends, caught = time.monotonic() + WITHIN_S, False
    try:
        while program.poll() is None:
            assert time.monotonic() < ends, (folder / "output").read_text()[-2000:]
            if at and f"step {at} " in (folder / "output").read_text():
                mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{program.pid}/status").read_text())
                caught = mask is not None and bool(int(mask[1], 16) >> sig - 1 & 1)
                program.send_signal(sig)
                at = 0
            time.sleep(0.02)
    finally:
        program.kill()
        program.wait()
    text = (folder / "output").read_text()
    steps = [int(found) for found in re.findall(r"\bstep (\d+) loss", text)]
    return Ended(program.returncode, caught, steps, text.strip().rpartition("\n")[2])


def _job(spoken: Restart) -> JobSpec:
    return JobSpec(name="a", kind=Kind.COMMAND, model="a", command=("x",), restart=spoken)


def test_transformers_saves_three_seconds_after_sigterm_and_ends_with_0(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which its Trainer needs, is not installed")
    (tmp_path / "train.py").write_text(TRANSFORMERS)
    spoken = recognise(["python", "train.py"], tmp_path, {})
    assert spoken is not None and (spoken.speaks, spoken.signal) == ("transformers", "SIGTERM")
    steps = progress_of(_job(spoken), tmp_path, tmp_path / "output", since=time.time())
    cut = run(tmp_path, "train.py", "--steps", "1000", sig=signal.SIGTERM, at=7)
    assert (cut.code, cut.caught) == (0, True)
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    step = step_of(saved)
    assert step is not None and step > 7 and cut.steps[-1] in (step, step + 1)  # one more is done, and lost
    order = sorted(saved.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert order[-1].name == spoken.complete
    seen = steps.read(time.time())
    assert seen is not None and seen[0] in (step, step + 1)
    on = run(tmp_path, "train.py", "--steps", str(step + 5))
    assert on.steps == list(range(step + 1, step + 6)) and on.code == 0


@pytest.mark.parametrize(
    ("sig", "options", "code", "caught", "saved"),
    [
        (
            signal.SIGTERM,
            [],
            0,
            True,
            20,
        ),  # caught, but nothing is saved: only an earlier checkpoint is there
        (signal.SIGTERM, ["--on-exception"], 0, True, 27),
        (signal.SIGUSR1, ["--on-exception"], -signal.SIGUSR1, False, 20),
    ],
)
def test_lightning_outside_slurm(
    tmp_path: Path, sig: int, options: list[str], code: int, caught: bool, saved: int
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    (tmp_path / "train.py").write_text(LIGHTNING)
    spoken = recognise(["python", "train.py", *options], tmp_path, {})
    assert spoken is not None and spoken.speaks == "lightning"
    assert spoken.signal == ("SIGTERM" if options else "")
    steps = progress_of(_job(spoken), tmp_path, tmp_path / "output", since=time.time())
    cut = run(tmp_path, "train.py", "--steps", "1000", *options, sig=sig, at=27)
    assert (cut.code, cut.caught) == (code, caught)
    last = step_of(tmp_path / "out/last.ckpt")
    assert last is not None and (last >= saved if saved == 27 else last == saved)
    assert (seen := steps.read(time.time())) is not None and seen[0] >= 20
    on = run(tmp_path, "train.py", "--steps", str(last + 5), *options)
    assert on.steps == list(range(last + 1, last + 6)) and on.code == 0


def test_submitit_outside_slurm_saves_into_its_pickle_and_ends_with_144(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    (tmp_path / "train.py").write_text(SUBMITIT)
    env = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "1", "PYTHONPATH": str(tmp_path)}
    assert run(tmp_path, "train.py", **env).code == 0
    words = ["-u", "-m", "submitit.core._submit", "jobs"]
    spoken = recognise(["python", *words], tmp_path, env)
    assert spoken is not None and spoken.checkpoints == ("jobs/1_submitted.pkl",)
    assert [path.name for path in tmp_path.glob(spoken.checkpoints[0])] == ["1_submitted.pkl"]
    cut = run(tmp_path, *words, sig=signal.SIGUSR2, at=7, **env)
    assert (cut.code, cut.caught) == (144, True) and spoken.saved_codes == (144,)
    on = run(tmp_path, *words, sig=signal.SIGKILL, at=cut.steps[-1] + 5, **env)
    assert on.steps[0] in (cut.steps[-1], cut.steps[-1] + 1)
