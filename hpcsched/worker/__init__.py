"""The training side of hpcsched, the only part that imports torch; started as processes.

`Parts` and `Trainer` describe a training to the library, `Callback` is the base of what is called while it
goes on; `Session` makes a loop of your own elastic;
`join` meets the other ranks before that, where a model needs it; `load_checkpoint` reads what was saved.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcsched.worker.checkpoint.load import load_checkpoint
    from hpcsched.worker.ranks.process_group import join
    from hpcsched.worker.session.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from hpcsched.worker.session.session import Session
    from hpcsched.worker.session.trainer import Parts, Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "ModelCheckpoint",
    "Parts",
    "Session",
    "Trainer",
    "join",
    "load_checkpoint",
]

_HOMES = {
    "Callback": "session.callbacks",
    "EarlyStopping": "session.callbacks",
    "ModelCheckpoint": "session.callbacks",
    "Parts": "session.trainer",
    "Trainer": "session.trainer",
    "Session": "session.session",
    "join": "ranks.process_group",
    "load_checkpoint": "checkpoint.load",
}


def __getattr__(name: str) -> Any:
    """Import on first use: programs in this package that need no torch must not pay for it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
