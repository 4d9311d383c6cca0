"""Scripts with a `Trainer` or a `LightningCLI` of Lightning."""

from __future__ import annotations

import ast
from dataclasses import replace

from hpcsched.core.model import Restart
from hpcsched.dialects.command import Call, NotSure, folder
from hpcsched.dialects.known import KNOWN
from hpcsched.dialects.script import Script, constant, keyword, shown

_PACKAGES = ("lightning", "pytorch_lightning")


def speaks(script: Script, call: Call) -> tuple[Restart, str] | None:
    """How a script is restarted, and why that is sure; None where it is not Lightning's. Raises NotSure."""
    if script.packages.isdisjoint(_PACKAGES):
        return None
    if lines := _of_lightning(script, "LightningCLI"):
        return _command_line(script, call, lines)
    trainers = _of_lightning(script, "Trainer")
    if not trainers:
        return None
    if len(trainers) > 1:
        raise NotSure("it has Trainers twice")
    option = _resumes(script)
    callbacks = _of_lightning(script, "ModelCheckpoint")
    if any(script.truth(keyword(one, "save_weights_only"), call) for one in callbacks):
        raise NotSure("its checkpoints have no optimizer")
    if option is None and not any(constant(keyword(one, "save_last")) in (True, "link") for one in callbacks):
        raise NotSure("it keeps no last checkpoint")
    # Raised by its own SIGTERM handler, at the end of a batch.
    asked = any(script.truth(keyword(one, "save_on_exception"), call) for one in callbacks)
    restart = replace(
        KNOWN["lightning"],
        signal="SIGTERM" if asked else "",
        checkpoints=_folders(script, call, trainers[0], callbacks),
        resume_args=(option, "{checkpoint}") if option else (),
    )
    how = "saves when asked" if asked else "saves only as it goes (no save_on_exception)"
    why = f"reads {option}" if option else 'goes on from its "last" checkpoint'
    return restart, f"{script.name} {why}, and {how}"


def _of_lightning(script: Script, name: str) -> list[ast.Call]:
    return [call for call in script.called(name) if script.origin(call.func).partition(".")[0] in _PACKAGES]


def _resumes(script: Script) -> str | None:
    """The option that takes a checkpoint; None: it looks for its last one itself."""
    fits = [one for one in script.called("fit") if isinstance(one.func, ast.Attribute)]
    given = keyword(fits[0], "ckpt_path") if len(fits) == 1 else None
    if given is None:
        raise NotSure("not one call of fit() with ckpt_path")
    option, last = None, False
    for leaf in script.leaves(given):
        if isinstance(leaf, ast.Constant) and leaf.value in (None, "last"):
            last = last or leaf.value == "last"
        elif (found := script.option_of(leaf)) and found.takes_text:
            option, last = max(found.names, key=len), last or found.default == "last"
        else:
            raise NotSure(f"it goes on from {shown(leaf)}")
    if option is None and not last:
        raise NotSure("it does not go on from a checkpoint")
    return option


def _folders(script: Script, call: Call, trainer: ast.Call, callbacks: list[ast.Call]) -> tuple[str, ...]:
    """Patterns of its checkpoints. Without `dirpath` they are beside the logs of each start."""
    given = [keyword(one, "dirpath") for one in callbacks]
    if given and all(one is not None for one in given):
        folders = [folder(script.text(one, call)) for one in given if one is not None]
        return tuple(dict.fromkeys(f"{one}/*.ckpt" for one in folders))
    root = keyword(trainer, "default_root_dir")
    if len(callbacks) > 1 or any(given) or root is None:
        raise NotSure("its ModelCheckpoint has no dirpath")
    if constant(keyword(trainer, "logger")) is not False:
        raise NotSure("its checkpoints are in a new folder for each start: ModelCheckpoint has no dirpath")
    return (f"{folder(script.text(root, call))}/checkpoints/*.ckpt",)


def _command_line(script: Script, call: Call, lines: list[ast.Call]) -> tuple[Restart, str]:
    """LightningCLI's `fit`, with its own checkpoints (at the end of each epoch) and its own logger."""
    settings = {one.arg for one in lines[0].keywords}
    if len(lines) > 1 or not settings <= {"model_class", "datamodule_class", "seed_everything_default"}:
        raise NotSure("its LightningCLI has settings of its own")
    if call.args[:1] != ("fit",):
        raise NotSure("the command is not `fit`")
    names = {word.partition("=")[0] for word in call.args[1:] if word.startswith("-")}
    if any(name in ("-c", "--config") for name in names):
        raise NotSure("its settings are in a file")
    if any("callback" in name or "logger" in name or "checkpoint" in name for name in names):
        raise NotSure("its checkpoints are set in the command")
    root = folder(call.value("--trainer.default_root_dir") or ".")
    restart = replace(
        KNOWN["lightning"],
        checkpoints=(f"{root}/lightning_logs/version_*/checkpoints/*.ckpt",),
        resume_args=("--ckpt_path={checkpoint}",),
    )
    return restart, f"{script.name} is a LightningCLI, which reads --ckpt_path and saves after each epoch"
