"""Makes the stacked forward pass of a pack lean: the same numbers with fewer and larger operations.

`torch.vmap` writes for each operation what is right in general. Much of it does nothing for a stack of
models, and copies the activations of convolutions between two layouts, [models, samples, channels, ...] and
[samples, models * channels, ...]. What is left out here changes no result; a stack is checked against its
models one by one before it is used (`stacking`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
_ELEMENTWISE = (
    *(aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.silu.default, aten.gelu.default),
    *(aten.leaky_relu.default, aten.elu.default, aten.hardtanh.default, aten.hardswish.default),
)
"""Of one tensor: these may be computed in any layout."""

_POOLS = (
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.mean.dim,
)
"""Of each channel by itself: these may be computed with the models among the channels."""

_MODELS_FIRST = [1, 0, 2, 3, 4]
"""From [samples, models, channels, height, width] to models first, and back."""


def simplify(module: GraphModule) -> GraphModule:
    """Rewrite a stacked forward pass in place until nothing is left to be rewritten."""
    graph = module.graph
    rules: tuple[Callable[[Graph, Node], bool], ...] = (
        *(_unused, _nothing_done, _view_of_view, _transposed_back, _permuted_back, _copied_for_nothing),
        *(_bias_of_product, _bias_of_convolution, _affine_batch_norm),
        *(_elementwise_before_layout, _pool_before_layout),
    )
    while sum(_applied(graph, rule) for rule in rules):
        pass
    graph.lint()
    module.recompile()
    return module


def _applied(graph: Graph, rule: Callable[[Graph, Node], bool]) -> bool:
    """Whether a rule has changed anything."""
    changed = False
    for node in reversed(graph.nodes):
        if node.op == "call_function":
            with contextlib.suppress(RuntimeError, ValueError):  # not in the layout that these tensors have
                changed |= rule(graph, node)
    return changed


# -- what is known of a node -----------------------------------------------------------------------------


def shape_of(node: Any) -> list[int] | None:
    """The shape of what a node gives; None where it gives no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _used_once(node: Node) -> bool:
    return len(node.users) == 1


def _insert(graph: Graph, before: Node, target: Any, *args: Any, **options: Any) -> Node:
    """A new operation right before another one. Raises what it raises for tensors that it cannot take."""
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    made = target(*values, **options)
    with graph.inserting_before(before):
        node = graph.call_function(target, args, options)
    node.meta["val"] = made
    return node


def _replace(graph: Graph, old: Node, new: Node) -> bool:
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return True


# -- rules: each rewrites one node, and says whether it did ------------------------------------------------


def _unused(graph: Graph, node: Node) -> bool:
    """Nobody reads it, and it changes nothing (batch norm changes its statistics)."""
    changes = isinstance(node.target, torch._ops.OpOverload) and (
        node.target._schema.is_mutable or "batch_norm" in node.target.name()
    )
    if node.users or changes:
        return False
    graph.erase_node(node)
    return True


def _nothing_done(graph: Graph, node: Node) -> bool:
    """It gives what it is given."""
    given = node.args[0] if node.args else None
    if not isinstance(given, Node):
        return False
    nothing = (
        (_is(node, *_RESHAPES) and shape_of(node) == shape_of(given))
        or (_is(node, aten.permute.default) and list(node.args[1]) == sorted(node.args[1]))  # type: ignore
        or (_is(node, aten.mul.Scalar) and node.args[1] == 1 and _same_type(node, given))
    )
    return bool(nothing) and _replace(graph, node, given)


def _same_type(one: Node, other: Node) -> bool:
    return bool(one.meta["val"].dtype == other.meta["val"].dtype)


def _view_of_view(graph: Graph, node: Node) -> bool:
    """Two views in a row are one."""
    views = aten.view.default, aten._unsafe_view.default
    if not (_is(node, *views) and _is(node.args[0], *views)):
        return False
    first = node.args[0]
    node.update_arg(0, first.args[0])  # type: ignore[union-attr]
    return True


