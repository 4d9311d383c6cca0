"""A training's state is saved, and taken up again, by all its ranks together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Optional, Union

from hpcsched.contract import exits
from hpcsched.errors import StoreError
from hpcsched.worker.checkpoint.shared_memory import Held
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import say
from hpcsched.worker.process.startup import exit_quickly
from hpcsched.worker.session.agreement import Agreement
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.strategy import Strategy


class Checkpoints:
    """Saves and restores what a strategy says its state is; all ranks call each of these."""

    def __init__(self, context: Context, agreement: Agreement, strategy: Strategy) -> None:
        self._context, self._agreement, self._strategy = context, agreement, strategy

    def save(self, *, quick: bool = False, background: bool = False) -> str | None:
        """Save the state of this step; returns what went wrong, the same on all ranks.

        `quick`: shared memory is good enough; a keeper makes it durable behind our back. `background`: it
        need not be durable yet when this returns.
        """
        context, saves = self._context, self._context.saves
        context.gather_sums()
        self._strategy.gather_state()
        if saves.store is None:
            return None
        generators = context.peers.gather_states(rng.capture(context.device))
        error: str | None = None
        if context.rank == 0 or saves.collective:
            state = self._strategy.state_dict(generators)
            try:
                if not (quick and self._hold(state)):
                    saves.save(state, loss=context.training.last_loss(), background=background)
            except StoreError as problem:
                error = str(problem)
        told: str | None = context.peers.tell(error, Optional[str])
        return told or None

    def save_or_exit(self, *, quick: bool = False) -> None:
        """Save for good; if that fails once more with all the room old checkpoints can give, exit 74."""
        context, saves = self._context, self._context.saves
        error = self.save(quick=quick)
        if error and saves.store is not None:
            if context.rank == 0:
                say(f"{error}; trying again without the older checkpoints")
                saves.store.prune(1, thorough=True)
            error = self.save()
        if error:
            if context.rank == 0:
                say(f"step {context.training.step} could not be saved: {error}")
            self.part()
            raise SystemExit(exits.CANNOT_SAVE)

    def save_and_end(self, why: str) -> NoReturn:
        """The other ranks are gone: save what rank 0 has, and end this attempt."""
        say(f"step {self._context.training.step}: {why}")
        first = self._context.rank == 0
        self._context.peers.abandon()
        if first:
            self.save_or_exit()
            if self._context.env is not None:
                self._context.env.wake_agent()
        else:
            self._strategy.gather_state()
        raise SystemExit(exits.SUSPENDED)

    def record(self, metrics: Mapping[str, float] | None = None) -> None:
        """Say in STATE.json what the newest checkpoint holds. Raises StoreError."""
        training = self._context.training
        loss = None if metrics is None else training.last_loss()
        self._context.saves.record(training.step, training.samples, loss=loss, metrics=metrics)

    def part(self) -> None:
        """Leave the other ranks. The signal handlers stay: being told twice must not end us half-way."""
        context = self._context
        self._agreement.forget()
        self._strategy.close()
        context.saves.close()
        # A trainer's process ends without its interpreter taking anything apart (`run_to_the_end`).
        context.peers.close(quick=context.env is not None and context.env.trainer is not None)
        if context.env is not None:
            exit_quickly()

    def restore(self, *, wanted: bool) -> None:
        """Go on from the newest good state, if there is one and it is wanted."""
        context, saves, peers = self._context, self._context.saves, self._context.peers
        training = context.training
        found: Path | Held | None = None
        state: dict[str, Any] | None = None
        if context.rank == 0:
            found, state = saves.newest(training.tensors, wanted=wanted)
            if found is None and context.env is not None and context.env.continues is not None:
                found, state = saves.of_another(context.env.continues)
        named = os.fsencode(found) if isinstance(found, Path) else found
        told = peers.tell(named, Union[bytes, Held, None])
        found = Path(os.fsdecode(told)) if isinstance(told, bytes) else told
        if found is None:
            if not training.spread:
                peers.copy_from_first([*training.model.parameters(), *training.model.buffers()])
            if context.world_size > 1:  # else every rank would drop out the same neurons
                rng.reseed(training.seed, 0, context.rank)
            self._say_where()
            return
        (elsewhere,) = peers.agree(not saves.has(found))
        if elsewhere:
            state = peers.broadcast_state(state)
        elif state is None:
            state = saves.load(found, training.tensors)
        self._strategy.load_state_dict(state, str(found))
        if len(state["rng"]) == context.world_size:
            rng.restore(state["rng"][context.rank], context.device)
        else:
            rng.reseed(training.seed, training.step, context.rank)
        self._say_where()
        if context.rank == 0:
            # Tells the agent which step this attempt goes on from: a damaged checkpoint may be newer.
            try:
                self.record()
            except StoreError as error:
                say(str(error))

    def _say_where(self) -> None:
        """Say where a training goes on that has begun before in this attempt, before that is on record."""
        context = self._context
        if context.rank == 0 and context.env is not None and context.env.resumes_midway:
            context.progress.resumed(context.training.step)

    def _hold(self, state: dict[str, Any]) -> bool:
        """Leave the state in memory, if there is an agent to which it belongs from then on."""
        flag = self._context.flag
        return not flag.agent_gone and self._context.saves.hold(state) and not flag.agent_gone
