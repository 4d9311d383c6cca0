"""hpcsched: a companion scheduler for deep learning inside one batch allocation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcsched.client.executor import Executor
    from hpcsched.client.job import Job, JobFailed
    from hpcsched.client.run import Run
    from hpcsched.worker.link import Link

__all__ = ["Executor", "Job", "JobFailed", "Link", "Run"]
__version__ = "0.6.0"

_HOMES = {
    "Executor": "client.executor",
    "Job": "client.job",
    "JobFailed": "client.job",
    "Link": "worker.link",
    "Run": "client.run",
}


def __getattr__(name: str) -> Any:
    """What is imported when it is used: commands and trainings must not pay for it.

    Raises ImportError for what only the scheduler has, in an environment with hpcsched-worker alone.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_HOMES[name]}"
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if not home.startswith(str(error.name)):
            raise
        raise ImportError(f"hpcsched.{name} is the scheduler's: pip install hpcsched") from None
