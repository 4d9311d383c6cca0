"""What the convolutional networks have in common."""

from __future__ import annotations

import torch
from torch import nn


def scaled(channels: int, width: float) -> int:
    """So many channels at a part of the full width; at least 4."""
    return max(4, round(channels * width))


class ConvNorm(nn.Module):
    """Convolution without bias, batch normalisation and (unless `active` is False) ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        eps: float = 1e-5,
        active: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=eps)
        self.relu = nn.ReLU(inplace=True) if active else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.relu(self.norm(self.conv(x)))
        return result


class Images(nn.Module):
    """A network on square RGB images of `image` pixels a side."""

    image: int

    def example(self, samples: int) -> tuple[torch.Tensor, ...]:
        """Random images; shape [samples, 3, image, image]."""
        return (torch.rand(samples, 3, self.image, self.image),)


def start(network: nn.Module) -> None:
    """Initial weights for networks with ReLU (He et al. 2015): as much variance behind a layer as before."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
