"""Several trainings as one on a device: `load` brings one there, `pack` lets them share it, `free` takes one
out (pack, section 2.2).

    first, second = (load(Digits().build(args)) for args in configurations)
    together = pack([first, second])
    while first.session.step < 100:
        together.step()
    checkpoint = free(first, together)       # the other one goes on
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcsched.worker.packed.together import Failed, Member, OutOfMemory, Pack, free, load, pack

__all__ = ["Failed", "Member", "OutOfMemory", "Pack", "free", "load", "pack"]


def __getattr__(name: str) -> Any:
    """Import on first use: a packed job's own process (`guest`) needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    together = import_module(f"{__name__}.together")
    # All at once, as `pack` is also the name of a module, which would take the function's place.
    globals().update({known: getattr(together, known) for known in __all__})
    return globals()[name]
