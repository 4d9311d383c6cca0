"""Scripts with a `Trainer` of Transformers, or of what is built on it (TRL)."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from hpcsched.core.model import Restart
from hpcsched.core.processes import KnownLauncher
from hpcsched.dialects.command import Call, NotSure, folder
from hpcsched.dialects.known import KNOWN
from hpcsched.dialects.script import Script, keyword, shown

_PACKAGES = ("transformers", "trl")
_PARSERS = ("HfArgumentParser", "TrlParser")
_RESUME = "--resume_from_checkpoint"

_OTHER_BATCH = frozenset({
    "accelerator_config", "auto_find_batch_size", "deepspeed", "fsdp", "group_by_length",
    "parallelism_config", "split_batches", "train_sampling_strategy",
})  # fmt: skip
"""Settings with which another number of GPUs needs more than another accumulation: shards, samplers."""


def speaks(script: Script, call: Call) -> tuple[Restart, str] | None:
    """How a script is restarted, and why that is sure; None where it has no Trainer. Raises NotSure."""
    if script.packages.isdisjoint(_PACKAGES) or not _has_trainer(script):
        return None
    parsed = bool(script.called(*_PARSERS))
    if parsed and call.value("--config") is not None:
        raise NotSure("its settings are in a file")
    arguments = _arguments(script)
    if parsed == bool(arguments):
        raise NotSure("its TrainingArguments come from more than one place, or from none")
    output = _output(script, call, arguments)
    if _text(script, call, arguments, "save_strategy") == "no":
        raise NotSure("it saves no checkpoints")
    if _truth(script, call, arguments, "save_only_model"):
        raise NotSure("its checkpoints have no optimizer")
    option, why = _resumes(script, call, arguments, output)
    if option is None and call.says("--overwrite_output_dir"):
        raise NotSure("it overwrites its output_dir")
    asked = _truth(script, call, arguments, "enable_jit_checkpoint")
    resume: tuple[str, ...] = (option, "{checkpoint}") if option else ()
    accumulates = _accumulation(script, call, arguments)
    if accumulates:
        resume += (accumulates[0], "{accumulation}")
    restart = replace(
        KNOWN["transformers"],
        signal="SIGTERM" if asked else "",
        checkpoints=(f"{output}/checkpoint-*",),
        resume_args=resume,
        batch="kept" if accumulates else "fixed",
        accumulation=accumulates[1] if accumulates else 1,
    )
    how = "saves when asked" if asked else "saves only as it goes (enable_jit_checkpoint is not set)"
    return restart, f"{script.name} {why}, and {how}"


def _has_trainer(script: Script) -> bool:
    called = (one for name, calls in script.by_name.items() if name.endswith("Trainer") for one in calls)
    origins = [*script.imported.values(), *(script.origin(call.func) for call in called)]
    return any(origin.endswith("Trainer") and origin.partition(".")[0] in _PACKAGES for origin in origins)


def _arguments(script: Script) -> list[ast.Call]:
    """The calls that make TrainingArguments, or what is derived from them."""
    return [
        call
        for name, calls in script.by_name.items()
        if name.endswith(("TrainingArguments", "Config"))
        for call in calls
        if (origin := script.origin(call.func)).startswith("trl.")
        or (origin.startswith("transformers.") and name.endswith("TrainingArguments"))
    ]


def _output(script: Script, call: Call, arguments: list[ast.Call]) -> str:
    if "output_dir" in script.set_attributes:
        raise NotSure("its output_dir is changed")
    if not arguments:
        found = call.value(*_spelt("output_dir"))
        if found is None:
            raise NotSure("no --output_dir is in its command")
        return folder(found)
    if len(arguments) > 1:
        raise NotSure("it has TrainingArguments twice")
    value = keyword(arguments[0], "output_dir")
    if value is None and arguments[0].args:
        value = arguments[0].args[0]
    if value is None:
        raise NotSure("its TrainingArguments have no output_dir")
    return folder(script.text(value, call))


def _text(script: Script, call: Call, arguments: list[ast.Call], name: str) -> str | None:
    """A setting of its TrainingArguments; None if nothing is said."""
    if not arguments:
        return call.value(*_spelt(name))
    value = keyword(arguments[0], name)
    return None if value is None else script.text(value, call)


def _truth(script: Script, call: Call, arguments: list[ast.Call], name: str) -> bool:
    """Whether a flag of its TrainingArguments is set."""
    if not arguments:
        return call.says(*_spelt(name))
    return script.truth(keyword(arguments[0], name), call)


def _resumes(script: Script, call: Call, arguments: list[ast.Call], output: str) -> tuple[str | None, str]:
    """The option that takes a checkpoint (None: the script looks for its newest one), and how it is known."""
    given = [
        value for one in script.called("train")
        if isinstance(one.func, ast.Attribute)
        and (value := keyword(one, "resume_from_checkpoint"))
    ]  # fmt: skip
    if len(given) != 1:
        raise NotSure("not one call of train() with resume_from_checkpoint")
    option: str | None = None
    finds = False
    for leaf in script.leaves(given[0]):
        if isinstance(leaf, ast.Constant) and leaf.value is None:
            continue
        if isinstance(leaf, ast.Call) and script.name_of(leaf.func) == "get_last_checkpoint":
            finds = _is_output(script, call, leaf, arguments, output)
        elif isinstance(leaf, ast.Attribute) and (found := script.option_of(leaf)) and found.takes_text:
            option = max(found.names, key=len)
        elif (
            isinstance(leaf, ast.Attribute)
            and leaf.attr == "resume_from_checkpoint"
            and not arguments
            and leaf.attr not in script.set_attributes
        ):
            option = _RESUME
        else:
            raise NotSure(f"it resumes from {shown(leaf)}")
    if option:
        return option, f"reads {option}"
    if finds:
        return None, "looks for its last checkpoint"
    raise NotSure("it does not resume")


def _is_output(script: Script, call: Call, found: ast.Call, arguments: list[ast.Call], output: str) -> bool:
    """Whether `get_last_checkpoint` looks where it saves."""
    where = found.args[0] if found.args else None
    its = isinstance(where, ast.Attribute) and where.attr == "output_dir"  # of its TrainingArguments
    if where is not None and its and (not arguments or not script.option_of(where)):
        return True
    if where is None or script.text(where, call).rstrip("/") != output:
        raise NotSure("it looks for checkpoints elsewhere")
    return True


def _spelt(name: str) -> tuple[str, ...]:
    return f"--{name}", f"--{name.replace('_', '-')}"


def _accumulation(script: Script, call: Call, arguments: list[ast.Call]) -> tuple[str, int] | None:
    """The option of gradient accumulation and its value, where that alone keeps the global batch."""
    words = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in call.args}
    settings = {one.arg for one in arguments[0].keywords} if arguments else set()
    if call.launcher == KnownLauncher.ACCELERATE or _OTHER_BATCH & (words | settings):
        return None
    names, default = _spelt("gradient_accumulation_steps"), "1"
    if arguments:
        value = keyword(arguments[0], "gradient_accumulation_steps")
        option = script.option_of(value) if value is not None else None
        if option is None or option.default is None:
            return None
        names, default = option.names, option.default
    text = call.value(*names) or default
    if not re.fullmatch("[0-9]{1,6}", text) or not int(text):
        raise NotSure("its gradient accumulation is no number")
    return max(names, key=len), int(text)
