"""DenseNet-121 (Huang et al. 2017): each layer sees the results of all layers before it in its block."""

from __future__ import annotations

import torch
from torch import nn

from hpcsched.examples.models.parts import Images, scaled, start

_BLOCKS = (6, 12, 24, 16)
"""Layers of each block."""


def _conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Batch norm and ReLU before a convolution."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class Dense(nn.Module):
    """1x1 and 3x3 convolution; what comes in goes on beside the `growth` channels that they add."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.reduce = _conv(inputs, 4 * growth, 1)
        self.spatial = _conv(4 * growth, growth, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.spatial(self.reduce(x))], 1)


class DenseNet121(Images):
    """7.98 million parameters at full width and 1000 classes.

    Args:
        width: part of the channels, 1.0 for all.
        classes: of the result, shape [samples, classes].
        image: pixels a side, at least 32.
    """

    def __init__(self, width: float = 1.0, classes: int = 1000, image: int = 224) -> None:
        super().__init__()
        if image < 32:
            raise ValueError(f"images of {image} pixels are too small, at least 32 are needed")
        self.image = image
        growth, channels = scaled(32, width), scaled(64, width)
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential()
        for number, layers in enumerate(_BLOCKS):
            if number:
                self.blocks.append(nn.Sequential(_conv(channels, channels // 2, 1), nn.AvgPool2d(2)))
                channels //= 2
            block = nn.Sequential()
            for _ in range(layers):
                block.append(Dense(channels, growth))
                channels += growth
            self.blocks.append(block)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(channels, classes)
        start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images; [samples, 3, image, image] to [samples, classes]."""
        x = self.relu(self.norm(self.blocks(self.stem(x))))
        result: torch.Tensor = self.fc(x.mean((2, 3)))
        return result
