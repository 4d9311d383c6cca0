"""The ranks of one attempt: how they meet, agree and part."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpcsched.compat import zip
from hpcsched.contract import variables
from hpcsched.contract.orders import Resize
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import LaunchError
from hpcsched.worker import gpu
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.guest import surroundings
from hpcsched.worker.ranks import backend
from hpcsched.worker.ranks.messages import (
    from_first,
    packed,
    packed_state,
    to_first,
    unpacked,
    unpacked_state,
)
from hpcsched.worker.ranks.rendezvous import LOOPBACK, life, listen_towards, open_store

JOIN_TIMEOUT_S = 300.0
"""How long to wait for the other ranks to appear."""
STEP_TIMEOUT_S = 1800.0
"""How long to wait for the other ranks in training; covers a slow save on one of them."""
PART_TIMEOUT_S = 30.0
"""How long to wait for the other ranks at the end, when all that is left is to exit."""
MEET_TIMEOUT_S = 3.0
"""How long rank 0 waits in a resize for ranks that were just there: the agent gives it 5 s to save."""
CONNECT_TIMEOUT_S = 20.0
"""How long ranks that have met wait for their group: NCCL takes seconds over many hosts, and has no limit of
its own. The agent allows a resize a minute, and tells ranks of a death by a signal."""
HAND_OVER_TIMEOUT_S = 120.0
"""How long the others wait for rank 0 meanwhile, which copies the state first."""

T = TypeVar("T")

_SIGNAL_CHECK_S = 0.2
"""How often a rank that waits for others looks whether it still should."""

_ALL_PARTED = "all parted"


def own_device(env: JobEnv | None) -> torch.device:
    """The GPU of this rank, or the CPU where the launcher left no GPU visible.

    Ends the process, with exits.NO_GPU, where it was given a GPU that torch cannot use. Raises LaunchError
    where there are fewer GPUs than ranks, unless `variables.RANKS_BACKEND` lets ranks share them.
    """
    number = env.local_rank if env else 0
    names = gpu.given()
    if (others := gpu.chosen()) is not None:
        say(f"the program has set {CUDA.variable} to {others!r}: its GPUs may be another job's")
    shown = 1 if names and names[0].startswith(CUDA.part) else len(names)  # CUDA shows a process one instance
    if shown and backend.ranks_share_gpus():
        number %= shown
    if number < shown and (why := gpu.why_unusable(number)) is not None:
        gpu.leave_unusable(env, number, why)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if seen and backend.ranks_share_gpus():
        number %= seen
    if number >= seen:
        raise LaunchError(f"no GPU for local rank {number}: CUDA shows this process {seen}", transient=False)
    return torch.device("cuda", number)


def join() -> Peers:
    """Meet the other ranks before there is a `Session`, to give it what comes back as `ranks`.

    torch.distributed can be used from then on, also with a single rank. Raises LaunchError when they do not
    find each other.
    """
    env = JobEnv.from_environ()
    device = own_device(env)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Peers.join(env, device, alone=True)


class Peers:
    """The process group; with one rank every call returns at once and touches no network.

    Gradients go over NCCL on GPUs and gloo on CPUs (see `backend`). Agreement always goes over gloo, so it
    never waits for a GPU. A peer that is gone, or silent for STEP_TIMEOUT_S, raises RuntimeError.

    The ranks meet at a store in rank 0's process, opened when there are others to come; it lives as long as
    rank 0 does. Each group has keys of its own there, by the number of its attempt: a resize in place
    (`regroup`) makes a new group of the ranks that stay and those that join, and forgets the old one.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._control: dist.ProcessGroup | None = None
        self._env: JobEnv | None = None
        self._store: Any = None  # a TCPStore; torch's stubs do not name it
        self._where: tuple[str, int] | None = None  # it is there
        self.keys: Any = None  # the present group's part of it
        self._endings: list[threading.Thread] = []

    @classmethod
    def join(cls, env: JobEnv | None, device: torch.device, *, alone: bool = False) -> Peers:
        """Meet the other ranks; one that joins a running attempt does that when it is built (see `enter`).

        `alone`: make a process group even if there is only one rank. Raises LaunchError when they do not come
        in time.
        """
        peers = cls(env.rank, env.world_size, device) if env else cls(0, 1, device)
        peers._env = env
        if env is None or (env.world_size == 1 and not env.joining):
            if alone:
                listen_towards(LOOPBACK)
                peers._store = dist.HashStore()  # type: ignore[attr-defined]
                peers.meet(peers._keys_of(1))
            return peers
        if not env.joining:
            with _as_launch_error(env):
                peers._open(_place(env), ranks=env.world_size)
                peers.meet(peers._keys_of(env.attempt))
        return peers

    def _open(self, where: tuple[str, int], *, ranks: int = 0, within_s: float = JOIN_TIMEOUT_S) -> None:
        """Be at the store in this place, unless we are. Raises RuntimeError, OSError."""
        if where == self._where:
            return
        listen_towards(where[0])
        store = open_store(where, first=self.rank == 0, ranks=ranks, timeout_s=within_s)
        self._store, self._where = store, where

    def _keys_of(self, attempt: int) -> Any:
        key = surroundings().get(variables.STORE_KEY, "")
        return dist.PrefixStore(f"{key}{life()}/attempt-{attempt}", self._store)  # type: ignore[attr-defined]

    def meet_anew(self, keys: Any, given_up: Callable[[], object] = lambda: False) -> None:
        """As `meet`, where some may have died since they last gave a sign of life.

        Raises RuntimeError if they do not come, or when `given_up` is true.
        """
        keys.set(f"meets {self.rank}", "yes")
        keys.wait([f"meets {rank}" for rank in range(self.world_size)], self._patience)
        until = time.monotonic() + CONNECT_TIMEOUT_S
        short = backend.patience_can_change()
        _hearing_signals(
            lambda: self.meet(keys, within_s=MEET_TIMEOUT_S if short else STEP_TIMEOUT_S),
            lambda: given_up() or time.monotonic() > until,
            "the others have not come to the new group",
            linger_s=0.0 if self._env is not None and self._env.trainer is not None else MEET_TIMEOUT_S,
        )
        for group in (dist.group.WORLD, self._control) if short else ():
            backend.set_patience(group, STEP_TIMEOUT_S)

    @property
    def _patience(self) -> timedelta:
        """How long to wait for others in a resize: rank 0 comes last, as it hands the state over before."""
        return timedelta(seconds=MEET_TIMEOUT_S if self.rank == 0 else HAND_OVER_TIMEOUT_S)

    def meet(self, keys: Any, *, within_s: float = STEP_TIMEOUT_S) -> None:
        """Make the group with these keys, ready for use: all its ranks come here.

        A silence of `within_s` is an error, from then on too; NCCL ends the process then, and knows no
        limit while a group is made, so there it is always that of training.
        """
        self.keys = keys
        name, patience = backend.backend_for(self.device), timedelta(seconds=within_s)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        dist.init_process_group(
            name,
            store=self.keys,
            rank=self.rank,
            world_size=self.world_size,
            timeout=patience if name == backend.GLOO else timedelta(seconds=STEP_TIMEOUT_S),
            device_id=self.device if name == backend.NCCL else None,
        )
        if name != backend.GLOO:
            backend.connect_now(self.device)
        self._control = self.agreeing(patience)

    def agreeing(self, patience: timedelta) -> dist.ProcessGroup:
        """The group by which the ranks agree: one of its own, as gradients are on their way meanwhile."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=patience)
        return group

    # -- resizing in place -----------------------------------------------------------------------------

    def joined(self, order: Resize) -> bool:
        """On rank 0: whether all ranks that are to join wait to be let in.

        Raises LaunchError when they cannot come.
        """
        if not order.joining:
            return True
        assert self._env is not None
        with _as_launch_error(self._env, order.where):
            self._open(self._place_of(order))
            return bool(self._keys_of(order.attempt).add("built", 0) >= order.joining)

    def _place_of(self, order: Resize) -> tuple[str, int]:
        """Where the ranks of the new group meet: those that stay alone can do so where they did."""
        assert self._env is not None
        if order.where and order.joining:
            address, _, port = str(order.where).rpartition(":")
            return address, int(port)
        return self._where or _place(self._env)

    def let_in(self, order: Resize) -> None:
        """On rank 0: have the joining ranks come."""
        if order.joining:
            self._keys_of(order.attempt).set("come", "yes")

    def enter(self, env: JobEnv, given_up: Callable[[], object]) -> None:
        """On a joining rank: say that it is built, wait to be let in, meet the others.

        Raises LaunchError when nobody lets it in, within JOIN_TIMEOUT_S or until `given_up` is true.
        """
        with _as_launch_error(env):
            _hearing_signals(lambda: self._wait_to_be_let_in(env), given_up, "nobody lets this rank in")
            self.meet_anew(self._keys_of(env.attempt), given_up)

    def _wait_to_be_let_in(self, env: JobEnv) -> None:
        """Raises RuntimeError, OSError."""
        self._open(_place(env))
        keys = self._keys_of(env.attempt)
        keys.add("built", 1)
        keys.wait(["come"], timedelta(seconds=JOIN_TIMEOUT_S))

    def settle(self) -> None:
        """Wait until nothing of the old group is on its way here: to be called before `regroup`.

        Raises LaunchError if that does not end: then what is on the GPU must not be saved.
        """
        if self.world_size > 1:
            backend.settle(self.device, STEP_TIMEOUT_S)

    def regroup(self, order: Resize, given_up: Callable[[], object] = lambda: False) -> bool:
        """Become the group of `order`, together with the ranks let in; False: this rank is to leave.

        All ranks of the old group come here, after the last message of that group, and leave it together.
        Raises RuntimeError when the new group cannot be made, or is given up.
        """
        if self.world_size > 1:
            self._say_parted()
            self.keys.wait([_ALL_PARTED], self._patience)
        self._drop()
        if self.rank not in order.keep:
            return False
        self.rank, self.world_size = order.keep.index(self.rank), order.world_size
        self.keys = None
        if self.world_size > 1:
            self._open(self._place_of(order), within_s=HAND_OVER_TIMEOUT_S)
            self.meet_anew(self._keys_of(order.attempt), given_up)
        return True

    def abandon(self) -> None:
        """Go on alone, whatever the others do: for a last save after they were lost."""
        self._drop()
        self.rank, self.world_size = 0, 1

    def _drop(self) -> None:
        """Forget the present group at once; its threads take their 40 ms to end behind our back."""
        if self._control is None:
            return
        # Whoever holds the last reference waits for gloo's threads: so not the call that ends it.
        held = [dist.group.WORLD, self._control]
        self._control = None
        backend.end_groups()
        ending = threading.Thread(target=held.clear, name="old process group")
        ending.start()
        self._endings = [*(thread for thread in self._endings if thread.is_alive()), ending]

    # -- messages --------------------------------------------------------------------------------------

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

    def gather(self, item: T, kind: type[T]) -> list[T]:
        """Everyone's item, of this type, by rank, on rank 0; an empty list on the others."""
        if self.world_size == 1:
            return [item]
        return [unpacked(data, kind) for data in to_first(packed(item), self._control)]

    def gather_states(self, state: Any) -> list[Any]:
        """The same for what is a part of a training's state."""
        if self.world_size == 1:
            return [state]
        return [unpacked_state(data) for data in to_first(packed_state(state), self._control)]

    def tell(self, item: Any, kind: Any) -> Any:
        """Rank 0's item, of this type, on every rank; what the others give does not count."""
        if self.world_size == 1:
            return item
        data = from_first(packed(item) if self.rank == 0 else None, self._control)
        return item if self.rank == 0 else unpacked(data, kind)

    def broadcast_state(self, state: Any) -> Any:
        """Rank 0's training state, or a part of one, on every rank, on the CPU; the others pass None."""
        data = packed_state(state) if self.rank == 0 else None
        if self.world_size > 1 or data is None:
            data = from_first(data, self._control)
        return unpacked_state(data)

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

    # -- parting ---------------------------------------------------------------------------------------

    def close(self, *, quick: bool = False) -> None:
        """Leave the group once every rank has come here, or after PART_TIMEOUT_S.

        `quick`: the process ends right after this without its interpreter taking anything apart.
        """
        if not quick:  # what is on its way would be lost with the group
            # RuntimeError: the GPU's context is broken, which whoever leaves has been told by its own error.
            with contextlib.suppress(LaunchError, RuntimeError):
                backend.settle(self.device, PART_TIMEOUT_S)
        if self.world_size > 1 and self.keys is not None:
            # If rank 0, and the store with it, is gone, nobody waits any more either.
            with contextlib.suppress(RuntimeError):
                self._say_parted()
            self.wait_parted()
        self._store = self.keys = None
        if quick:
            return
        # gloo's threads must end before the interpreter does, else the process can abort at exit.
        self._drop()
        for ending in self._endings:
            ending.join(PART_TIMEOUT_S)

    def _say_parted(self) -> None:
        if self.keys.add("parted", 1) == self.world_size:
            self.keys.set(_ALL_PARTED, "yes")

    def wait_parted(self) -> None:
        """Wait until all ranks of the group have got its last message, at most PART_TIMEOUT_S.

        Who leaves earlier resets connections on which others still wait for it.
        """
        with contextlib.suppress(RuntimeError):
            self.keys.wait([_ALL_PARTED], timedelta(seconds=PART_TIMEOUT_S))


