"""Lightning under the name by which the program knows it: `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _imported() -> Any:
    for name in _NAMES:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return import_module(_NAMES[0])
    except ModuleNotFoundError:
        return import_module(_NAMES[1])


pl: Any = _imported()
"""What `import lightning.pytorch as pl` gives. Of both names the one that the program has imported first
counts: classes of one are none of the other."""