def _transposed_back(graph: Graph, node: Node) -> bool:
    """Two dimensions exchanged, and back."""
    given = node.args[0] if node.args else None
    if not (_is(node, aten.transpose.int) and _is(given, aten.transpose.int)):
        return False
    return node.args[1:] == given.args[1:] and _replace(graph, node, given.args[0])  # type: ignore[union-attr, arg-type]


def _permuted_back(graph: Graph, node: Node) -> bool:
    """Models first, and back."""
    given = node.args[0] if node.args else None
    if _is(given, aten.clone.default):  # nobody needs the copy for its own sake: nothing writes into it
        given = given.args[0]  # type: ignore[union-attr]
    if not (_is(node, aten.permute.default) and _is(given, aten.permute.default)):
        return False
    if not (list(node.args[1]) == list(given.args[1]) == _MODELS_FIRST):  # type: ignore
        return False
    return _replace(graph, node, given.args[0])  # type: ignore[union-attr, arg-type]


def _copied_for_nothing(graph: Graph, node: Node) -> bool:
    """A copy that was to make a tensor contiguous, which it is by now."""
    if not _is(node, aten.clone.default):
        return False
    given, made = node.args[0], node.args[0]
    while _is(made, aten.view.default, aten._unsafe_view.default):
        made = made.args[0]  # type: ignore[union-attr, index]
    fresh = _is(made, *_ELEMENTWISE, aten.convolution.default, operator.getitem)
    value = given.meta["val"]  # type: ignore[union-attr, index]
    return fresh and value.is_contiguous() and _replace(graph, node, given)  # type: ignore[arg-type]


def _bias_of_product(graph: Graph, node: Node) -> bool:
    """A product of matrices with a bias added is one operation."""
    if not _is(node, aten.add.Tensor) or node.kwargs:
        return False
    for product, bias in (node.args[::-1], node.args):
        if (
            _is(product, aten.bmm.default)
            and _used_once(product)  # type: ignore[arg-type]
            and shape_of(node) == shape_of(product)
            and len(shape_of(bias) or ()) == 3
        ):
            return _replace(graph, node, _insert(graph, node, aten.baddbmm.default, bias, *product.args))  # type: ignore[union-attr]
    return False


def _of_shape(node: Any, shape: Sequence[int]) -> Node | None:
    """The node of this shape that others only reshape into this one."""
    while isinstance(node, Node) and shape_of(node) != list(shape):
        if not _is(node, *_RESHAPES[:2], aten.unsqueeze.default):
            return None
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _chain(node: Any, *targets: Any) -> list[Node] | None:
    """A node and what it is made of, one after the other, by these operations, each used by the next only."""
    nodes: list[Node] = []
    for target in targets:
        if not _is(node, target) or (nodes and not _used_once(node)):
            return None
        nodes.append(node)
        node = node.args[0]
    return nodes


def _bias_of_convolution(graph: Graph, node: Node) -> bool:
    """A convolution adds its bias itself."""
    if not _is(node, aten.add.Tensor) or node.kwargs:
        return False
    for product, added in (node.args, node.args[::-1]):
        chain = _chain(product, aten.permute.default, aten.view.default, aten.convolution.default)
        if chain is None or not _used_once(chain[0]) or shape_of(node) != shape_of(product):
            continue
        permute, view, convolution = chain
        models, _, channels = (shape_of(product) or [])[:3]
        bias = _of_shape(added, [models, channels])
        if bias is None or convolution.args[2] is not None or list(permute.args[1]) != _MODELS_FIRST:  # type: ignore[arg-type]
            continue
        if shape_of(added) != [models, 1, channels, 1, 1]:
            continue
        flat = _insert(graph, node, aten.view.default, bias, [models * channels])
        args = [*convolution.args[:2], flat, *convolution.args[3:]]
        new = _insert(graph, node, aten.convolution.default, *args)
        new = _insert(graph, node, aten.view.default, new, view.args[1])
        return _replace(graph, node, _insert(graph, node, aten.permute.default, new, _MODELS_FIRST))
    return False


