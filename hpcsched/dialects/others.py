"""Programs that are known by the names in them: tutorials, and what began as one."""

from __future__ import annotations

import ast
import re
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
    """A loop with Accelerate that calls `save_state(f"out/step_{n}")`, and `load_state` of an option."""
    if "accelerate" not in script.packages or not script.called("Accelerator"):
        return None
    saves, loads = script.called("save_state"), script.called("load_state")
    if not saves or not loads:
        raise NotSure("it does not save and load its state")
    if script.called("ProjectConfiguration") or any(
        keyword(one, "project_dir") for one in script.called("Accelerator")
    ):
        raise NotSure("Accelerate chooses the names of its checkpoints")
    option = _loaded(script, loads)
    try:
        patterns = tuple(dict.fromkeys(_step_folder(script, call, one) for one in saves))
    except NotSure:
        patterns = _as_in_examples(script, call)
    registered = sum(len(one.args) for one in script.called("register_for_checkpointing"))
    restart = replace(
        KNOWN["accelerate"],
        checkpoints=patterns,
        complete=f"custom_checkpoint_{registered - 1}.pkl" if registered else KNOWN["accelerate"].complete,
        resume_args=(option, "{checkpoint}"),
    )
    return restart, f"{script.name} reads {option} and calls load_state, and saves only as it goes"


def _loaded(script: Script, loads: list[ast.Call]) -> str:
    """The option from which the state is loaded."""
    found = [
        script.option_of(leaf) for one in loads for value in one.args[:1] for leaf in script.leaves(value)
    ]
    # Transformers' examples look for the newest checkpoint where the option is empty.
    option = next((one for one in found if one), script.options.get("resume_from_checkpoint"))
    if option is None or not option.takes_text:
        raise NotSure("no option takes its checkpoint")
    return max(option.names, key=len)


def _step_folder(script: Script, call: Call, save: ast.Call) -> str:
    if len(save.args) != 1:
        raise NotSure("it saves where nobody sees")
    where, slash, name = script.pattern(save.args[0], call).rpartition("/")
    if not slash or not re.fullmatch(r"(step|epoch)_\*", name):
        raise NotSure("its checkpoints are not step_N")
    return f"{folder(where)}/{name}"


def _as_in_examples(script: Script, call: Call) -> tuple[str, ...]:
    """The folders of Accelerate's complete examples, and of Transformers' without Trainer."""
    steps = any(text.startswith("step_") for text in script.texts)
    if not script.options.keys() >= {"output_dir", "checkpointing_steps"} or not steps:
        raise NotSure("it has not the options of Accelerate's examples")
    if call.value("--checkpointing_steps") is None:
        raise NotSure("it saves no checkpoints without --checkpointing_steps")
    out = call.value("--output_dir")
    if out is None:
        raise NotSure("no --output_dir is in its command")
    return f"{folder(out)}/step_*", f"{folder(out)}/epoch_*"


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
