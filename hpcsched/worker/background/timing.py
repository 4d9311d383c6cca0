"""Follows the foreground's steps without changing them: when the device is in which part of a step.

Hooks at some of the model's modules and at the optimizer; nothing in the autograd graph, so that not a bit of
the foreground's numbers changes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hpcsched.planning.background.feedback import Feedback
from hpcsched.planning.background.pacing import Pacer
from hpcsched.planning.background.referee import Referee
from hpcsched.worker.background.lane import now_us

PARTS = 8
"""Into how many parts the forward pass is divided, at most; the backward pass has as many."""
MOST_PENDING = 4096


class ChunkTimer:
    """Tells a referee which chunk of the foreground's step the device is in.

    Args:
        barred: for each chunk of a step, whether it is barred at first.
    """

    def __init__(self, barred: Sequence[bool], device: torch.device) -> None:
        self.chunks = len(barred)
        self.feedback = Feedback(barred)
        self.lock = threading.RLock()
        self._cuda = device.type == "cuda"
        self._referee: Referee | None = None
        self._at = -1
        self._last: tuple[int, Any] | None = None
        self._pending: deque[tuple[int, Any]] = deque()
        self._alone = Referee(Pacer(1), self.feedback)

    def tell(self, referee: Referee | None) -> None:
        """From now on it is this referee that is told; None: nobody is in the background."""
        with self.lock:
            self._referee = referee

    def boundary(self, index: int) -> None:
        """Chunk `index` is launched from here on; one past the last: the step has been launched."""
        if index == 0:
            self._at = -1
        elif not 0 <= self._at < index:
            return  # another order than that of the step
        self._at = index if index < self.chunks else -1
        mark: Any = now_us()
        if self._cuda:
            if torch.cuda.is_current_stream_capturing():
                return
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        with self.lock:
            self._pending.append((index, mark))
            if len(self._pending) > MOST_PENDING:
                self._pending.popleft()
            if not self._cuda or index in (0, self.chunks):
                self.look()

    def look(self) -> None:
        """Tell the referee what the device has come to; to be called with the lock held."""
        while self._pending and (not self._cuda or self._pending[0][1].query()):
            index, mark = self._pending.popleft()
            when = now_us() if self._cuda else mark
            referee = self._referee or self._alone
            if self._last is not None and self._last[0] < min(index, self.chunks):
                chunk, before = self._last
                took_us = before.elapsed_time(mark) * 1e3 if self._cuda else mark - before
                referee.ended(chunk, when, took_us)
            if index < self.chunks:
                referee.began(index, when)
            self._last = index, mark


class StepTimer(ChunkTimer):
    """Follows an ordinary training by hooks at some of its model's modules, and at its optimizer.

    A step is n chunks forward, n backward, one until the optimizer begins (what remains of the gradients' sum
    over the ranks) and one for the optimizer. What a model passes by is counted with the chunk before it;
    what it comes to in another order is passed over.

    Args:
        sums: gradients are summed over several ranks, so the chunk that waits for it is barred at first.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, sums: bool
    ) -> None:
        marked = _marks(model)
        self.parts = len(marked) + 1
        super().__init__([*[False] * (2 * self.parts), sums, False], device)
        self._hook(model, optimizer, marked)

    def _hook(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, marked: list[Any]) -> None:
        def began(module: torch.nn.Module, inputs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.boundary(0)

        def passed(index: int) -> Any:
            def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
                if not (module.training and torch.is_grad_enabled()):
                    return
                self.boundary(index)
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(lambda grad: self.boundary(self.chunks - 2 - index))

            return hook

        def ended(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if module.training and isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda grad: self.boundary(self.parts))

        model.register_forward_pre_hook(began)
        for index, module in enumerate(marked, 1):
            module.register_forward_hook(passed(index))
        model.register_forward_hook(ended)
        last = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if last is not None:  # gradients come in the reverse order
            last.register_post_accumulate_grad_hook(lambda _: self.boundary(self.chunks - 2))
        optimizer.register_step_pre_hook(lambda *_: self.boundary(self.chunks - 1))
        optimizer.register_step_post_hook(lambda *_: self.boundary(self.chunks))


def _marks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules with parameters and none below them, evenly spread, in the order in which they were made."""
    leaves = [
        module
        for module in model.modules()
        if not any(module.children()) and any(True for _ in module.parameters(recurse=False))
    ]
    number = min(PARTS, len(leaves)) - 1
    return [leaves[(index + 1) * len(leaves) // (number + 1) - 1] for index in range(max(0, number))]
