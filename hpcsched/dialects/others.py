"""Programs that are known by the names in them: tutorials, and what began as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hpcsched.core.model import Restart
from hpcsched.dialects.command import Call, NotSure, folder
from hpcsched.dialects.known import KNOWN
from hpcsched.dialects.script import Script, keyword


def torchrun_snapshot(script: Script, call: Call) -> tuple[Restart, str] | None:
    """PyTorch's tutorial of torchrun: `MODEL_STATE` and `EPOCHS_RUN` in a file that it looks for."""
    if not script.texts >= {"MODEL_STATE", "EPOCHS_RUN"}:
        return None
    files = {text for text in script.texts if text.endswith(".pt")}
    if not (script.called("exists") and script.called("load") and script.called("save")) or len(files) != 1:
        raise NotSure("its snapshot is not one plain file")
    file = folder(files.pop())
    restart = replace(KNOWN["torchrun-snapshot"], checkpoints=(file,))
    return restart, f"{script.name} keeps MODEL_STATE and EPOCHS_RUN in {file}"


def nanogpt(script: Script, call: Call) -> tuple[Restart, str] | None:
    """nanoGPT's train.py: `ckpt.pt` in `out_dir`, and `--init_from=resume`."""
    if not script.texts >= {"ckpt.pt", "resume", "scratch", "configurator.py"}:
        return None
    if any(not word.startswith("--") for word in call.args):
        raise NotSure("its settings are in a file")
    given = script.assigned.get("out_dir", [])
    if len(given) != 1 or len(script.assigned.get("init_from", [])) != 1:
        raise NotSure("its out_dir is not plain")
    out = next((word[10:] for word in reversed(call.args) if word.startswith("--out_dir=")), None)
    out = folder(script.text(given[0], call) if out is None else out)
    restart = replace(KNOWN["nanogpt"], checkpoints=(f"{out}/ckpt.pt",))
    return restart, f"{script.name} reads --init_from, and keeps ckpt.pt in {out}"


def accelerate(script: Script, call: Call) -> tuple[Restart, str] | None:
    """Accelerate's complete examples, and Transformers' without Trainer: `step_N` in `output_dir`."""
    if not any(origin == "accelerate.Accelerator" for origin in script.imported.values()):
        return None
    known = script.options
    if not (script.called("save_state") and script.called("load_state")):
        raise NotSure("it does not save and load its state")
    if not known.keys() >= {"output_dir", "checkpointing_steps", "resume_from_checkpoint"}:
        raise NotSure("it has not the options of Accelerate's examples")
    if not known["resume_from_checkpoint"].takes_text or not any(t.startswith("step_") for t in script.texts):
        raise NotSure("its checkpoints are not step_N")
    if script.called("ProjectConfiguration") or any(
        keyword(one, "project_dir") for one in script.called("Accelerator")
    ):
        raise NotSure("Accelerate chooses the names of its checkpoints")
    if call.value("--checkpointing_steps") is None:
        raise NotSure("it saves no checkpoints without --checkpointing_steps")
    out = call.value("--output_dir")
    if out is None:
        raise NotSure("no --output_dir is in its command")
    patterns = (f"{folder(out)}/step_*", f"{folder(out)}/epoch_*")
    resume = ("--resume_from_checkpoint", "{checkpoint}")
    restart = replace(KNOWN["accelerate"], checkpoints=patterns, resume_args=resume)
    return restart, f"{script.name} reads --resume_from_checkpoint and calls load_state"


def submitit(call: Call, env: Mapping[str, str]) -> tuple[Restart, str] | None:
    """A job of submitit's local executor that is started as it would itself: it saves into its own pickle."""
    if call.module != "submitit.core._submit":
        return None
    job = env.get("SUBMITIT_LOCAL_JOB_ID")
    if env.get("SUBMITIT_EXECUTOR") != "local" or not job or len(call.args) != 1:
        raise NotSure("submitit would requeue the batch job: SUBMITIT_EXECUTOR is not local")
    pattern = f"{folder(call.args[0])}/{folder(job)}_submitted.pkl"
    restart = replace(KNOWN["submitit"], checkpoints=(pattern,))
    return restart, "submitit's local executor calls checkpoint() on SIGUSR2"


BY_SCRIPT: tuple[Callable[[Script, Call], tuple[Restart, str] | None], ...] = (
    accelerate,
    nanogpt,
    torchrun_snapshot,
)
