"""Which parts of a model are frozen: callbacks change it between epochs, and no checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def capture(module: Any) -> dict[str, bool]:
    """Whether each parameter is trained, and each batch norm takes part, by name."""
    return {name: getattr(part, switch) for name, part, switch in _switches(module)}


def restore(module: Any, before: Mapping[str, bool]) -> None:
    """Have it as `capture` has found it; what it did not know stays."""
    for name, part, switch in _switches(module):
        if before.get(name, getattr(part, switch)) != getattr(part, switch):
            setattr(part, switch, before[name])


def _switches(module: Any) -> Iterator[tuple[str, Any, str]]:
    for name, parameter in module.named_parameters():
        yield name, parameter, "requires_grad"
    for name, part in module.named_modules():
        if hasattr(part, "track_running_stats"):
            yield name, part, "track_running_stats"
