"""MobileNetV2 (Sandler et al. 2018): blocks that are wide inside, where each channel goes by itself."""

from __future__ import annotations

import torch
from torch import nn

from hpcsched.examples.models.parts import Images, scaled, start

_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Of each stage: how much wider inside, channels, blocks, stride of the first block (table 2)."""


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class Inverted(nn.Module):
    """1x1 to more channels, 3x3 for each of them by itself, 1x1 to fewer; beside a shortcut if that fits."""

    def __init__(self, inputs: int, outputs: int, wider: int, stride: int) -> None:
        super().__init__()
        inner = wider * inputs
        self.layers = nn.Sequential(
            *([_conv(inputs, inner, 1)] if wider > 1 else []),
            _conv(inner, inner, 3, stride=stride, groups=inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return x + y if self.shortcut else y


class MobileNetV2(Images):
    """3.50 million parameters at full width and 1000 classes.

    Args:
        width: part of the channels, 1.0 for all.
        classes: of the result, shape [samples, classes].
        image: pixels a side.
        dropout: before the last layer.
    """

    def __init__(
        self, width: float = 1.0, classes: int = 1000, image: int = 224, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.image = image
        channels = scaled(32, width)
        self.stem = _conv(3, channels, 3, stride=2)
        self.blocks = nn.Sequential()
        for wider, wanted, count, stride in _STAGES:
            outputs = scaled(wanted, width)
            for number in range(count):
                self.blocks.append(Inverted(channels, outputs, wider, 1 if number else stride))
                channels = outputs
        last = scaled(1280, width)
        self.head = _conv(channels, last, 1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(last, classes)
        start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images; [samples, 3, image, image] to [samples, classes]."""
        x = self.head(self.blocks(self.stem(x)))
        result: torch.Tensor = self.fc(self.dropout(x.mean((2, 3))))
        return result
