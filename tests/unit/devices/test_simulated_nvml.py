"""The simulated library beside the real one, of which only the binding is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hpcsched.devices.simulated_nvml import SimulatedNvml


def test_the_simulated_library_is_like_the_real_one() -> None:
    real = pytest.importorskip("pynvml")
    for name in (name for name in dir(SimulatedNvml) if name.startswith(("nvml", "NVML_"))):
        ours, theirs = getattr(SimulatedNvml, name), getattr(real, name)
        if callable(ours):
            assert len(inspect.signature(ours).parameters) - 1 == needed(theirs), name
        else:
            assert ours == theirs, name
    told = {"device", "eventData", "gpuInstanceId", "computeInstanceId"}
    assert {field for field, *_ in real.c_nvmlEventData_t._fields_} >= told
    assert real.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == 230


def needed(call: Callable[..., Any]) -> int:
    """The number of arguments that it cannot do without."""
    parameters = inspect.signature(call).parameters.values()
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
