"""How a training uses its ranks: the interface between a `Session` and a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hpcsched.contract.orders import Resize
from hpcsched.contract.seats import Seat
from hpcsched.worker.process.contract import Facts
from hpcsched.worker.session.agreement import Agreement
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.state import TrainingState


class Stranded(Exception):
    """Other ranks are gone, but what is here is whole: the session saves it, and the attempt ends (75)."""


class Strategy(Protocol):
    """What a session asks of a strategy, on every rank, in this order:

        refuses, setup, [state is restored], start           # on a rank that joins: warm_up, join, start
        between_steps, begin_step, [the step], check_step, advance      # for each step
        gather_state, state_dict                             # to save; state_dict on rank 0 only
        close

    `hpcsched.worker.session.replicated.Replicated` has all of it but `train_step`, for trainings in which
    every rank has the whole model; `hpcsched.worker.session.data_parallel.DataParallel` has that too.

    `in_place`: ranks may come and go between two steps (`resize`). `reproducible`: the result is the same to
    the last bit over any rank counts.
    One with `mixed = True` computes the parts' `precision` and `clip_norm`; for others they are refused.
    """

    in_place: bool
    reproducible: bool

    def refuses(self, training: TrainingState, world_size: int, seats: Sequence[Seat]) -> str:
        """Why so many ranks cannot train this; empty if they can. Asked before `setup`, too."""

    def setup(self, context: Context, agreement: Agreement) -> None:
        """Make what is needed to train, when the ranks have met; the model is on its device.

        Raises ConfigError.
        """

    def start(self) -> None:
        """The state is restored, or taken over, or there was none: get ready for the first step."""

    def warm_up(self) -> None:
        """On a rank that is about to join: pay for what a first step costs more. Model and optimizer may be
        spoilt: their state comes with `join`."""

    def join(self) -> None:
        """On a rank that joins, in the new group: take over the state. Raises RuntimeError if others are
        gone."""

    # -- a step ------------------------------------------------------------------------------------------

    def between_steps(self, meet: Callable[[], None]) -> None:
        """Call `meet`, in which all ranks agree whether to save, leave or resize. Raises Stranded."""

    def begin_step(self) -> torch.Tensor:
        """Let all ranks begin alike; returns this rank's sample indices of the step, int64 on the CPU, shape
        [samples]; none where `train_step` reads its own."""

    def train_step(self) -> None:
        """One step: reading, forward and backward pass, the optimizer's step and the schedule's.

        Raises Stranded. Not called where the user's own loop makes the steps.
        """

    def check_step(self) -> None:
        """Raise RuntimeError if a user's own loop has left the step half-way."""

    def step_made(self) -> bool:
        """Whether a step counts that a user's own loop has left with `break`."""

    def advance(self) -> None:
        """A step is made: count it in `training.step` and `training.samples`."""

    def facts(self) -> Facts:
        """What the agent is told beside the step and its loss."""

    # -- its state ---------------------------------------------------------------------------------------

    def gather_state(self) -> None:
        """Bring to rank 0 what only others train; all ranks call this before each save."""

    def state_dict(self, generators: list[Any]) -> dict[str, Any]:
        """What a checkpoint holds, as `TrainingState.state_dict`. `generators` are the states of the random
        generators by rank."""

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        """Go on from what `state_dict` gave; `where` says whence it came. All ranks call this.

        Raises ConfigError when it is another training's.
        """

    def checkpointed(self) -> None:
        """A periodic checkpoint was made, on all ranks: time to do better from here on."""

    # -- other ranks -------------------------------------------------------------------------------------

    def resize(self, order: Resize) -> bool:
        """Go on with the ranks of `order`, and as its attempt (`Context.becomes`); False: without this one.

        Raises Stranded when the new group cannot be made.
        """

    def close(self) -> None:
        """This rank leaves the others."""
