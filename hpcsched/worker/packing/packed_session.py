"""A packed training as it is saved and asked to leave; somebody else makes its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from hpcsched.contract import files
from hpcsched.errors import ConfigError, StoreError
from hpcsched.worker.packing.adapters.frozen import Frozen, frozen_of
from hpcsched.worker.packing.adapters.saving import write_adapter
from hpcsched.worker.process import rng
from hpcsched.worker.session.lifecycle import Lifecycle, Metrics
from hpcsched.worker.session.replicated import Replicated
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.trainer import Parts, refuse_mixed

_FROZEN = "frozen"


class Packed(Replicated):
    """The strategy of a member of a pack: one rank, whose tensors may lie inside its pack's."""

    torn: str | None = None
    """Why its newest step was left half-way: nothing to save, or to go on from."""

    @cached_property
    def frozen(self) -> Frozen | None:
        """What is frozen in the model, where that has adapters: no checkpoint holds it."""
        return frozen_of(self.training.model)

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        """Raises ConfigError when it is of an adapter on another frozen model."""
        digest = state["extra"].get(_FROZEN, {}).get("digest")
        if digest is not None:
            mine = None if self.frozen is None else self.frozen.digest
            if mine != digest:
                accepted = "the model that the adapter was trained on"
                raise ConfigError(where=where, key="model", got="another frozen model", accepted=accepted)
            state = {**state, "model": {**self.training.model.state_dict(), **state["model"]}}
        super().load_state_dict(state, where)

    def state_dict(self, generators: list[Any]) -> dict[str, Any]:
        """Raises StoreError for a step that was left half-way."""
        if self.torn is not None:
            raise StoreError(f"step {self.training.step + 1} was left half-way: {self.torn}")
        state = super().state_dict(generators)
        frozen = self.frozen
        left = frozen.names(self.training.model) if frozen is not None else ()
        # A file would hold all of the pack's tensors.
        state["model"] = {name: _own(value) for name, value in state["model"].items() if name not in left}
        if frozen is not None:
            state["extra"] = {**state["extra"], _FROZEN: {"digest": frozen.digest}}
        optimizer = state["optimizer"]
        kept = {key: _own(value) for key, value in optimizer["state"].items()}
        return {**state, "optimizer": {**optimizer, "state": kept}}


class PackedSession:
    """Counts the steps of a packed training, saves it, and leaves when asked to.

    Args:
        parts: of the training.
        steps: of the whole training; default: as the job or `parts.epochs` says.
    """

    def __init__(self, parts: Parts, *, steps: int | None = None) -> None:
        refuse_mixed(parts, taken=("bf16", "clip_norm"))
        parts.model.train()
        training = TrainingState(
            model=parts.model,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            also=None,
            dataset_size=parts.size,
            global_batch=parts.global_batch,
            total_steps=steps,
            seed=parts.seed,
        )
        self._training, self._strategy = training, Packed()
        self._life = Lifecycle(training, self._strategy)
        self._life.begin()
        self._life.end_after(parts.epochs)
        self.on_step: Callable[[], None] = lambda: None
        """Called after each step that is made."""

    @property
    def frozen(self) -> Frozen | None:
        """What is frozen in the model, where that has adapters."""
        return self._strategy.frozen

    @property
    def step(self) -> int:
        """The steps done so far."""
        return self._training.step

    @property
    def samples(self) -> int:
        """The samples seen so far."""
        return self._training.samples

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole training."""
        return self._training.total_steps

    @property
    def sampler(self) -> Sampler:
        """Which samples it trains on."""
        return self._training.sampler

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self._life.context.device

    @property
    def torn(self) -> str | None:
        """Why its newest step was left half-way: nothing to save, or to go on from."""
        return self._strategy.torn

    @torn.setter
    def torn(self, why: str | None) -> None:
        self._strategy.torn = why

    @property
    def due(self) -> bool:
        """Whether it is time to `look`. Raises Gone for one that must leave no more traces."""
        orders = self._life.context.orders
        orders.look()
        return self.leaving or orders.pace < 1 or orders.resize is not None or self._life.agreement.save_due

    @property
    def leaving(self) -> bool:
        """Whether it has been asked to save and leave. Raises Gone."""
        return self._life.context.flag.wanted is not None

    def heard(self, loss: Callable[[], torch.Tensor | None]) -> None:
        """The loss of its newest step, asked for when somebody wants to know."""
        self._training.loss = loss

    def last_loss(self) -> float | None:
        """The loss of its newest step."""
        return self._training.last_loss()

    def count_step(self) -> None:
        """A step has been made."""
        self._strategy.advance()
        self._training.made += 1
        self.on_step()

    def report(self, *, force: bool = False) -> None:
        """Tell the agent how far it is, if that is due."""
        self._life.report(force=force)

    def look(self) -> None:
        """Between two steps, now and then: report, save if that is due, leave if that is wanted.

        Raises SystemExit(75) when it has saved and left, (74) when it could not save.
        """
        self.report()
        if self.leaving or self._life.agreement.save_due:
            self._write_adapter()
        self._life.between_steps()

    def state(self) -> dict[str, Any]:
        """What a checkpoint of this step holds. Raises StoreError if its step was left half-way."""
        return self._strategy.state_dict([rng.capture(self.device)])

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, and from where its random numbers were.

        Raises ConfigError when it is another training's.
        """
        self._strategy.load_state_dict(dict(state), "checkpoint")
        if len(state["rng"]) == 1:
            rng.restore(state["rng"][0], self.device)
        else:  # of several ranks, as after any change of their number
            rng.reseed(self._training.seed, self._training.step, 0)

    def finish(self, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        """Save the final state; then `metrics` is asked for. Exits with 74 if nothing can be saved."""
        self._write_adapter()
        self._life.finish(metrics)

    def _write_adapter(self) -> None:
        env = self._life.context.env
        if self.frozen is not None and env is not None:
            write_adapter(self._training.model, env.job_dir / files.ADAPTER)


def _own(value: Any) -> Any:
    """The same with tensors that are all of the memory they lie in."""
    if isinstance(value, torch.Tensor):
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.detach().clone()
    if isinstance(value, dict):
        return {key: _own(inner) for key, inner in value.items()}
    return value
