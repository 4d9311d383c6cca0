"""A training as one rank has it: its state, and how that is saved and taken up again."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Protocol, Union

import torch

from hpcsched.contract import exits
from hpcsched.errors import ConfigError, StoreError
from hpcsched.worker.checkpoint.saving import Saves
from hpcsched.worker.checkpoint.shared_memory import Held
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import JobEnv, Progress, say
from hpcsched.worker.process.startup import exit_quickly
from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.ranks.reproducible import VirtualShards
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.stopping import StopFlag


class Stateful(Protocol):
    """Anything that can hand out its state and take it back: schedulers, scalers, averages."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Training:
    """The part of a `Session` that is about its state; `Elastic` sets what is declared here."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Stateful | None
    also: dict[str, Stateful]
    seed: int
    step: int
    samples: int
    resumed: bool
    device: torch.device
    _env: JobEnv | None
    _flag: StopFlag
    _peers: Peers
    _progress: Progress
    _saves: Saves
    _sampler: Sampler
    _virtual: VirtualShards | None
    _spread: bool
    _loss: torch.Tensor | None
    _answer: Callable[[], tuple[bool, ...]] | None

    @property
    def rank(self) -> int:
        """This rank's number now; a resize in place may change it between two steps."""
        return self._peers.rank

    @property
    def world_size(self) -> int:
        """How many ranks share the global batch now."""
        return self._peers.world_size

    @property
    def reproducible(self) -> bool:
        """Whether the result is the same to the last bit over any rank counts."""
        return self._virtual is not None

    # -- reporting -------------------------------------------------------------------------------------

    def _report(self, *, force: bool) -> None:
        self._progress.report(self.step, self._last_loss, force=force)

    def _last_loss(self) -> float | None:
        loss = None if self._loss is None else float(self._loss)
        return loss if loss is not None and math.isfinite(loss) else None  # JSON has no NaN

    # -- saving and leaving ----------------------------------------------------------------------------

    def _save_or_exit(self, *, quick: bool = False) -> None:
        """Save for good; if that fails once more with all the room old checkpoints can give, exit 74."""
        error = self._save(quick=quick)
        if error and self._saves.store is not None:
            if self.rank == 0:
                say(f"{error}; trying again without the older checkpoints")
                self._saves.store.prune(1, thorough=True)
            error = self._save()
        if error:
            if self.rank == 0:
                say(f"step {self.step} could not be saved: {error}")
            self._part()
            raise SystemExit(exits.CANNOT_SAVE)

    def _save(self, *, quick: bool = False, background: bool = False) -> str | None:
        """Save the state of this step, all ranks together; returns what went wrong, the same on all.

        `quick`: shared memory is good enough; a keeper makes it durable behind our back. `background`: it
        need not be durable yet when this returns.
        """
        self._gather_state()
        if self._saves.store is None:
            return None
        generators = self._peers.gather_states(rng.capture(self.device))
        error: str | None = None
        if self.rank == 0 or self._saves.collective:
            state = self._state(generators)
            try:
                if not (quick and self._hold(state)):
                    self._saves.save(state, loss=self._last_loss(), background=background)
            except StoreError as problem:
                error = str(problem)
        told: str | None = self._peers.tell(error, Optional[str])
        return told or None

    def _gather_state(self) -> None:
        """Bring to rank 0 what only others train, all ranks together. As it is, every rank has everything."""

    def _hold(self, state: dict[str, Any]) -> bool:
        """Leave the state in memory, if there is an agent to which it belongs from then on."""
        return not self._flag.agent_gone and self._saves.hold(state) and not self._flag.agent_gone

    def _part(self) -> None:
        """Leave the other ranks. The signal handlers stay: being told twice must not end us half-way."""
        self._answer = None
        self._saves.close()
        # A trainer's process ends without its interpreter taking anything apart (`run_to_the_end`).
        self._peers.close(quick=self._env is not None and self._env.trainer is not None)
        if self._env is not None:
            exit_quickly()

    # -- the state -------------------------------------------------------------------------------------

    def _state(self, generators: list[Any]) -> dict[str, Any]:
        return {
            "schema": 1,
            "step": self.step,
            "samples": self.samples,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sampler": self._sampler.state(self.samples),
            "rng": generators,
            "shards": None if self._virtual is None else self._virtual.state(),
            "extra": {name: thing.state_dict() for name, thing in self.also.items()},
        }

    def _own(self) -> dict[str, Any]:
        """The tensors that a state in memory is copied into: not what the user may hold on to or compare."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        model = {name: parameter.detach() for name, parameter in parameters}
        return {"model": model, "optimizer": {"state": self.optimizer.state_dict()["state"]}}

    def _take(self, state: dict[str, Any], where: str) -> None:
        """Put a state in the place of ours. Raises ConfigError when it is not of this training."""
        sampler = state["sampler"]
        if sampler["size"] != self._sampler.size:
            raise ConfigError(
                where=where,
                key="dataset_size",
                got=f"{self._sampler.size} samples",
                accepted=f"{sampler['size']}, as when this checkpoint was saved",
            )
        if not self._spread:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for name, thing in self.also.items():
            if name in state["extra"]:
                thing.load_state_dict(state["extra"][name])
        kept = state.get("shards")
        for line in self._virtual.restore(kept, where) if self._virtual and kept else ():
            if self.rank == 0:
                say(line)
        self._sampler = Sampler(sampler["size"], sampler["seed"])
        self.step, self.samples, self.resumed = state["step"], sampler["position"], True

    def _restore(self, *, wanted: bool) -> None:
        """Go on from the newest good state, if there is one and it is wanted."""
        found: Path | Held | None = None
        state: dict[str, Any] | None = None
        if self.rank == 0:
            found, state = self._saves.newest(self._own, wanted=wanted)
            if found is None and self._env is not None and self._env.continues is not None:
                found, state = self._saves.of_another(self._env.continues)
        named = os.fsencode(found) if isinstance(found, Path) else found
        told = self._peers.tell(named, Union[bytes, Held, None])
        found = Path(os.fsdecode(told)) if isinstance(told, bytes) else told
        if found is None:
            if not self._spread:
                self._peers.copy_from_first([*self.model.parameters(), *self.model.buffers()])
            if self.world_size > 1:  # else every rank would drop out the same neurons
                rng.reseed(self.seed, 0, self.rank)
            return
        (elsewhere,) = self._peers.agree(not self._saves.has(found))
        if elsewhere:
            state = self._peers.broadcast_state(state)
        elif state is None:
            state = self._saves.load(found, self._own)
        self._take(state, str(found))
        if len(state["rng"]) == self.world_size:
            rng.restore(state["rng"][self.rank], self.device)
        else:
            rng.reseed(self.seed, self.step, self.rank)
        if self.rank == 0:
            # Tells the agent which step this attempt goes on from: a damaged checkpoint may be newer.
            try:
                self._saves.record(self.step, self.samples, loss=None)
            except StoreError as error:
                say(str(error))
