"""JAX trainings that save with Orbax: `CheckpointManager` in place of `orbax.checkpoint.CheckpointManager`.

from hpcsched.integrations.jax import CheckpointManager

manager = CheckpointManager(directory, options=...)
for step in range(manager.latest_step() or 0, steps):
    state = train_step(state, batch(step))
    manager.save(step + 1, args=ocp.args.StandardSave(state))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hpcsched.errors import ConfigError
from hpcsched.integrations.metrics import Metrics
from hpcsched.worker.link import Link, Wish

_COLLECTIVES = "jax_cpu_collectives_implementation"

_has_initialized = False
"""Whether this program can be one of several processes."""


@lru_cache(maxsize=1)
def current() -> Link:
    """The link of this process."""
    return Link()


def initialize(**options: Any) -> None:
    """`jax.distributed.initialize` with hpcsched's ranks, of which there may be one; without it, as it is.

    The coordinator listens on the address where the ranks meet, and on no other. `options` go first.
    """
    global _has_initialized
    _has_initialized = True
    env = current().env
    if env is None:
        jax.distributed.initialize(**options)
        return
    if env.world_size == 1:
        return
    address = f"{env.master_addr}:{env.master_port}"
    told = {
        "coordinator_address": address,
        "coordinator_bind_address": address,
        "num_processes": env.world_size,
        "process_id": env.rank,
    }
    if not hasattr(jax.config, _COLLECTIVES) and _COLLECTIVES.upper() not in os.environ:
        jax.config.update(_COLLECTIVES, "gloo")  # up to 0.4.35 processes on CPUs have none by default
    jax.distributed.initialize(**{**told, **options})
    current().take_signals()  # JAX has taken SIGTERM


class CheckpointManager(ocp.CheckpointManager):  # type: ignore[misc]
    """Orbax's manager, whose `save` also says how far the training is, and hears what hpcsched wants.

    `save` is to be called after each step, as Orbax means it, or where `should_save`, asked after each step,
    says so: Orbax decides whether one is due, and saves in addition when hpcsched asks, and after the last
    step, where the job file says which that is (`steps`). When the job is to leave, it has saved, and waited
    for that, it raises SystemExit; not after the last step. All processes call both. The numbers of
    `metrics={"loss": ...}` are logged too, at most once a second.
    """

    _on_its_way: int | None = None
    """The step of a save that another thread is about to finish."""
    _asked: tuple[int, Wish] | None = None
    """What is wished after the newest step: all processes put it together once a step."""
    _reported: int | None = None
    _saved: int | None = None
    """The newest step that was saved as hpcsched asked for it, or that this attempt goes on from: where the
    program asks for it once more, that is done."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link = current()
        self._agreement = Agreement()
        self._metrics = Metrics(self._link)
        self._link.take_signals()
        if self._link.world_size > jax.process_count():
            raise ConfigError(
                where="JAX",
                key="processes",
                got=f"{self._link.world_size} processes that know nothing of each other",
                accepted="jax.distributed.initialize, or that of hpcsched.integrations.jax, at the start",
            )
        if self._link.checkpoint is not None:
            self._saved = self.latest_step()
        self._link.ready(parallel=_has_initialized or jax.process_count() > 1)

    def should_save(self, step: int) -> bool:
        """Whether one is due, or hpcsched asks for it; see `orbax.checkpoint.CheckpointManager`."""
        due = bool(super().should_save(step))
        if self._link.active:
            due = bool(self._wishes(step)) or due
            if not due:  # else `save` does, which may know the loss
                self._report(step, {})
        return due

    def save(self, step: int, *args: Any, force: bool | None = False, **options: Any) -> bool:
        """Whether it was saved; see `orbax.checkpoint.CheckpointManager.save`."""
        if not self._link.active:
            return bool(super().save(step, *args, force=force, **options))
        metrics = options.get("metrics")
        self._report(step, metrics if isinstance(metrics, Mapping) else {})
        wishes = self._wishes(step)
        if step == self._saved:
            self.wait_until_finished()
            return True
        if self._on_its_way is not None and not self.is_saving_in_progress():
            self.wait_until_finished()
        saved = bool(super().save(step, *args, force=force or bool(wishes), **options))
        if saved:
            self._on_its_way = step
        if wishes:
            self.wait_until_finished()
            self._asked, self._saved = (step, Wish.NOTHING), step
        if wishes & Wish.STOP and step != self._link.steps:
            self._link.leave()
        return saved

    def _report(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._reported != step:
            self._link.report(step, metrics.get("loss"))
            self._metrics.at_pace(metrics, step)
            self._reported = step

    def _wishes(self, step: int) -> Wish:
        if self._asked is None or self._asked[0] != step:
            last = Wish.SAVE if step == self._link.steps else Wish.NOTHING
            self._asked = step, self._agreement(self._link.wishes()) | last
        return self._asked[1]

    def wait_until_finished(self) -> None:
        """Until what `save` has begun is on disk; see `orbax.checkpoint.CheckpointManager`."""
        super().wait_until_finished()
        step, self._on_its_way = self._on_its_way, None
        if step is not None:
            folder = Path(str(self.directory))
            named = folder / str(step)
            self._link.saved(step, named if named.exists() else folder)


class Agreement:
    """Puts the wishes of all processes together, by the largest.

    What is asked after step n is answered after step n + 1, so that no process waits for another; all get
    the same answer after the same step. One process alone has its answer at once.
    """

    def __init__(self) -> None:
        self._asked: Any = None
        self._largest: Any = None

    def __call__(self, wish: Wish) -> Wish:
        """The wishes of all processes as of one call ago. All call it once after each step."""
        if jax.process_count() == 1:
            return wish
        mesh = Mesh(np.array(jax.devices()), ("all",))
        if self._largest is None:
            everywhere = NamedSharding(mesh, PartitionSpec())
            self._largest = jax.jit(lambda wishes: wishes.max(), out_shardings=everywhere)
        answer = Wish.NOTHING if self._asked is None else Wish(int(self._asked.addressable_data(0)))
        mine = np.full(jax.local_device_count(), int(wish), np.int32)
        apart = NamedSharding(mesh, PartitionSpec("all"))
        self._asked = self._largest(jax.make_array_from_process_local_data(apart, mine))
        return answer
