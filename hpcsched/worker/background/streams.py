"""The two lanes' streams on a GPU; on the CPU there are none."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from hpcsched.errors import ConfigError
from hpcsched.worker.background.settings import Mode

GREEN_SHARE = 0.25
"""Of the device's processors, those that the background has in a green context."""

SWITCH_S = 0.0005
"""How long the other lane's thread may keep Python to itself, instead of 5 ms: the foreground's next launch
must not wait so long."""

_GREEN: list[Any] = []
"""Green contexts live as long as the process, as their streams do."""


@contextlib.contextmanager
def foreground_stream(device: torch.device) -> Iterator[None]:
    """What the calling thread launches in here goes before everything of the background's."""
    if device.type != "cuda":
        yield
        return
    most = _priorities()[1]
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # its all-reduces too, before there is a group
    torch.cuda.set_device(device)
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device, priority=most)):
            yield
    finally:
        sys.setswitchinterval(usual_s)


def background_stream(device: torch.device, mode: Mode) -> Any:
    """The guest's stream, of the lowest priority; in green mode one that has a part of the device only.

    Raises ConfigError when this torch or this device has no green contexts.
    """
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    if mode is Mode.GREEN:
        return green_stream(device, GREEN_SHARE)
    return torch.cuda.Stream(device, priority=_priorities()[0])


def _priorities() -> tuple[int, int]:
    """The least and the most urgent one; lower is more urgent."""
    streams: Any = torch.cuda.Stream
    least, most = streams.priority_range()
    return least, most


def green_stream(device: torch.device, share: float) -> Any:
    """A stream that has this share of the device's processors and no others."""
    try:
        from torch.cuda.green_contexts import GreenContext

        processors = torch.cuda.get_device_properties(device).multi_processor_count
        number = max(8, round(processors * share) // 8 * 8)
        context: Any = GreenContext.create(num_sms=number, device_id=device.index)
        stream = context.Stream()
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(
            where="lane", key="green", got=str(error).splitlines()[0], accepted="a torch with green contexts"
        ) from error
    _GREEN.append(context)
    return stream
