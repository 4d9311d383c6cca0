"""The functions of packing (pack, section 2.2): `load`, `pack` and `free`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcsched.worker.packing.engine import Pack
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.packed_session import PackedSession
from hpcsched.worker.session.trainer import Parts


def load(
    parts: Parts, *, name: str = "", steps: int | None = None, checkpoint: Mapping[str, Any] | None = None
) -> Member:
    """Bring a training to the device, from a checkpoint if there is one.

    Args:
        steps: of the whole training; default: as `parts.epochs` says.
        checkpoint: what `free` gave, or `load_checkpoint` reads.

    Raises ConfigError when the checkpoint is another training's.
    """
    session = PackedSession(parts, steps=steps)
    if checkpoint is not None:
        session.take(checkpoint)
    return Member(parts, session, name=name)


def pack(members: Sequence[Member], *, device: torch.device | None = None, mode: str = "auto") -> Pack:
    """Have these train as one from now on."""
    together = Pack(device or members[0].session.device, mode=mode)
    together.join(*members)
    return together


def free(member: Member, together: Pack) -> dict[str, Any]:
    """Take a member out; returns its checkpoint. What it had of the device is the others' from then on."""
    together.leave(member)
    return member.call(member.session.state)
