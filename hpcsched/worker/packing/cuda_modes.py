"""Ways of making steps that only GPUs have: side by side on streams, and all as one CUDA graph.

A GPU that small models leave half empty works on several of them at a time; and where launching operations
takes longer than they do, one launch for the whole step of all members saves that time. Both compute what a
loop computes, with the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from hpcsched.compat import zip
from hpcsched.worker.cuda_graphs import capture
from hpcsched.worker.packing.batches import mapped, only_tensors, tensors_in
from hpcsched.worker.packing.failures import Failures, ModeRefused, line_of, out_of_memory
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.modes import Batches, Runner, step_of
from hpcsched.worker.packing.reference import alone
from hpcsched.worker.session.trainer import clip

REAL_STEPS = 3
"""Steps before a capture: libraries choose their kernels and make their work areas in the first ones."""

_CAPTURABLE = (torch.optim.SGD,)
"""Optimizers whose state is on the GPU in any case; others have an option `capturable`."""


class Gpu(Protocol):
    """What of CUDA is needed."""

    def current(self) -> Any:
        """The stream that work is given to now."""

    def stream(self) -> Any:
        """A new stream; it has a method `wait_stream`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is given to this stream."""

    def record(self, work: Callable[[], None], stream: Any) -> Any:
        """A graph of what `work` launches, none of which is done now; its method `replay` does it.

        Inside, generators are not to be read or set. If it raises, the device's state is as before.
        """


class Cuda:
    """One NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, work: Callable[[], None], stream: Any) -> Any:
        graph, _ = capture(work, stream)
        return graph


def gpu_of(members: Sequence[Member]) -> Gpu:
    """The GPU that these members are on. Raises Refused if they are on none."""
    device = members[0].session.device
    if device.type != "cuda":
        raise ModeRefused("it needs a GPU")
    return Cuda(device)


class Branches:
    """Streams that part from the current one and come back to it."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        self._gpu = gpu
        self._streams = [gpu.stream() for _ in range(count)]

    @contextmanager
    def __call__(self, number: int) -> Iterator[None]:
        """Inside, work is given to one of them; it begins when all that was given before is done.

        Memory of the other side is not used again before `join`: it belongs to whoever has asked for it.
        """
        stream = self._streams[number]
        stream.wait_stream(self._gpu.current())
        with self._gpu.on(stream):
            yield

    def join(self) -> None:
        """What is given to the current stream from now on comes after all of theirs."""
        current = self._gpu.current()
        for stream in self._streams:
            current.wait_stream(stream)


class Streams(Runner):
    """Each member's step on a stream of its own, all at the same time. Raises Refused."""

    def __init__(self, members: Sequence[Member], gpu: Gpu | None = None) -> None:
        super().__init__(members)
        self._branches = Branches(gpu or gpu_of(members), len(members))

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        failures = Failures()
        try:
            for number, (member, batch) in enumerate(zip(self.members, batches, strict=True)):
                with self._branches(number):
                    step_of(member, batch, careful, failures)
                if failures.full:
                    break
        finally:
            self._branches.join()
        failures.check()


