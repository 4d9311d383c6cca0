"""From what was recorded to a graph that can be cut: good for both modes, nothing overwritten."""

from __future__ import annotations

import operator
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from hpcsched.compat import zip
from hpcsched.errors import ConfigError
from hpcsched.worker.layers.symbols import STATIC, Tracer, name_of


class ByMode(nn.Module):
    """Gives one value while `owner` is in training mode, another in evaluation.

    It stands for `self.training` in a recorded pass. The owner is not its submodule.
    """

    def __init__(self, owner: nn.Module, training: Any, evaluation: Any) -> None:
        super().__init__()
        self._of = (owner, training, evaluation)

    def forward(self) -> Any:
        owner, training, evaluation = self._of
        return training if owner.training else evaluation


class Root(nn.Module):
    """Where the targets of a recorded pass are found: the model's own, and what tracing has added."""

    def __init__(self, model: nn.Module, added: dict[str, Any]) -> None:
        super().__init__()
        vars(self)["_model"] = model  # not as a submodule
        for name, value in added.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_model"], name)


def record(model: nn.Module, example: tuple[torch.Tensor, ...]) -> tuple[fx.Graph, Root]:
    """The model's forward pass, for training and evaluation, and where its targets are found.

    Of what it overwrites, only modules made with inplace=True are left, where nobody else reads the tensor.
    Raises ConfigError with the module's name where the pass does not allow this.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        training = Tracer(model.train(), example)
        graph = training.record()
        before = _plain_values(model)
        evaluating = Tracer(model.eval(), example)
        other = evaluating.record()
        for (path, name), value in _plain_values(model).items():
            if before.get((path, name), value) != value:  # not what a first pass only sets up
                evaluating.path = path
                evaluating.refuse(f"changes its attribute {name!r} in each forward pass")
    finally:
        for module, mode in modes.items():
            module.training = mode
    root = Root(model, training.constants)
    _blend(model, root, graph, other)
    _keep_what_is_read(model, graph)
    for node in reversed(graph.nodes):
        if node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), nn.Identity):
            node.replace_all_uses_with(node.args[0])
        if not node.users and node.op not in ("output", "placeholder"):
            graph.erase_node(node)
    return graph, root


def _plain_values(model: nn.Module) -> dict[tuple[str, str], object]:
    """What the modules have of Python's own values: a recording keeps those that it reads as they are."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "training" and isinstance(value, (bool, int, float, str))
    }


def overwrites(root: nn.Module, node: fx.Node) -> bool:
    """Whether it writes into the tensor that is its first argument."""
    read = node.args[0] if node.args else None
    if not (isinstance(read, fx.Node) and isinstance(read.meta["seen"][0], torch.Tensor)):
        return False
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = str(getattr(node.target, "__name__", node.target))
    return (
        (node.op == "call_function" and name in _OPERATORS)
        or node.kwargs.get("inplace") is True
        or (name.endswith("_") and not name.endswith("__"))
    )


_OPERATORS = {"iadd": operator.add, "isub": operator.sub, "imul": operator.mul, "itruediv": operator.truediv}


def _blend(model: nn.Module, root: Root, graph: fx.Graph, other: fx.Graph) -> None:
    """Make `graph`, of training, right for evaluation too, as `other` is."""
    same_as: dict[Any, fx.Node] = {}
    names = (f"_by_mode{i}" for i in count())

    def both(node: fx.Node, here: Any, there: Any) -> Any:
        there = same_as.get(there, there) if isinstance(there, fx.Node) else there
        if type(here) is type(there):
            if isinstance(here, (tuple, list)) and len(here) == len(there):
                return type(here)(both(node, a, b) for a, b in zip(here, there, strict=True))
            if isinstance(here, dict) and here.keys() == there.keys():
                return {key: both(node, here[key], there[key]) for key in here}
            if isinstance(here, slice):
                ends = ((here.start, there.start), (here.stop, there.stop), (here.step, there.step))
                return slice(*(both(node, a, b) for a, b in ends))
            if here is there or (not isinstance(here, fx.Node) and here == there):
                return here
        if isinstance(here, fx.Node) or isinstance(there, fx.Node):
            differs(node)
        name, path = next(names), node.meta["path"]
        setattr(root, name, ByMode(model.get_submodule(path), here, there))
        with graph.inserting_before(node):
            chosen = graph.create_node("call_module", name)
        chosen.meta.update(path=path, seen=(here, here))
        return chosen

    def differs(node: fx.Node) -> None:
        raise ConfigError(
            where=name_of(model),
            key=node.meta.get("path", ""),
            got="does other operations in training than in evaluation",
            accepted=STATIC,
        )

    for here, there in zip(list(graph.nodes), other.nodes, strict=False):
        if (here.op, here.target) != (there.op, there.target):
            differs(there if here.op == "output" else here)
        same_as[there] = here
        here.args = both(here, here.args, there.args)
        here.kwargs = both(here, here.kwargs, there.kwargs)


def _keep_what_is_read(model: nn.Module, graph: fx.Graph) -> None:
    """Let no operation overwrite what another one reads: that may run before it or after, or elsewhere."""
    position: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    for node in [node for node in position if overwrites(model, node)]:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        for user in [user for user in target.users if position[user] > position[node]]:
            user.replace_input_with(target, node)
        aliases = [n for n in position if position[n] < position[node] and _same_memory(n, target)]
        readers = {user for alias in aliases for user in alias.users}
        late = [user for user in readers if position[user] > position[node]]
        others = readers - {*aliases, node}
        if not late and others and node.op == "call_module":
            with graph.inserting_before(node):
                copy = graph.call_function(torch.clone, (target,))
            copy.meta.update(path=node.meta["path"], seen=target.meta["seen"])
            position[copy] = position[node] - 0.5
            node.replace_input_with(target, copy)
        elif late or target.op == "get_attr" or not _out_of_place(node):
            name = getattr(node.target, "__name__", node.target)
            raise ConfigError(
                where=name_of(model),
                key=node.meta["path"],
                got=f"{name} overwrites a tensor that is used in other places too",
                accepted="the operation that makes a new tensor",
            )


def _out_of_place(node: fx.Node) -> bool:
    """Have it make a new tensor instead, if there is such an operation; a module stays as it was made."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_module":
        return True
    if "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": False}
        return True
    if node.op == "call_method":
        found: Any = name[:-1] if hasattr(torch.Tensor, name[:-1]) else None
    else:
        homes = (getattr(torch, name[:-1], None), getattr(functional, name[:-1], None))
        found = _OPERATORS.get(name) or next(filter(None, homes), None)
    node.target = found or node.target
    return found is not None


def _same_memory(one: fx.Node, other: fx.Node) -> bool:
    a, b = (node.meta["seen"][0] if "seen" in node.meta else None for node in (one, other))
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
