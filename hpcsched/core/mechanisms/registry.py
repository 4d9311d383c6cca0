"""The mechanisms that there are, in the order in which they are asked; a plug-in adds its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.elastic.mechanism import Elastic
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.model import Role
from hpcsched.core.parts import Parts

Make = Callable[[Parts], Mechanism]

_made_by: dict[str, Make] = {one.name: one for one in (Packing, Background, Elastic, Cpu)}
_BUILT_IN = frozenset(_made_by)


def register(name: str, make: Make) -> None:
    """Add a mechanism to all machines made from now on, after those that there are.

    Raises ValueError if there is one of this name or with this role, and for one that gives leases without
    `hold` and `release`. A journal with jobs that use it can be
    read where it is registered only.
    """
    if name in _made_by:
        raise ValueError(f"there is a mechanism {name!r} already")
    role, taken = getattr(make, "role", None), {getattr(other, "role", None) for other in _made_by.values()}
    if role is not None and role in {*Role, *taken}:
        raise ValueError(f"there is a mechanism with the role {str(role)!r} already")
    for needed in ("hold", "release") if role is not None else ():
        if getattr(make, needed, None) is getattr(Mechanism, needed):
            raise ValueError(f"mechanism {name!r} gives leases, and has no `{needed}`")
    _made_by[name] = make


def added() -> tuple[str, ...]:
    """Names of the mechanisms that other packages have added."""
    return tuple(name for name in _made_by if name not in _BUILT_IN)


def registered() -> Sequence[Make]:
    """What makes each mechanism, in order."""
    return tuple(_made_by.values())
