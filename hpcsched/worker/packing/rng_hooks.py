"""Python's and numpy's random functions tell when they are about to draw.

Swapping their generators for every step of every member would take as long as a small step. Hardly any step
draws from them: they are swapped when it is about to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any

import numpy as np

from hpcsched.worker.process.rng import PYTHONS

_about_to: Callable[[], None] | None = None
_thread = 0


def listen(about_to: Callable[[], None] | None) -> None:
    """Have this called before the next draw of this thread, and before every one after it; None: nothing."""
    global _about_to, _thread
    _about_to, _thread = about_to, get_ident()


def prepare() -> None:
    """Have the functions of the modules `random` and `numpy.random` tell; once is enough.

    Whoever has imported one of them by its name before has one that does not.
    """
    several = ((random, PYTHONS), (np.random, (*_public(np.random.RandomState), "ranf", "sample", "seed")))
    for module, functions in several:
        for name in functions:
            usual = getattr(module, name, None)
            if usual is not None and not hasattr(usual, "hpcsched_tells"):
                telling = _telling(usual)
                telling.__module__, telling.__qualname__ = module.__name__, name  # as pickle finds it
                setattr(module, name, telling)


def _public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def _telling(usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if _about_to is not None and get_ident() == _thread:
            _about_to()
        return usual(*args, **kwargs)

    telling.hpcsched_tells = True  # type: ignore[attr-defined]
    return telling
