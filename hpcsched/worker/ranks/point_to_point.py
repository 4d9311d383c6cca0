"""Tensors from one rank to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcsched.worker.ranks.backend import GLOO
from hpcsched.worker.ranks.process_group import STEP_TIMEOUT_S

Message = tuple[int, torch.Tensor]
"""The rank at the other end, and the tensor to send, or to receive into; dense in memory."""


def post(
    sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Start to send and receive; the result must be called, to wait until all has come and gone.

    Over NCCL all messages of one call travel at once, and those of the next call after them.
    """
    if not sends and not receives:
        return _nothing
    outgoing = [(peer, _sendable(tensor, group)) for peer, tensor in sends]
    incoming = [(peer, tensor, _room_for(tensor, group)) for peer, tensor in receives]
    todo = [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in outgoing]
    todo += [dist.P2POp(dist.irecv, room, peer, group) for peer, _, room in incoming]
    works = dist.batch_isend_irecv(todo)
    # For messages gloo goes by the patience with which the group was made, whatever was set later. Over NCCL
    # a limit would keep the CPU waiting.
    limit = (timedelta(seconds=STEP_TIMEOUT_S),) if dist.get_backend(group) == GLOO else ()

    def wait() -> None:
        for work in works:
            work.wait(*limit)
        for _, tensor, room in incoming:
            if room is not tensor:
                tensor.copy_(room)
        todo.clear()  # the tensors were kept for the transport

    return wait


def by_cpu(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether it has to be copied to and from the CPU: gloo sums tensors on GPUs, but cannot send them."""
    return tensor.device.type != "cpu" and dist.get_backend(group) == GLOO


def _sendable(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return tensor.to("cpu") if by_cpu(tensor, group) else tensor


def _room_for(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu") if by_cpu(tensor, group) else tensor


def _nothing() -> None:
    """There is nothing to wait for."""
