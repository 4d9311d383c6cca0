"""What a state may be made of, to be saved or sent to other ranks and read back without running code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from hpcsched.errors import StoreError

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def storable(value: Any, where: str = "state") -> Any:
    """The same, made only of what `torch.load(weights_only=True)` reads back; tensors are not copied.

    numpy scalars and arrays become numbers and tensors. Raises StoreError, saying where, for
    anything else.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    for base in (int, float, complex, str):
        if isinstance(value, base):  # of a subclass: numpy.float64 is a float
            return cast(Any, base)(value)
    if isinstance(value, Mapping):
        items = {storable(k, where): storable(v, f"{where}[{k!r}]") for k, v in value.items()}
        # A module's state dict carries its version numbers as an attribute.
        unchanged = all(items.get(k) is v for k, v in value.items())
        return value if unchanged and type(value) in (OrderedDict, Counter) else items
    if isinstance(value, (list, tuple)):
        parts = [storable(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, np.generic):
        return storable(value.item(), where)
    raise StoreError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold")
