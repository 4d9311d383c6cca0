"""The step of a checkpoint, by its name or by what it says; nothing of it is unpickled."""

from __future__ import annotations

import contextlib
import pickletools
import re
import struct
from pathlib import Path

from hpcsched.decoding import decode_file, opened
from hpcsched.errors import BadInput
from hpcsched.patience import patiently

STATE = "trainer_state.json"
"""What Transformers writes last into a checkpoint."""

_MOST_STATE = 16 * 2**20
_HEAD = 4096
_MOST_STEPS = 2**53
_NAME = re.compile(r"(?:checkpoint-|step_)?([0-9]{1,15})|.*\bstep=([0-9]{1,15})(?:-last)?(?:-v[0-9]+)?\.ckpt")


def step_of(path: Path) -> int | None:
    """The step that a checkpoint, a file or a folder, is of; None if it does not tell.

    By its name: `checkpoint-40` (Transformers), `step_40` (Accelerate), `40` (Orbax), `epoch=3-step=40.ckpt`;
    other files of Lightning say it inside. Never raises, and reads a few KiB.
    """
    if named := _NAME.fullmatch(path.name):
        return int(named[1] or named[2])
    with contextlib.suppress(OSError, ValueError, BadInput):
        return _global_step(patiently(lambda: _head(path)))
    return None


def all_done(path: Path) -> bool:
    """Whether a checkpoint of Transformers is of the last step of its training. Never raises.

    Its Trainer (5.24) would do one step more if it were started from there.
    """
    try:
        state = patiently(lambda: decode_file(path / STATE, dict, most_bytes=_MOST_STATE))
    except (OSError, ValueError, BadInput):
        return False
    step, most = state.get("global_step"), state.get("max_steps")
    return isinstance(step, int) and isinstance(most, int) and 0 < most <= step


def _head(path: Path) -> bytes:
    with opened(path) as (file, _):
        return file.read(_HEAD)


def _global_step(head: bytes) -> int | None:
    """The `global_step` near the beginning of the pickle that `torch.save` puts first into its archive."""
    if head[:4] != b"PK\x03\x04" or len(head) < 30:
        return None
    name, extra = struct.unpack_from("<HH", head, 26)
    if not head[30 : 30 + name].endswith(b"/data.pkl") or head[8:10] != b"\0\0":
        return None
    value_follows = False
    with contextlib.suppress(Exception):  # it is cut off, and may be anything
        for opcode, argument, _ in pickletools.genops(head[30 + name + extra :]):
            if opcode.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                continue
            if value_follows:
                return argument if isinstance(argument, int) and 0 <= argument < _MOST_STEPS else None
            value_follows = argument == "global_step"
    return None
