"""Sharded trainings (FSDP2, tensor parallel), saved by torch.distributed.checkpoint (DCP), on any ranks.

    elastic = Elastic({"state": state}, step=start)
    for step in range(elastic.step + 1, steps + 1):
        ...
        elastic.after(step, loss)

`state` is what `torch.distributed.checkpoint.save` takes: objects with `state_dict` and `load_state_dict`,
whose tensors are DTensors, or the same on all ranks (PyTorch tutorial "Getting Started with Distributed
Checkpoint").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hpcsched.integrations import leaving
from hpcsched.integrations.agreement import Agreement
from hpcsched.integrations.metrics import Metrics
from hpcsched.worker.checkpoint.plain_dcp import PlainReader
from hpcsched.worker.link import Link, Wish
from hpcsched.worker.process.contract import say

_RNG = "hpcsched.rng"


class Elastic:
    """A loop over the same sharded state on all ranks of the default process group.

    Args:
        state: as for `dcp.save`, filled in place where there is a checkpoint to go on from.
        step: how many steps are done in what `state` holds now, by a checkpoint of the program's own; it
            stays if it is newer than hpcsched's.
        samples: samples of one step (the global batch), if it never changes.
        total: the steps of the whole work, so that `hpcsched status` knows the time left.

    A checkpoint of any number of ranks is resharded to those that there are. The random numbers of a rank go
    on where they were if there are as many ranks as before; else each rank keeps the seed that the program
    has given it, and rank 0 says so. Raises what `dcp.load` raises.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        step: int = 0,
        samples: int | None = None,
        total: int | None = None,
    ) -> None:
        self.step = step
        """How many steps are done: go on with the next one."""
        self._state, self._samples, self._total = dict(state), samples, total
        self._link, self._agree = Link(), Agreement()
        self._metrics = Metrics(self._link)
        found = self._link.checkpoint
        if found is not None and self._link.step > step:
            names = PlainReader(found).read_metadata().state_dict_metadata
            before = sum(name.startswith(f"{_RNG}.cpu.") for name in names)
            rng = _random_state() if before == self._ranks else {}
            load({**self._state, **rng}, storage_reader=PlainReader(found))
            _restore_random(rng)
            self.step = self._link.step
            if not rng and self._link.rank == 0:
                say(f"{before} ranks have become {self._ranks}: their random numbers begin with your seed")
        self._link.ready()

    def after(self, step: int, loss: SupportsFloat | None = None) -> None:
        """Say that `step` steps are done; all ranks call it after each step.

        Saves when that is due. When asked to, saves and leaves: raises SystemExit, on all ranks after the
        same step; not after the last one, where the job file says which that is (`steps`).
        """
        self.step = step
        self._link.report(step, loss, total=self._total)
        self._metrics.at_pace({"loss": loss}, step)
        wishes = self._agree(self._link.wishes())
        if not wishes or not self._link.active:
            return
        leave = bool(wishes & Wish.STOP) and step != self._link.steps
        try:
            self._save(step)
        except Exception as error:  # of a storage of any kind
            if leave:
                leaving.cannot_save(self._link, error)
            self._link.not_saved()
            if self._link.rank == 0:
                say(f"periodic checkpoint failed, training goes on: {error}")
        if leave:
            leaving.leave(self._link)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name after `step` steps (default: those told by `after`), into the job's metrics.
        A loss that `after` is given is logged without it."""
        self._metrics.log(metrics, self.step if step is None else step)

    def finish(self, metrics: Mapping[str, float] | None = None) -> None:
        """Put the results of the training on record. It need not be called."""
        self._link.finish(metrics)

    def _save(self, step: int) -> None:
        place = self._link.place(step)
        save({**self._state, **_random_state()}, checkpoint_id=place)
        samples = None if self._samples is None else self._samples * step
        self._link.saved(step, place, samples=samples)

    @property
    def _ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1


def _random_state() -> dict[str, torch.Tensor]:
    """The state of this rank's random generators, under names of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {f"{_RNG}.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"{_RNG}.cuda.{rank}"] = torch.cuda.get_rng_state()
    return found


def _restore_random(found: Mapping[str, torch.Tensor]) -> None:
    for name, state in found.items():
        if name.startswith(f"{_RNG}.cuda."):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)
