"""Inception-v3 (Szegedy et al. 2016) without the auxiliary head.

Five kinds of blocks, named as in common use: A with 5x5 and double 3x3 branches, B and D halve the image,
C with 7x7 factored into 1x7 and 7x1, E with 3x3 spread over 1x3 and 3x1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpcsched.examples.models.parts import ConvNorm, Images, scaled, start

_Scale = Callable[[int], int]
_WIDE, _TALL = (1, 7), (7, 1)


def _conv(inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1) -> ConvNorm:
    """A convolution that keeps the image's size, or with a stride of 2 takes no padding."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (high // 2, wide // 2) if stride == 1 else (0, 0)
    return ConvNorm(inputs, outputs, (high, wide), stride=stride, padding=padding, eps=1e-3)


def _chain(inputs: int, *steps: tuple[int, int | tuple[int, int]], stride: int = 1) -> nn.Sequential:
    """Convolutions of (outputs, kernel) one after the other; `stride` is the last one's."""
    chain = nn.Sequential()
    for i, (outputs, kernel) in enumerate(steps):
        chain.append(_conv(inputs, outputs, kernel, stride=stride if i == len(steps) - 1 else 1))
        inputs = outputs
    return chain


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv(inputs, outputs))


class Block(nn.Module):
    """Branches side by side, their results one behind the other along the channels; `outputs` of them."""

    def __init__(self, outputs: int, **branches: nn.Module) -> None:
        super().__init__()
        self.outputs = outputs
        self.names = tuple(branches)
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in self.names], 1)


class Fork(nn.Module):
    """A convolution whose result goes through a 1x3 and a 3x1 one; twice `outputs` channels."""

    def __init__(self, before: nn.Sequential, inputs: int, outputs: int) -> None:
        super().__init__()
        self.before = before
        self.wide = _conv(inputs, outputs, (1, 3))
        self.tall = _conv(inputs, outputs, (3, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.before(x)
        return self.wide(x), self.tall(x)


class Spread(nn.Module):
    """The last kind of block, with two forks among its branches."""

    def __init__(self, inputs: int, s: _Scale) -> None:
        super().__init__()
        self.one = _conv(inputs, s(320))
        self.three = Fork(_chain(inputs, (s(384), 1)), s(384), s(384))
        self.threes = Fork(_chain(inputs, (s(448), 1), (s(384), 3)), s(384), s(384))
        self.pool = _pooled(inputs, s(192))
        self.outputs = s(320) + 4 * s(384) + s(192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), *self.three(x), *self.threes(x), self.pool(x)], 1)


def _block_a(inputs: int, s: _Scale, pooled: int) -> Block:
    return Block(
        2 * s(64) + s(96) + s(pooled),
        one=_conv(inputs, s(64)),
        five=_chain(inputs, (s(48), 1), (s(64), 5)),
        threes=_chain(inputs, (s(64), 1), (s(96), 3), (s(96), 3)),
        pool=_pooled(inputs, s(pooled)),
    )


def _block_b(inputs: int, s: _Scale) -> Block:
    return Block(
        s(384) + s(96) + inputs,
        three=_conv(inputs, s(384), 3, stride=2),
        threes=_chain(inputs, (s(64), 1), (s(96), 3), (s(96), 3), stride=2),
        pool=nn.MaxPool2d(3, stride=2),
    )


def _block_c(inputs: int, s: _Scale, inner: int) -> Block:
    n = s(inner)
    return Block(
        4 * s(192),
        one=_conv(inputs, s(192)),
        seven=_chain(inputs, (n, 1), (n, _WIDE), (s(192), _TALL)),
        sevens=_chain(inputs, (n, 1), (n, _TALL), (n, _WIDE), (n, _TALL), (s(192), _WIDE)),
        pool=_pooled(inputs, s(192)),
    )


def _block_d(inputs: int, s: _Scale) -> Block:
    n = s(192)
    return Block(
        s(320) + n + inputs,
        three=_chain(inputs, (n, 1), (s(320), 3), stride=2),
        seven=_chain(inputs, (n, 1), (n, _WIDE), (n, _TALL), (n, 3), stride=2),
        pool=nn.MaxPool2d(3, stride=2),
    )


class InceptionV3(Images):
    """23.83 million parameters at full width and 1000 classes.

    Args:
        width: part of the channels, 1.0 for all.
        classes: of the result, shape [samples, classes].
        image: pixels a side, at least 75.
        dropout: before the last layer.
    """

    def __init__(
        self, width: float = 1.0, classes: int = 1000, image: int = 299, dropout: float = 0.5
    ) -> None:
        super().__init__()
        if image < 75:
            raise ValueError(f"images of {image} pixels are too small, at least 75 are needed")
        self.image = image

        def s(channels: int) -> int:
            return scaled(channels, width)

        self.stem = nn.Sequential(
            _conv(3, s(32), 3, stride=2),
            ConvNorm(s(32), s(32), 3, eps=1e-3),
            _conv(s(32), s(64), 3),
            nn.MaxPool2d(3, stride=2),
            _conv(s(64), s(80)),
            ConvNorm(s(80), s(192), 3, eps=1e-3),
            nn.MaxPool2d(3, stride=2),
        )
        blocks: list[Block | Spread] = [_block_a(s(192), s, 32)]
        blocks += [_block_a(blocks[-1].outputs, s, 64)]
        blocks += [_block_a(blocks[-1].outputs, s, 64)]
        blocks += [_block_b(blocks[-1].outputs, s)]
        for inner in (128, 160, 160, 192):
            blocks += [_block_c(blocks[-1].outputs, s, inner)]
        blocks += [_block_d(blocks[-1].outputs, s)]
        blocks += [Spread(blocks[-1].outputs, s)]
        blocks += [Spread(blocks[-1].outputs, s)]
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(blocks[-1].outputs, classes)
        start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images; [samples, 3, image, image] to [samples, classes]."""
        x = self.blocks(self.stem(x)).mean((2, 3))
        result: torch.Tensor = self.fc(self.dropout(x))
        return result
