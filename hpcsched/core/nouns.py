"""What people call the devices of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

SLOT: Final = "cpu"
"""The kind of a device that is a CPU slot; all others are GPUs, some of them pretended."""

GPU: Final = "GPU"


def noun(kinds: Iterable[str]) -> str:
    """What devices of these kinds are called: "CPU slot", "GPU" (also where there are none), or "device" for
    both together. The plural has an s."""
    slots = {kind == SLOT for kind in kinds}
    if len(slots) > 1:
        return "device"
    return "CPU slot" if True in slots else GPU


_WORD = re.compile(r"(?<![\w.(-])GPU(?=s?(?![\w-]))")
"""The word where it is ours: not in a name such as GPU-a."""


def reworded(text: str, word: str) -> str:
    """A text of ours about GPUs, with that word for them."""
    return text if word == GPU else _WORD.sub(word, text)