def _place(env: JobEnv) -> tuple[str, int]:
    """Where the ranks of the attempt meet, as they were launched."""
    return env.master_addr, env.master_port


def _hearing_signals(
    wait: Callable[[], object], given_up: Callable[[], object], why: str, *, linger_s: float = 0.0
) -> None:
    """Wait in a thread until `wait` returns; raises what it raises, RuntimeError (`why`) when given up.

    Python's signal handlers do not run inside a wait for the store, or for its host to listen, and many short
    waits would each write a warning. What is given up is left to itself: nothing ends NCCL's beginning.

    `linger_s`: how long the process then waits for it at its end. A thread that comes out of torch while the
    interpreter is taken apart would abort the process, whose exit code says that all is saved.
    """
    failed: list[BaseException] = []

    def waits() -> None:
        try:
            wait()
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=waits, name="waits for other ranks", daemon=True)
    waiting.start()
    while waiting.is_alive():
        waiting.join(_SIGNAL_CHECK_S)
        if waiting.is_alive() and given_up():
            if linger_s:
                atexit.register(waiting.join, linger_s)
            raise RuntimeError(why)
    if failed:
        raise failed[0]


@contextlib.contextmanager
def _as_launch_error(env: JobEnv, where: str | None = None) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        place, reason = where or f"{env.master_addr}:{env.master_port}", str(error).splitlines()[0]
        raise LaunchError(
            f"rank {env.rank} of {env.world_size} could not meet the others at {place}: {reason}",
            transient=True,
        ) from error
