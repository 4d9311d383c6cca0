"""Strategies as a job names them: those of `contract.strategies`, and those that other packages add.

A package adds one by an entry point of the group `hpcsched.strategies`: its name is the kind, its object a
subclass of `contract.strategies.Strategy`. It is loaded when a job names it, so no command waits for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcsched.contract import strategies
from hpcsched.contract.strategies import KINDS, Strategy
from hpcsched.errors import ConfigError

GROUP = "hpcsched.strategies"


def read(given: Mapping[str, Any], *, where: str, key: str = "", trainer: bool | None = None) -> Strategy:
    """The strategy that a table describes, as `contract.strategies.read` has it.

    Raises ConfigError also for one that another package adds, and that cannot be loaded.
    """
    kind = given.get("kind")
    if not isinstance(kind, str) or kind in KINDS:
        return strategies.read(given, where=where, key=key, trainer=trainer)
    others = {name: point for name, point in _added().items() if name not in KINDS}
    strategies.kind_of(given, where=where, key=key or "kind", others=tuple(others))
    try:
        strategies.register(kind, others[kind].load())
    except Exception as error:  # whatever a module that is not ours raises when it is imported
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            where=where,
            key=key or "kind",
            got=f"the strategy {kind!r} ({others[kind].value}) cannot be loaded: {why}",
            accepted="a package that gives one: mend it, or remove it",
        ) from error
    return strategies.read(given, where=where, key=key, trainer=trainer)


def known(kind: str) -> bool:
    """Whether there is a strategy of this name, of ours or of a package that is installed."""
    return kind in KINDS or kind in _added()


def _added() -> dict[str, Any]:
    """Entry points by their names."""
    from importlib.metadata import entry_points  # slow, and hardly ever needed

    found: Any = entry_points()
    ours = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    return {point.name: point for point in ours}
