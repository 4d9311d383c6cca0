"""Cutting a recorded pass into the pieces of its layers, each with what it needs to be run alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from hpcsched.compat import zip
from hpcsched.errors import ConfigError
from hpcsched.worker.layers.fuse import Op, fuse
from hpcsched.worker.layers.passes import ByMode, overwrites
from hpcsched.worker.layers.symbols import BATCHES, name_of

# fmt: off
_WEIGHTED = frozenset({
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "embedding", "embedding_bag", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum",
    "tensordot",
})
"""Functions that a layer begins with where they are given a parameter."""

_RANDOM = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial", "normal",
    "dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d",
})
# fmt: on

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass
class LayerPiece:
    """One layer: `graph` takes the values of the recorded nodes `inputs` and returns those of `outputs`."""

    name: str
    members: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    graph: fx.Graph = field(default_factory=fx.Graph)


def cut(model: nn.Module, graph: fx.Graph, root: nn.Module) -> tuple[list[LayerPiece], list[fx.Node]]:
    """The pieces of a recorded pass, in an order they can run in, and the nodes of the model's inputs.

    Only tensors made from the model's inputs travel between pieces. All else (sizes, masks, positions, what
    is made of parameters alone) is made anew in every piece that uses it. Raises ConfigError naming the
    module that does not allow it.
    """
    return _Cut(model, graph, root).pieces()


class _Cut:
    def __init__(self, model: nn.Module, graph: fx.Graph, root: nn.Module) -> None:
        self.model, self.root = model, root
        self.carried: set[fx.Node] = set()  # tensors made from the model's inputs
        self.weights: set[fx.Node] = set()  # tensors made from parameters only
        self.modal: set[fx.Node] = set()  # what differs between training and evaluation
        self.drawn: dict[fx.Node, LayerPiece] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._classify(node)
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.ops = [node for node in graph.nodes if node in self.carried and node.op != "placeholder"]
        self.result = self._result(next(iter(reversed(graph.nodes))))

    def pieces(self) -> tuple[list[LayerPiece], list[fx.Node]]:
        number = {node: i for i, node in enumerate(self.ops)}
        ops = []
        for node in self.ops:
            reads = self._reads(node)
            tied = frozenset(number[n] for n in reads if n in number and not _travels(n))
            ops.append(Op(tuple(number.get(n, -1) for n in reads), self._weighted(node), tied))
        groups = [[self.ops[i] for i in group] for group in fuse(ops)]
        pieces = [LayerPiece(*named) for named in zip(self._names(groups), groups, strict=True)]
        for piece in pieces:
            inside = set(piece.members)
            piece.inputs = list(
                dict.fromkeys(n for m in piece.members for n in self._reads(m) if n not in inside)
            )
        crossing = {node for piece in pieces for node in piece.inputs} | {self.result}
        for piece in pieces:
            piece.outputs = [node for node in piece.members if node in crossing]
            self._fill(piece)
        return pieces, self.inputs

    def refuse(self, node: fx.Node, got: str, accepted: str) -> NoReturn:
        raise ConfigError(
            where=name_of(self.model), key=node.meta.get("path", ""), got=got, accepted=accepted
        )

    # What the nodes are

    def _classify(self, node: fx.Node) -> None:
        reads = node.all_input_nodes
        of_data = _tensors(node) and self.carried.intersection(reads) and not _name(node).startswith("new_")
        if node.op == "placeholder" or of_data:
            self.carried.add(node)
            self._check_samples(node)
            return
        if isinstance(self._module(node), ByMode) or self.modal.intersection(reads):
            self.modal.add(node)
        parameter = node.op == "get_attr" and isinstance(
            attrgetter(str(node.target))(self.root), nn.Parameter
        )
        if parameter or (_tensors(node) and self.weights.intersection(reads)):
            self.weights.add(node)

    def _check_samples(self, node: fx.Node) -> None:
        """Refuse what mixes samples, as far as the shapes tell."""
        apart = "what treats every sample by itself, or a normalisation module"
        if _name(node) == "batch_norm" and node.kwargs.get("training") is not False:
            self.refuse(node, "batch_norm as a function", "torch.nn.BatchNorm")
        first, second = node.meta["seen"]
        if isinstance(first, torch.Tensor):
            if first.dim() != second.dim() or not _varying(node):
                self.refuse(node, f"{_name(node)} makes one tensor of all samples", apart)
            if len(_varying(node)) > 1:
                self.refuse(node, f"{_name(node)} relates the samples of a batch to each other", apart)

    def _result(self, output: fx.Node) -> fx.Node:
        node = output.args[0]
        accepted = "one tensor with the samples along the first dimension"
        if not isinstance(node, fx.Node) or not isinstance(node.meta["seen"][0], torch.Tensor):
            found = node.meta["seen"][0] if isinstance(node, fx.Node) else node
            self.refuse(output, f"its result is a {type(found).__name__}", accepted)
        if node not in self.ops:
            self.refuse(output, "its result is not computed from its inputs", accepted)
        if not _travels(node):
            shape = tuple(
                "batch" if i in _varying(node) else n for i, n in enumerate(node.meta["seen"][0].shape)
            )
            self.refuse(output, f"its result has the shape {shape}".replace("'", ""), accepted)
        return node

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _weighted(self, node: fx.Node) -> bool:
        if (module := self._module(node)) is not None:
            return not isinstance(module, _NORMS) and any(p.dim() > 1 for p in module.parameters())
        return _name(node) in _WEIGHTED and bool(self.weights.intersection(node.all_input_nodes))

    def _names(self, groups: list[list[fx.Node]]) -> Iterator[str]:
        """Each layer is called after its first module with weights, else after what it begins with."""
        taken: dict[str, int] = {}
        for group in groups:
            first = next(filter(self._weighted, group), group[0])
            name = str(first.target)
            if first.op != "call_module":
                name = ".".join(filter(None, [first.meta["path"], _name(first).strip("_")]))
            taken[name] = taken.get(name, 0) + 1
            yield name if taken[name] == 1 else f"{name}#{taken[name]}"

    # What they need

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        """The carried values that an operation needs, also by way of what is made anew for it."""
        found: dict[fx.Node, None] = {}
        for read in node.all_input_nodes:
            if read in self.carried:
                found[read] = None
            elif not self._replaceable(read):
                found.update(dict.fromkeys(self._reads(read)))
        return list(found)

    def _origins(self, node: fx.Node) -> set[fx.Node]:
        """The carried values that a size or the like was taken from."""
        reads = node.all_input_nodes
        return self.carried.intersection(reads).union(
            *(self._origins(n) for n in reads if n not in self.carried)
        )

    def _replaceable(self, node: fx.Node) -> bool:
        """Whether a value can be had without those it was made from (see `_replacement`)."""
        first, second = node.meta["seen"]
        if _tensors(node) or node in self.modal:
            return False
        return bool(first == second or (first, second) == BATCHES)

    def _replacement(self, node: fx.Node, graph: fx.Graph, tensor: fx.Node) -> Any:
        """The batch size and the device from any tensor of a layer; else what is the same for every batch."""
        first, second = node.meta["seen"]
        if first != second:
            return graph.call_method("size", (tensor, 0))
        if isinstance(first, torch.device):
            return graph.call_function(getattr, (tensor, "device"))
        return first

    # The pieces

    def _fill(self, piece: LayerPiece) -> None:
        """Write the piece's graph."""
        graph, members = piece.graph, set(piece.members)
        made: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in piece.inputs}

        def value(node: fx.Node) -> Any:
            if node not in made:
                if self._replaceable(node) and not self._origins(node) <= made.keys():
                    made[node] = self._replacement(node, graph, made[piece.inputs[0]])
                else:
                    made[node] = graph.node_copy(node, value)
                self._check_drawn(node, piece)
            return made[node]

        for node in piece.members:
            read = node.args[0] if node.args else None
            if overwrites(self.root, node) and isinstance(read, fx.Node) and read not in members:
                made[read] = graph.call_function(torch.clone, (made[read],))  # not the others' tensor
            value(node)
        graph.output(tuple(made[node] for node in piece.outputs))

    def _check_drawn(self, node: fx.Node, piece: LayerPiece) -> None:
        """Random numbers that are not the samples' own cannot be drawn anew in every layer."""
        random = isinstance(self._module(node), (_DropoutNd, _NormBase)) or _name(node) in _RANDOM
        if random and node not in self.carried and self.drawn.setdefault(node, piece) is not piece:
            names = f"{self.drawn[node].name} and {piece.name}"
            self.refuse(
                node, f"{names} use the same random numbers", "random numbers for each layer, or sample"
            )


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _tensors(node: fx.Node) -> bool:
    """Whether its value has tensors in it."""
    found: list[Any] = []
    torch.utils._pytree.tree_map_only(torch.Tensor, found.append, node.meta["seen"][0])
    return bool(found)


def _varying(node: fx.Node) -> list[int]:
    """The dimensions of a tensor that depend on the batch size."""
    first, second = (value.shape for value in node.meta["seen"])
    return [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]


def _travels(node: fx.Node) -> bool:
    """Whether it is a tensor with the samples along the first dimension, so that it can be cut by sample."""
    first, second = node.meta["seen"]
    if not isinstance(first, torch.Tensor):
        return False
    return _varying(node) == [0] and (len(first), len(second)) == BATCHES
