"""The shape of a layer graph: chains, and blocks of branches between two layers (section 4.2, Figure 7).

A graph is a *series* of layers between which there are *links*: nothing but an edge, a *block* of branches
that part at one layer and meet again at the next, each a series of its own, or a *knot*, whose layers
cannot be told apart into branches and are planned as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from hpcsched.compat import dataclass

SOURCE = -1
"""Where the model's input comes from: a layer that costs nothing."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The output of one layer goes straight into the next."""


@dataclass(frozen=True, slots=True)
class LayerBlock:
    """Branches from one layer to another; `skip`: there is also an edge between these two."""

    branches: tuple[Series, ...]
    skip: bool


@dataclass(frozen=True, slots=True)
class Knot:
    """Layers, in topological order, that all run on the same number of GPUs."""

    layers: tuple[int, ...]


Link = Union[Edge, LayerBlock, Knot]


@dataclass(frozen=True, slots=True)
class Series:
    """Layers that follow each other, with a link before the first, between each two, and after the last."""

    layers: tuple[int, ...]
    links: tuple[Link, ...]


def structure(prev: Sequence[Sequence[int]]) -> Series:
    """The series of a graph whose layer i reads from the layers `prev[i]`, all before it.

    It goes from SOURCE, which layers without `prev` read from, to the sink len(prev), which reads from
    all layers that no other reads from. Takes time linear in layers and edges times the depth of nesting.
    """
    sink = len(prev)
    reads = {layer: tuple(before) or (SOURCE,) for layer, before in enumerate(prev)}
    read = {before for earlier in reads.values() for before in earlier}
    reads[sink] = tuple(layer for layer in range(sink) if layer not in read)
    return _series(SOURCE, sink, list(range(sink)), reads)


def _series(first: int, last: int, inner: list[int], reads: dict[int, tuple[int, ...]]) -> Series:
    """Of all the layers `inner`, in topological order, that lie between two (an edge between these aside)."""
    inside = {first, *inner}
    reach: dict[int, int] = {}  # the farthest layer that an edge leads to from each
    for layer in (*inner, last):
        for before in reads[layer]:
            if before in inside and (before, layer) != (first, last):
                reach[before] = max(reach.get(before, before), layer)
    cuts: list[int] = []
    segments: list[list[int]] = [[]]
    open_until = reach.get(first, first)
    for layer in inner:
        if open_until <= layer:  # no edge leads past it: every path goes through it
            cuts.append(layer)
            segments.append([])
        else:
            segments[-1].append(layer)
        open_until = max(open_until, reach.get(layer, layer))
    ends = [first, *cuts, last]
    links = [_link(ends[i], ends[i + 1], segment, reads) for i, segment in enumerate(segments)]
    return Series(tuple(cuts), tuple(links))


def _link(first: int, last: int, inner: list[int], reads: dict[int, tuple[int, ...]]) -> Link:
    """What lies between two layers, of which none is on every path."""
    if not inner:
        return Edge()
    parts = _components(inner, reads)
    skip = first in reads[last]
    if len(parts) == 1 and not skip:
        return Knot(tuple(inner))
    return LayerBlock(tuple(_series(first, last, part, reads) for part in parts), skip)


def _components(layers: list[int], reads: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """The layers in groups that no edge connects, each in topological order."""
    group = {layer: layer for layer in layers}

    def root(layer: int) -> int:
        while group[layer] != layer:
            group[layer] = group[group[layer]]
            layer = group[layer]
        return layer

    for layer in layers:
        for before in reads[layer]:
            if before in group:
                group[root(layer)] = root(before)
    parts: dict[int, list[int]] = {}
    for layer in layers:
        parts.setdefault(root(layer), []).append(layer)
    return list(parts.values())
