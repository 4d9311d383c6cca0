"""Boosting, round by round: what the adapters of XGBoost and LightGBM share."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcsched.errors import ConfigError
from hpcsched.integrations.metrics import Metrics
from hpcsched.ownership import make_private
from hpcsched.worker.link import Link, Wish
from hpcsched.worker.process.contract import say, write_atomically
from hpcsched.worker.process.metrics_log import Pace

_ABOUT = "trainings.json"

_POINTS_S = 0.05
"""Seconds between two points of evaluations, at least (chosen): rounds may take milliseconds."""

_PART = 0.1
"""The part of the time that saving at the ends of trainings may take: a program can make hundreds."""


@dataclass
class Training:
    """One of the trainings that the program makes: `done` rounds, their model, and what was evaluated.

    `history` is evaluations in the library's own form, of what JSON can hold. `best` is the best round,
    where the model does not say it. `ended`: it is over.
    """

    done: int = 0
    ended: bool = False
    best: int = 0
    history: Any = None
    model: bytes = field(default=b"", repr=False)


class Rounds:
    """All trainings of this process, in the order in which it makes them; `current()` is the one there is.

    A program that goes on makes the same calls anew: those that had ended give back what they ended with,
    and the one that was interrupted goes on. Signals are taken while one is made, not before and after it.
    """

    def __init__(self, link: Link) -> None:
        """Raises ConfigError where there are several processes, which would overwrite each other's files."""
        if link.world_size > 1:
            raise ConfigError(
                where="boosting",
                key="processes",
                got=f"{link.world_size} processes",
                accepted="one: processes = 1 in the job file",
            )
        self.link = link
        self._saved = _read(link.checkpoint) if link.checkpoint else []
        self._made: list[Training] = []
        self._saved_at = self._took = 0.0
        self._pace, self._total, self._logged = Pace(_POINTS_S), 0, 0

    def begin(self, total: int) -> Training:
        """The training of this call, of `total` rounds: as it was saved, or a new one."""
        at = len(self._made)
        self._total = self._step + total
        self._made.append(self._saved[at] if at < len(self._saved) else Training())
        self.link.close()
        if not self._made[-1].ended:
            self.link = Link()  # hears what is wanted from now on
        return self._made[-1]

    def ready(self) -> None:
        """This training can be suspended from now on; the program is one process, whatever devices it has."""
        self.link.ready(parallel=False)

    def never(self, why: str) -> None:
        """This training cannot be suspended: says why. Nothing is wanted of it, and SIGTERM ends it."""
        say(why)
        self.link.close()

    def after(self, training: Training, model: Callable[[], bytes], evaluated: Mapping[str, float]) -> None:
        """A round is done, and it was not the last one: report it, save when due, leave when asked to.

        `evaluated`: the round's evaluations by name; the last of them is taken for the loss. Raises
        SystemExit when it leaves.
        """
        step = self._step
        loss = [*evaluated.values()][-1] if evaluated else None
        self.link.report(step, loss, total=self._total)
        if self._pace.due():
            self._log(evaluated)
        wishes = self.link.wishes()
        if not wishes:
            return
        training.model = model()
        try:
            self._save(step)
        except OSError as error:
            if wishes & Wish.STOP:
                self.link.cannot_save(error)
            self.link.not_saved()
            say(f"round {step}: periodic checkpoint failed, training goes on: {error}")
        if wishes & Wish.STOP:
            self.link.leave()

    def end(self, training: Training, model: bytes, evaluated: Mapping[str, float]) -> None:
        """The training is over: `model` is what it gives to the program. Nothing is wanted any more."""
        step = self._step
        self.link.report(step, total=self._total)
        if not training.ended:
            if self._logged < step:
                self._log(evaluated)
            training.model, training.ended = model, True
            if (time.monotonic() - self._saved_at) * _PART >= self._took:
                try:
                    self._save(step)
                except OSError as error:
                    say(f"round {step}: the end of the training could not be saved: {error}")
        self.link.close()

    @property
    def _step(self) -> int:
        return sum(each.done for each in self._made)

    def _log(self, evaluated: Mapping[str, float]) -> None:
        self._logged = self._step
        Metrics(self.link).log(evaluated, self._logged)

    def _save(self, step: int) -> None:
        began = time.monotonic()
        folder, env = self.link.checkpoint_dir, self.link.env
        assert folder is not None and env is not None  # else nothing is wished
        make_private(folder)
        path = folder / f"round-{step:09d}.zip"
        write_atomically(path, _packed(self._made))
        self.link.saved(step, path)
        for old in sorted(folder.glob("round-*.zip"))[: -env.keep]:
            old.unlink()
        self._saved_at = time.monotonic()
        self._took = self._saved_at - began


@lru_cache(maxsize=1)
def current() -> Rounds:
    """The trainings of this process."""
    return Rounds(Link())


def _packed(trainings: list[Training]) -> bytes:
    """All of them as a zip file: the models, and one file that tells the rest."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        about = [
            {"done": each.done, "ended": each.ended, "best": each.best, "history": each.history}
            for each in trainings
        ]
        archive.writestr(_ABOUT, json.dumps(about))
        for at, each in enumerate(trainings):
            archive.writestr(f"{at}.model", each.model)
    return data.getvalue()


def _read(path: Path) -> list[Training]:
    with zipfile.ZipFile(path) as archive:
        about = json.loads(archive.read(_ABOUT))
        return [Training(**each, model=archive.read(f"{at}.model")) for at, each in enumerate(about)]
