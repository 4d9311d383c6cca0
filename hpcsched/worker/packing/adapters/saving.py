"""Adapters on disk: a checkpoint without what is frozen, and the adapter as PEFT reads it."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from hpcsched.worker.process.contract import say


def write_adapter(model: nn.Module, folder: Path) -> None:
    """Write a model's adapter in place of the one that is there; if that fails, it is said."""
    peft_model: Any = next((module for module in model.modules() if hasattr(module, "peft_config")), None)
    if peft_model is None or not hasattr(peft_model, "save_pretrained"):
        return
    new, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "old"))
    try:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        # PEFT would ask its hub whether the vocabulary has grown.
        peft_model.save_pretrained(str(new), save_embedding_layers=False)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # whatever PEFT raises: the checkpoint is what counts
        shutil.rmtree(new, ignore_errors=True)  # half of one takes the room that the checkpoint may need
        say(f"the adapter could not be written to {folder}: {error}")
