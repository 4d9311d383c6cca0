"""The boundary between two steps of torch trainings: all ranks save, or leave, together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcsched.integrations import leaving
from hpcsched.integrations.agreement import Agreement
from hpcsched.integrations.metrics import Metrics
from hpcsched.worker.link import Link, Wish
from hpcsched.worker.process.contract import say


class Boundary:
    """What all ranks do after each step: `made`, and `act` before the next one.

    Args:
        link: of this rank.
        save: writes this rank's part of the state into a folder that is there; may raise anything.
    """

    def __init__(self, link: Link, save: Callable[[Path], None]) -> None:
        self._link, self._save = link, save
        self._agree = Agreement()
        self._step, self._acted = 0, True
        self.metrics = Metrics(link)

    def made(self, step: int, values: Mapping[str, Any] | None = None, *, total: int | None = None) -> None:
        """`step` steps are made, of `total` where that is known, and `act` is to follow. `values` are what is
        to be logged by name, a loss among them, if it is time."""
        self._step, self._acted = step, False
        values = values or {}
        self._link.report(step, values.get("loss"), total=total)
        self.metrics.at_pace(values, step)

    def act(self) -> None:
        """Save or leave if any rank is to; nothing where no step was made since.

        Raises SystemExit: 75 once saved, 74 if it could not be; LaunchError if another rank is lost.
        """
        if self._acted:
            return
        step, self._acted = self._step, True
        wish = self._agree(self._link.wishes())
        error = self._save_all(step) if wish else ""
        if wish & Wish.STOP:
            if error:
                leaving.cannot_save(self._link, error)
            leaving.leave(self._link)
        if error:
            self._link.not_saved()
            if self._link.rank == 0:
                say(f"step {step}: periodic checkpoint failed, training goes on: {error}")

    def end(self, step: int) -> None:
        """After the last step: save, so that what follows begins here if it is ended; nothing is wanted any
        more. Raises SystemExit(74) if it cannot be saved."""
        if error := self._save_all(step):
            leaving.cannot_save(self._link, error)
        self._agree.close()
        self._link.close()

    def _save_all(self, step: int) -> str:
        """All ranks save; returns what went wrong, on all of them, or nothing."""
        link = self._link
        if link.checkpoint is not None and link.step == step:
            return ""
        error, folder = "", link.place(step)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)  # by all ranks: each host may see it a while later
            self._save(folder)
        except Exception as problem:  # of any library that writes: other ranks must not wait for this one
            error = f"{type(problem).__name__}: {problem}"
            say(f"rank {link.rank}: {error}")
        if self._agree.any(bool(error)):
            if link.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            return error or "another rank could not write its part"
        try:
            link.saved(step, folder)
        except OSError as problem:
            error = str(problem)
        return "rank 0 could not put it on record" if self._agree.any(bool(error)) else ""


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself, whose names of parameters do not depend on the number of ranks."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), torch.nn.Module):  # torch.compile's
            model = inner
        else:
            return model
