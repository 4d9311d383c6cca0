"""hpcsched: a companion scheduler for deep learning inside one batch allocation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcsched.worker.link import Link

__all__ = ["Link"]
__version__ = "0.6.0"


def __getattr__(name: str) -> Any:
    """`hpcsched.Link`, imported when it is used: commands must not pay for it."""
    if name == "Link":
        return import_module("hpcsched.worker.link").Link
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
