"""The ranks of one attempt: how they meet, agree and part."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcsched.errors import LaunchError
from hpcsched.worker.contract import JobEnv

JOIN_TIMEOUT_S = 300.0
"""How long to wait for the other ranks to appear."""
STEP_TIMEOUT_S = 1800.0
"""How long to wait for the other ranks in training; covers a slow save on one of them."""
PART_TIMEOUT_S = 30.0
"""How long to wait for the other ranks at the end, when all that is left is to exit."""


def own_device(env: JobEnv | None) -> torch.device:
    """The GPU of this rank, or the CPU where the launcher left no GPU visible."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", (env.local_rank if env else 0) % torch.cuda.device_count())


class Peers:
    """The process group; with one rank every call returns at once and touches no network.

    Gradients go over NCCL on GPUs and gloo on CPUs. Agreement always goes over gloo, so it never
    waits for a GPU. A peer that is gone, or silent for STEP_TIMEOUT_S, raises RuntimeError.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._control: dist.ProcessGroup | None = None
        self._store: Any = None  # a TCPStore; torch's stubs do not name it

    @classmethod
    def join(cls, env: JobEnv | None, device: torch.device) -> Peers:
        """Meet the other ranks. Raises LaunchError when they do not come in time."""
        peers = cls(env.rank, env.world_size, device) if env else cls(0, 1, device)
        if env is None or env.world_size == 1:
            return peers
        place = f"{env.master_addr}:{env.master_port}"
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                env.master_addr,
                env.master_port,
                env.world_size,
                is_master=env.rank == 0,
                timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            )
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=env.rank,
                world_size=env.world_size,
                timeout=timedelta(seconds=STEP_TIMEOUT_S),
                device_id=device if device.type == "cuda" else None,
            )
            peers._store = store
            peers._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=STEP_TIMEOUT_S))
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise LaunchError(
                f"rank {env.rank} of {env.world_size} could not meet the others at {place}: {reason}",
                transient=True,
            ) from error
        return peers

    def ask(self, *wishes: bool) -> Callable[[], tuple[bool, ...]]:
        """Start to find out, for each wish, whether any rank has it; call the result for the answer.

        All ranks get the same answer.
        """
        if self.world_size == 1:
            return lambda: wishes
        votes = torch.tensor(wishes, dtype=torch.int32)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._control, async_op=True)

        def answer() -> tuple[bool, ...]:
            if work is not None:
                work.wait()
            return tuple(bool(vote) for vote in votes.tolist())

        return answer

    def agree(self, *wishes: bool) -> tuple[bool, ...]:
        """The same, at once."""
        return self.ask(*wishes)()

    def gather(self, item: Any) -> list[Any]:
        """Everyone's item, by rank, on rank 0; an empty list on the others."""
        if self.world_size == 1:
            return [item]
        items: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(item, items, dst=0, group=self._control)
        return items or []

    def tell(self, item: Any) -> Any:
        """Rank 0's item, on every rank."""
        if self.world_size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def sum_async(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start to add up a tensor of the same shape from all ranks, in place; wait() on the result."""
        return None if self.world_size == 1 else dist.all_reduce(tensor, async_op=True)

    @torch.no_grad()
    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors with those of rank 0, few messages for many tensors."""
        if self.world_size == 1:
            return
        kinds: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            kinds[tensor.dtype].append(tensor)
        for same_kind in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same_kind])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(same_kind, flat.split([t.numel() for t in same_kind]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def close(self) -> None:
        """Leave the group once every rank has come here, or after PART_TIMEOUT_S."""
        if self.world_size == 1 or self._store is None:
            return
        # Who leaves early resets connections on which others still wait for the last message. Once
        # all have come here nobody waits any more; if rank 0, and the store with it, is gone: the same.
        with contextlib.suppress(RuntimeError):
            if self._store.add("parted", 1) == self.world_size:
                self._store.set("all parted", "yes")
            self._store.wait(["all parted"], timedelta(seconds=PART_TIMEOUT_S))
        # gloo's threads must end before the interpreter does, else the process can abort at exit;
        # they end with the last reference to their group, so none may be left, ours included.
        self._control = self._store = None
        dist.destroy_process_group()