class Graph(Runner):
    """The steps of all members as one CUDA graph, each a branch of it: one launch.

    The first steps are made as they come, on the stream of the capture; then the graph is captured, once more
    whenever an option of an optimizer has changed that is a number. Raises Refused, `step` too: some things
    are only found out in a capture. No member has made the step then.
    """

    as_one = True

    def __init__(self, members: Sequence[Member], batches: Batches, gpu: Gpu | None = None) -> None:
        super().__init__(members)
        self._gpu = gpu or gpu_of(members)
        for member, batch in zip(members, batches, strict=True):
            _can_be_captured(member, batch)
        self._stream = self._gpu.stream()
        self._branches = Branches(self._gpu, len(members))
        self._sharing = _sharing(batches)
        self._inputs = [mapped(batch, torch.Tensor.clone) for batch in batches]
        for number, first in enumerate(self._sharing):
            self._inputs[number] = self._inputs[first]
        self._totals = [torch.zeros((), device=member.session.device) for member in members]
        self._real_steps = REAL_STEPS
        self._graph: Any = None
        self._options: Any = None

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        if self._real_steps:
            self._real_steps -= 1
            self._step_by_step(batches, careful)
            return
        self._fill(batches)
        if self._options != (now := _options(self.members)):
            self._graph = self._options = None  # its memory is the next one's
            self._graph = self._capture()
            self._options = now
        self._graph.replay()
        failures = Failures()
        for member, total in zip(self.members, self._totals, strict=True):
            member.has_lost(total)
            try:
                member.call_quickly(member.stepped)
            except (Exception, SystemExit) as error:
                failures.add(member, error)
        failures.check()

    def apart(self) -> None:
        self._graph = None
        self._forget_gradients()

    def _step_by_step(self, batches: Batches, careful: bool) -> None:
        failures = Failures()
        current = self._gpu.current()
        self._stream.wait_stream(current)
        try:
            with self._gpu.on(self._stream):
                for member, batch in zip(self.members, batches, strict=True):
                    step_of(member, batch, careful, failures)
                    if failures.full:
                        break
        finally:
            current.wait_stream(self._stream)
        failures.check()

    def _fill(self, batches: Batches) -> None:
        """Put the samples where the graph looks for them."""
        if _sharing(batches) != self._sharing:
            raise ModeRefused("the models do not see the same samples any more")
        for number, first in enumerate(self._sharing):
            if number != first:
                continue
            there, here = tensors_in(self._inputs[number]), tensors_in(batches[number])
            if [tensor.shape for tensor in there] != [tensor.shape for tensor in here]:
                raise ModeRefused("the batches are not of one shape")
            torch._foreach_copy_(there, here)

    def _capture(self) -> Any:
        self._forget_gradients()
        try:
            return self._gpu.record(self._work, self._stream)
        except (Exception, SystemExit) as error:  # whatever waits for the GPU, or cannot be captured
            self._forget_gradients()
            if out_of_memory(error):
                raise
            raise ModeRefused(f"it cannot be captured: {line_of(error)}") from error

    def _work(self) -> None:
        """What the graph does."""
        for number, (member, batch) in enumerate(zip(self.members, self._inputs, strict=True)):
            with self._branches(number):
                member.call_without_draws(self._step, member, batch, self._totals[number])
        self._branches.join()

    @staticmethod
    def _step(member: Member, batch: Any, total: torch.Tensor) -> None:
        member.parts.optimizer.zero_grad()
        lost = member.losses(batch)
        (lost / member.batch).backward()  # type: ignore[no-untyped-call]
        clip(member.parts)
        member.parts.optimizer.step()
        total.copy_(lost.detach())

    def _forget_gradients(self) -> None:
        """Those there are may lie in a graph's memory, or become part of one."""
        for member in self.members:
            member.parts.optimizer.zero_grad()


def _can_be_captured(member: Member, batch: Any) -> None:
    """Raise Refused for what is known not to work without being told anew in each step."""
    optimizer = member.parts.optimizer
    if why := member.differs_by_step():
        raise ModeRefused(why)
    if not only_tensors(batch):
        raise ModeRefused("there is more in a batch than tensors")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ModeRefused("an optimizer has hooks")
    if type(optimizer) not in _CAPTURABLE and not all(g.get("capturable") for g in optimizer.param_groups):
        raise ModeRefused(f"{type(optimizer).__name__} is not `capturable`")
    if type(optimizer) in _CAPTURABLE and any(torch.is_tensor(g["lr"]) for g in optimizer.param_groups):
        raise ModeRefused(f"the learning rate of {type(optimizer).__name__} is a tensor, which it reads")
    names = [name for name, p in member.parts.model.named_parameters() if p.requires_grad]
    alone(member, batch, names)  # raises for what the model changes besides parameters and buffers


def _sharing(batches: Batches) -> list[int]:
    """For each batch, the number of the first one that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(batch), number) for number, batch in enumerate(batches)]


def _options(members: Sequence[Member]) -> list[Any]:
    """All numbers that become a part of a graph when it is captured."""
    return [
        tuple(
            (key, id(value) if torch.is_tensor(value) else value)
            for key, value in group.items()
            if key != "params"
        )
        for member in members
        for group in member.parts.optimizer.param_groups
    ]
