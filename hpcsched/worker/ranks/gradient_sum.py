"""Sums gradients over the ranks while the backward pass still runs.

torch's DistributedDataParallel rearranges its buckets after the first backward pass of a process, so
with three or more ranks a resumed run adds in another order than one that was never suspended, and
drifts from it in the last digit. Here the buckets are a fixed function of the parameters. The model
also stays what the user built: nothing to unwrap for saving, evaluating or another rank count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from hpcsched.compat import zip
from hpcsched.worker.ranks.process_group import Peers

_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20


def in_buckets(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in the order in which their gradients come, cut into what travels together."""
    groups: list[list[torch.nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        alike = groups and (groups[-1][0].dtype, groups[-1][0].device) == (parameter.dtype, parameter.device)
        if not alike or size > room:
            # A small first one, so that the network gets work early.
            room = _BUCKET_BYTES if groups else _FIRST_BUCKET_BYTES
            groups.append([])
        groups[-1].append(parameter)
        room -= size
    return groups


class Bucket:
    """Parameters whose gradients travel together, in one flat buffer.

    Behind the gradients the buffer has one number a parameter: how many ranks used it. `ahead` is room for so
    many numbers more in front of them.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], *, ahead: int = 0) -> None:
        first = parameters[0]
        self.parameters = parameters
        self.sizes = [p.numel() for p in parameters]
        length = ahead + sum(self.sizes) + len(parameters)
        self.flat = torch.empty(length, dtype=first.dtype, device=first.device)
        self.flat.zero_()  # memory that has been touched, unlike that of `zeros`
        self.ahead, *self.parts, self.used = self.flat.split([ahead, *self.sizes, len(parameters)])
        self.missing = 0
        self._work: dist.Work | None = None

    @torch.no_grad()
    def launch(self, start_sum: Callable[[torch.Tensor], dist.Work | None]) -> None:
        """Fill the buffer and start to add it up."""
        self._fill()
        self._work = start_sum(self.flat)

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for the sums, and make them the parameters' gradients."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        self._empty()

    def _fill(self) -> None:
        self.used.fill_(1)
        for i, (parameter, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            if parameter.grad is None:
                part.zero_()
                self.used[i] = 0
            else:
                part.view_as(parameter).copy_(parameter.grad)

    def _empty(self) -> None:
        for i, (parameter, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))
            elif self.used[i] > 0:
                # Some other rank's samples needed it. If nobody's did it stays None, as with one rank.
                parameter.grad = part.view_as(parameter).clone()


class GradientSum:
    """Replaces each parameter's `grad` by its sum over all ranks, bucket by bucket.

    Call `expect` before the last backward pass of a step and `complete` after it. With one rank
    both do nothing.

    Args:
        parameters: of the model.
        peers: the ranks.
        bucket: what the gradients travel in.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        peers: Peers,
        bucket: Callable[[list[torch.nn.Parameter]], Bucket] = Bucket,
    ) -> None:
        self._parameters = list(parameters)
        self._peers = peers
        self._bucket = bucket
        self._trained: tuple[bool, ...] = ()
        self._buckets: list[Bucket] = []
        self._home: dict[torch.nn.Parameter, Bucket] = {}
        self._launched = 0
        self._expecting = False
        self._hooked: set[torch.nn.Parameter] = set()

    def prepare(self) -> None:
        """Do now what the first step of several ranks would have to do."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        if trained != self._trained:  # at first, and when the user freezes or thaws a layer
            self._trained = trained
            self._arrange()

    def expect(self) -> None:
        """The next backward pass completes the step's gradients: send each bucket once it is full."""
        if self._peers.world_size == 1:
            return
        self.prepare()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        self._launched = 0
        self._expecting = True

    def complete(self, each: Callable[[list[torch.nn.Parameter]], object] = lambda _: None) -> None:
        """Wait for the sums; what the backward pass did not reach counts as zero.

        `each` is called with the parameters of a bucket as soon as their gradients are whole, while those of
        the others still travel.
        """
        if self._peers.world_size == 1:
            return
        self._expecting = False
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            bucket.complete()
            each(bucket.parameters)

    def _arrange(self) -> None:
        """Into buckets, last layer first: about the order in which gradients arrive."""
        groups = in_buckets(reversed([p for p in self._parameters if p.requires_grad]))
        self._buckets = [self._bucket(group) for group in groups]
        for parameter in (p for group in groups for p in group if p not in self._hooked):
            parameter.register_post_accumulate_grad_hook(self._arrived)
            self._hooked.add(parameter)
        self._home = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        if not self._expecting:
            return
        self._home[parameter].missing -= 1
        # Collectives must start in the same order on every rank, whatever order gradients come in.
        ready = self._launched
        while ready < len(self._buckets) and self._buckets[ready].missing <= 0:
            ready += 1
        self._launch(ready)

    def _launch(self, until: int) -> None:
        for bucket in self._buckets[self._launched : until]:
            bucket.launch(self._peers.sum_async)
        self._launched = max(self._launched, until)
