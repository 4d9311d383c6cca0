"""One forward pass of a frozen model for several trainings: what is each one's own runs for each on its rows,
all the rest once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpcsched.worker.packing.adapters.draws import Draws
from hpcsched.worker.packing.adapters.frozen import Frozen, under
from hpcsched.worker.packing.adapters.lora import added, computed_together, plain_lora
from hpcsched.worker.packing.adapters.rows import Call, Rows, rows_of
from hpcsched.worker.packing.reference import NotStackable

Forward = Callable[..., Any]


class JointForward:
    """The frozen model of several, each with its own adapters in it; to be called in `laid_over`.

    The modules are those of the first; nothing of them stays changed after that.
    """

    def __init__(self, parts: Sequence[Frozen]) -> None:
        self._backbone = parts[0].backbone
        self.takes = inspect.signature(self._backbone.forward)
        """The arguments of the frozen model."""
        paths = dict.fromkeys(path for frozen in parts for path in frozen.own)
        self._own = [[frozen.backbone.get_submodule(path) for frozen in parts] for path in paths]
        for modules in self._own:
            if len({type(under(module)) for module in modules}) > 1:
                raise NotStackable("what is frozen is not the same in all")
        self._rows = Rows((), None)
        self._draws: Draws | None = None

    def __call__(self, calls: Sequence[Call], draws: Callable[[Rows], Draws] | None) -> list[Any]:
        """What each would get.

        Args:
            draws: makes what random numbers are drawn with; None: none are.

        Raises NotStackable where these calls cannot be made as one.
        """
        first = calls[0]
        if any((call.autocast, call.gradients) != (first.autocast, first.gradients) for call in calls):
            raise NotStackable("the frozen model is not called with the same precision by all")
        self._rows = rows = rows_of(calls)
        self._draws = None if draws is None else draws(rows)
        joint = rows.join(calls, self.takes)
        device = next(v.device.type for v in joint.values() if isinstance(v, torch.Tensor))
        with (
            torch.set_grad_enabled(first.gradients),
            torch.autocast(device, dtype=first.autocast, enabled=first.autocast is not None),
            self._draws or contextlib.nullcontext(),
        ):
            output = self._backbone(**joint)
        return rows.apart(output)

    @property
    def rows(self) -> Rows:
        """Those of the newest pass."""
        return self._rows

    @contextlib.contextmanager
    def laid_over(self) -> Iterator[None]:
        """Within it, the modules that are somebody's own run for each: in a call, and in a backward pass that
        computes layers once more (gradient checkpointing)."""
        with contextlib.ExitStack() as stack:
            for modules in self._own:
                stack.enter_context(forward_replaced(modules[0], self._each(modules, modules[0].forward)))
            yield

    def _each(self, modules: Sequence[nn.Module], forward: Forward) -> Forward:
        own = [forward, *(module.forward for module in modules[1:])]
        bases = [under(module) if hasattr(module, "get_base_layer") else None for module in modules]
        plain = [module is under(module) and not _trained(module) for module in modules]
        base = next((one for one in bases if one is not None), None)
        if base is None and any(plain):  # where some train a copy of what others leave as it is
            base = next(module for module, is_plain in zip(modules, plain) if is_plain)

        loras = [None if is_plain else plain_lora(module) for module, is_plain in zip(modules, plain)]
        understood = computed_together(loras) and all(a or b for a, b in zip(plain, loras))

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            if understood and base is not None and len(args) == 1 and not kwargs:
                given: torch.Tensor = _forward_of(base, modules, own)(*args)
                return (given + added(args[0], loras, self._rows, self._own_draws)).to(given.dtype)
            return one_by_one(*args, **kwargs)

        def one_by_one(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = [self._parts(value) for value in args]
            named = {name: self._parts(value) for name, value in kwargs.items()}
            shared = None
            if base is not None:
                shared = self._rows.split(_forward_of(base, modules, own)(*args, **kwargs))
            results = []
            for member, call in enumerate(own):
                if shared is not None and plain[member]:
                    results.append(shared[member])
                    continue
                mine = [value[member] for value in given]
                with self._own_draws(member), _answering(bases[member], shared, member, mine):
                    results.append(call(*mine, **{name: value[member] for name, value in named.items()}))
            return self._rows.joined(results)

        return run

    def _parts(self, value: Any) -> Sequence[Any]:
        if isinstance(value, torch.Tensor) and value.ndim:
            return self._rows.split(value)
        return [value] * len(self._rows.counts)

    def _own_draws(self, member: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._draws is None else self._draws.of(member)


def _forward_of(base: nn.Module, modules: Sequence[nn.Module], own: Sequence[Forward]) -> Forward:
    """How the frozen module computes: where it is itself the first's, not what lies over it."""
    return own[modules.index(base)] if base in modules else base


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


@contextlib.contextmanager
def _answering(
    base: nn.Module | None, shared: Sequence[torch.Tensor] | None, member: int, given: Sequence[Any]
) -> Iterator[None]:
    """Within it, the frozen layer under an adapter gives what was computed for all."""
    if base is None or shared is None:
        yield
        return
    answer = shared[member]

    def known(x: Any, *_: Any, **__: Any) -> torch.Tensor:
        if not given or x is not given[0]:
            raise NotStackable("an adapter changes what its frozen layer is given")
        return answer

    with forward_replaced(base, known):
        yield


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Within it, a module computes something else; its hooks are called as ever."""
    own = vars(module)
    before = own.get("forward")  # some wrap it for an instance
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
