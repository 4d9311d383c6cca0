"""A backend of torch.distributed for tests: gloo on CPUs, under the rules that NCCL has on GPUs.

- A group is made by all its ranks together, and no patience that it is given limits that.
- Two ranks of a group are never on one GPU (here `STANDIN_GPU`, else the local rank).
- To destroy a group is a call for all its ranks, which wait for each other; to abort one is not.
- What a rank gives its groups is worked off in the order of calls: `deadlock` says where, by what the ranks
  have written down, NCCL would wait for ever. Over gloo it still ends, so that no test has to hang.

`Nccl.words` counts what became of the groups of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

NAME = "standin"
LIMIT_S = 60.0
"""NCCL itself has none: what takes so long has failed its test."""


class Call(NamedTuple):
    """One call of a rank: a collective (`what` is the same on all ranks), or messages that travel at once."""

    group: str
    ranks: tuple[str, ...]
    what: str = ""
    sends: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()


class Nccl(dist.ProcessGroup):
    """One group."""

    calls: ClassVar[list[Call]] = []
    words: ClassVar[Counter[str]] = Counter()
    """Both of this process."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._own_rank, self._world = store, rank, size
        Nccl.words["begun"] += 1
        store.set_timeout(timedelta(seconds=LIMIT_S))
        if rank == 0:
            store.set("name", f"{os.getpid()}-{Nccl.words['begun']}")
        gpu = os.environ.get("STANDIN_GPU", os.environ.get("HPCSCHED_LOCAL_RANK", str(rank)))
        store.set(f"rank {rank}", json.dumps([str(os.getpid()), gpu]))
        told = [json.loads(store.get(f"rank {rank}")) for rank in range(size)]
        self._name = store.get("name").decode()
        self._whose = tuple(process for process, _ in told)
        if len({gpu for _, gpu in told}) < size:
            raise RuntimeError(f"Duplicate GPU detected: {[gpu for _, gpu in told]}")
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        Nccl.words["made"] += 1

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return NAME

    # -- calls -----------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        self._note(what=f"all_reduce of {[tuple(t.shape) for t in tensors]}")
        return self._gloo.allreduce(tensors, options or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        self._note(what=f"broadcast of {[tuple(t.shape) for t in tensors]} from {options.rootRank}")
        return self._gloo.broadcast(tensors, options)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        self._note(sends=(self._whose[rank],))
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        self._note(receives=(self._whose[rank],))
        return self._gloo.recv(tensors, rank, tag)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def _note(self, **what: Any) -> None:
        Nccl.calls.append(Call(self._name, self._whose, **what))

    # -- ends ------------------------------------------------------------------------------------------

    def abort(self) -> None:
        Nccl.words["aborted"] += 1

    def shutdown(self) -> None:
        Nccl.words["destroyed"] += 1
        self._store.set(f"rank {self._own_rank} destroys", "yes")
        others = [f"rank {rank} destroys" for rank in range(self._world)]
        self._store.wait(others, timedelta(seconds=LIMIT_S))


def use() -> None:
    """Have the backend in this process, under its name."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, lambda *given: Nccl(*given), devices=["cpu", "cuda"])
        usual = dist.batch_isend_irecv

        def batch(operations: list[Any]) -> list[Any]:
            with _at_once():
                return usual(operations)

        dist.batch_isend_irecv = batch


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """The messages given meanwhile are one call."""
    began = len(Nccl.calls)
    yield
    if batch := Nccl.calls[began:]:
        sends = tuple(rank for call in batch for rank in call.sends)
        receives = tuple(rank for call in batch for rank in call.receives)
        Nccl.calls[began:] = [batch[0]._replace(sends=sends, receives=receives)]


def taken() -> tuple[str, list[Call]]:
    """This process, and what it has called since this was last asked."""
    calls, Nccl.calls = Nccl.calls, []
    return str(os.getpid()), calls


def write(path: Path) -> None:
    """Leave the calls and words of this process in a file."""
    who, calls = taken()
    path.write_text(json.dumps({"who": who, "calls": calls, "words": Nccl.words}))


def read(paths: Sequence[Path]) -> tuple[dict[str, list[Call]], list[Counter[str]]]:
    """What was written: calls by process, and the words of each."""
    found = [json.loads(path.read_text()) for path in paths]
    calls = {
        one["who"]: [Call(g, tuple(r), w, tuple(s), tuple(i)) for g, r, w, s, i in one["calls"]]
        for one in found
    }
    return calls, [Counter(one["words"]) for one in found]


def deadlock(calls: Mapping[str, Sequence[Call]], *, one_queue: bool = True) -> str:
    """Where these calls of each process would stand still for ever; empty if all of them end.

    `one_queue`: calls to different groups wait for each other too, as they may on a GPU that has no room for
    another kernel, and do with NCCL_LAUNCH_ORDER_IMPLICIT. Messages are not buffered.
    """
    queues: dict[tuple[str, str], deque[Call]] = {}
    for who, own in calls.items():
        for call in own:
            queues.setdefault((who, "" if one_queue else call.group), deque()).append(call)

    def head(who: str, group: str) -> Call | None:
        queue = queues.get((who, "" if one_queue else group))
        return queue[0] if queue and queue[0].group == group else None

    def replace(who: str, call: Call) -> None:
        queue = queues[who, "" if one_queue else call.group]
        queue.popleft()
        if call.what or call.sends or call.receives:
            queue.appendleft(call)

    def step(who: str, call: Call) -> bool:
        if call.what:
            heads = [head(other, call.group) for other in call.ranks]
            if any(found is None or found.what != call.what for found in heads):
                return False
            for other, found in zip(call.ranks, heads, strict=False):
                assert found is not None
                replace(other, found._replace(what=""))
            return True
        for there in call.sends:
            found = head(there, call.group)
            if found is not None and who in found.receives:
                replace(there, found._replace(receives=_without(found.receives, who)))
                replace(who, call._replace(sends=_without(call.sends, there)))
                return True
        return False

    while any(queues.values()):
        if not any(queue and step(who, queue[0]) for (who, _), queue in queues.items()):
            return "; ".join(f"{who} waits in {queue[0]}" for (who, _), queue in queues.items() if queue)
    return ""


def _without(ranks: tuple[str, ...], one: str) -> tuple[str, ...]:
    place = ranks.index(one)
    return ranks[:place] + ranks[place + 1 :]
