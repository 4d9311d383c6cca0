"""Mechanisms that other packages add to the core, by entry points of the group `hpcsched.mechanisms`.

The name is the mechanism's, the object a subclass of `core.mechanisms.base.Mechanism` that is made of `Parts`
and has a `rule`. All of them are loaded before the first machine is made: a journal may need any of them.
"""

from __future__ import annotations

from functools import cache

from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.mechanisms.registry import register
from hpcsched.errors import ConfigError
from hpcsched.policy.around import register_rule

GROUP = "hpcsched.mechanisms"


def add(kind: type[Mechanism]) -> None:
    """Make a mechanism known to all machines that are made from now on, and its rule to all policies.

    Raises ValueError for what is none, and for a name or a role that is taken.
    """
    if not (isinstance(kind, type) and issubclass(kind, Mechanism)):
        raise ValueError(f"{kind!r} does not inherit hpcsched.core.mechanisms.base.Mechanism")
    if not getattr(kind, "name", ""):
        raise ValueError(f"{kind!r} has no `name`")
    register(kind.name, kind)
    if kind.rule is not None:
        register_rule(kind.name, kind.rule)


@cache
def load() -> None:
    """Add what other packages have. Raises ConfigError for one that cannot be loaded."""
    from importlib.metadata import entry_points  # slow

    for point in entry_points(group=GROUP):
        try:
            add(point.load())
        except Exception as error:  # whatever a module that is not ours raises when it is imported
            why = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                where=f"entry point {GROUP}",
                key=point.name,
                got=f"{point.value} cannot be loaded: {why}",
                accepted="a package that gives one: mend it, or remove it",
            ) from error
