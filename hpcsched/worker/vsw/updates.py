"""Taking an optimizer's step: all parameters at once, or those of a bucket as soon as its gradients have come
(JABAS, section 4: sequential and overlapped weight synchronisation)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hpcsched.compat import zip

BY_PARAMETER = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""They treat each parameter by itself, so that some can take their step before others."""


def can_be_split(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of some parameters at a time is the same as one of all of them.

    Not if something else is done in, before or after a step: clipping by the norm of all gradients, say.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    own = inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step))  # schedulers wrap it, too
    usual = own is inspect.unwrap(type(optimizer).step)
    return type(optimizer) in BY_PARAMETER and usual and not any(hooks)


class ShardOptimizer:
    """Takes steps of some of an optimizer's parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, parameters: list[torch.nn.Parameter]) -> None:
        """The step of these parameters; of all parameters together it is the optimizer's own step."""
        optimizer, chosen = self._optimizer, set(parameters)
        whole = optimizer.param_groups
        parts = [{**group, "params": [p for p in group["params"] if p in chosen]} for group in whole]
        optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = whole


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Inside, the learning rates are `factor` times what they are: schedulers never see that."""
    if factor == 1:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
