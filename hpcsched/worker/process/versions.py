"""By which Python and packages this process trains: of what is imported already, so that it costs nothing."""

from __future__ import annotations

import contextlib
import platform
import sys

from hpcsched.contract.words import Versions

_PACKAGES = (
    *("torch", "jax", "flax", "tensorflow", "keras", "xgboost", "lightgbm", "sklearn"),
    *("lightning", "pytorch_lightning", "transformers", "accelerate", "peft", "deepspeed"),
)


def versions() -> Versions:
    """Those of this process."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(Exception):  # a module may do anything when it is asked
            if version := getattr(sys.modules.get(name), "__version__", None):
                found[name] = str(version)
    return Versions(platform.python_version(), found)
