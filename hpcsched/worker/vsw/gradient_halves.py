"""The gradient of a step in two halves, summed over the ranks in one go (JABAS, section 6.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcsched.compat import zip
from hpcsched.planning.vsw.batching import Halves
from hpcsched.worker.ranks.gradient_sum import Bucket, GradientSum


class HalvedBucket(Bucket):
    """A bucket with room for both halves of its parameters' gradients, which travel together."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        size = sum(parameter.numel() for parameter in parameters)
        super().__init__(parameters, ahead=size)
        self._first, self._second = self.ahead, self.flat[size : 2 * size]
        self._firsts = self._first.split(self.sizes)
        self.products = torch.zeros(3, dtype=torch.float64, device=self.flat.device)

    @torch.no_grad()
    def keep_first(self) -> None:
        """What is in the gradients now is the first half; they start again from zero, so that they count as
        used."""
        for parameter, part in zip(self.parameters, self._firsts, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.view_as(parameter).copy_(parameter.grad)
                parameter.grad.zero_()

    def _empty(self) -> None:
        first, second = self._first, self._second
        if first.dtype in (torch.float16, torch.bfloat16):
            first, second = first.float(), second.float()
        elif first.is_complex():
            first, second = (torch.view_as_real(half).flatten() for half in (first, second))
        products = [torch.dot(first, first), torch.dot(second, second), torch.dot(first, second)]
        self.products.copy_(torch.stack(products))
        self._second.add_(self._first)
        super()._empty()


class HalvedSum(GradientSum):
    """The same as a `GradientSum`, for steps in which the two halves of the gradient are compared.

    Compute the first half of the samples, call `keep_first`, go on as in any other step, and ask for the
    `halves` afterwards. No pass more than in any step, and no message more: they are twice as long.
    """

    def keep_first(self) -> None:
        """The first half of this rank's samples has been through the backward pass."""
        self.prepare()
        self._launched = 0
        for bucket in self._halved:
            bucket.keep_first()

    def complete(self, each: Callable[[list[torch.nn.Parameter]], object] = lambda _: None) -> None:
        if self._peers.world_size > 1:
            super().complete(each)
            return
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            bucket.complete()

    def halves(self, samples: int) -> Halves:
        """What was found, of halves of so many samples each, where the losses were means over both."""
        products = torch.stack([bucket.products for bucket in self._halved]).sum(0)
        aa, bb, ab = (4 * float(product) for product in products.tolist())  # a half's own mean is twice that
        return Halves(aa=aa, bb=bb, ab=ab, samples=samples)

    @property
    def _halved(self) -> list[HalvedBucket]:
        return [bucket for bucket in self._buckets if isinstance(bucket, HalvedBucket)]
