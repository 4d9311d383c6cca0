"""The mechanisms that there are, in the order in which they are asked; a plug-in adds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.elastic.mechanism import Elastic
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.model import Role
from hpcsched.core.parts import Parts

Make = Callable[[Parts], Mechanism]

_made_by: dict[str, Make] = {one.name: one for one in (Packing, Sharing, Background, Elastic, Cpu)}
_BUILT_IN = frozenset(_made_by)


def register(name: str, make: Make) -> None:
    """Add a mechanism to all machines made from now on, after those that there are.

    Raises ValueError if there is one of this name or with this role, and for one that says the half of what
    belongs together. A journal with jobs that use it can be read where it is registered only.
    """
    if name in _made_by:
        raise ValueError(f"there is a mechanism {name!r} already")
    role, taken = getattr(make, "role", None), {getattr(other, "role", None) for other in _made_by.values()}
    if role is not None and role in {*Role, *taken}:
        raise ValueError(f"there is a mechanism with the role {str(role)!r} already")
    if missing := [method for method in _needed(make) if not _has_own(make, method)]:
        raise ValueError(f"mechanism {name!r} has no {' and no '.join(f'`{method}`' for method in missing)}")
    _made_by[name] = make


def _needed(make: Make) -> Iterator[str]:
    """The methods that a mechanism needs by what else it has: those of `Mechanism` can say nothing there."""
    if getattr(make, "role", None) is not None:
        yield from ("hold", "release")
    if _has_own(make, "waits"):
        yield "waiting_reason"
    if _has_own(make, "change"):
        yield from ("settle", "keep", "changed_to")


def _has_own(make: Make, method: str) -> bool:
    return getattr(make, method, None) is not getattr(Mechanism, method)


def added() -> tuple[str, ...]:
    """Names of the mechanisms that other packages have added."""
    return tuple(name for name in _made_by if name not in _BUILT_IN)


def registered() -> Sequence[Make]:
    """What makes each mechanism, in order."""
    return tuple(_made_by.values())