def _affine_batch_norm(graph: Graph, node: Node) -> bool:
    """Batch norm multiplies by its weight and adds its bias itself."""
    chain = _chain(
        *(node, aten.transpose.int, aten.add.Tensor, aten.mul.Tensor),
        *(aten.view.default, aten.transpose.int, operator.getitem),
    )
    if chain is None:
        return False
    last, add, mul, _, first, result = chain
    norm = result.args[0]
    if not _is(norm, aten.native_batch_norm.default) or result.args[1] != 0:
        return False
    models, channels, samples, *area = shape_of(add) or []
    weight, bias = (_of_shape(each.args[1], [models, channels]) for each in (mul, add))
    if (
        weight is None
        or bias is None
        or first.args[1:] != (0, 1)
        or last.args[1:] != (1, 2)
        or len(area) != 2
        or not (weight < norm and bias < norm)  # type: ignore[operator]
        or not (_is(norm.args[1], aten.ones.default) and _is(norm.args[2], aten.zeros.default))  # type: ignore
        or shape_of(norm.args[0]) != [samples, models * channels, *area]  # type: ignore[union-attr]
    ):
        return False
    flat = [_insert(graph, norm, aten.view.default, each, [models * channels]) for each in (weight, bias)]  # type: ignore
    norm.update_arg(1, flat[0])  # type: ignore[union-attr]
    norm.update_arg(2, flat[1])  # type: ignore[union-attr]
    apart = _insert(graph, node, aten.view.default, result, [samples, models, channels, *area])
    return _replace(graph, node, _insert(graph, node, aten.permute.default, apart, _MODELS_FIRST))


def _elementwise_before_layout(graph: Graph, node: Node) -> bool:
    """Compute in the layout that is there, and change it after that: a later layer may want it so."""
    if not _is(node, *_ELEMENTWISE):
        return False
    permute = node.args[0]
    if not (_is(permute, aten.permute.default) and _used_once(permute)):  # type: ignore[arg-type]
        return False
    new = _insert(graph, node, node.target, permute.args[0], *node.args[1:])  # type: ignore[union-attr]
    return _replace(graph, node, _insert(graph, node, aten.permute.default, new, permute.args[1]))  # type: ignore[union-attr]


def _pool_before_layout(graph: Graph, node: Node) -> bool:
    """Pool each model's channels where they are, instead of copying all to have the models among samples."""
    if not _is(node, *_POOLS) or not (node.target is not aten.mean.dim or _over_area(node)):
        return False
    chain = _chain(node.args[0], aten._unsafe_view.default, aten.clone.default, aten.permute.default)
    if chain is None or list(chain[2].args[1]) != _MODELS_FIRST:  # type: ignore[arg-type]
        return False
    models, samples, channels, *area = shape_of(chain[2]) or []
    if shape_of(chain[0]) != [models * samples, channels, *area]:
        return False
    results = [node]
    if node.target is aten.max_pool2d_with_indices.default:
        results = [user for user in node.users if user.args[1] == 0]
        if any(user.args[1] != 0 and user.users for user in node.users):
            return False  # somebody wants to know which were the largest
    together = _insert(graph, node, aten.view.default, chain[2].args[0], [samples, models * channels, *area])
    pooled = _insert(graph, node, node.target, together, *node.args[1:])
    if node.target is aten.max_pool2d_with_indices.default:
        pooled = _insert(graph, node, operator.getitem, pooled, 0)
    size = (shape_of(pooled) or [])[2:]
    apart = _insert(graph, node, aten.view.default, pooled, [samples, models, channels, *size])
    first = _insert(graph, node, aten.permute.default, apart, _MODELS_FIRST[: len(size) + 3])
    copy = _insert(graph, node, aten.clone.default, first, memory_format=torch.contiguous_format)
    merged = _insert(graph, node, aten._unsafe_view.default, copy, [models * samples, channels, *size])
    for result in results:
        result.replace_all_uses_with(merged)
    return True


def _over_area(node: Node) -> bool:
    return len(node.args) == 3 and node.args[1] in ([-1, -2], [2, 3], [-2, -1]) and node.args[2] is True
