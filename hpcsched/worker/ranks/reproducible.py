"""Training whose result is the same to the last bit over any rank counts: `reproducible = true`.

Sums of floating-point numbers depend on their order, batch norm on which samples meet, dropout on who
draws. So the global batch is cut into a fixed number of shards, and each is computed as if it were
alone: from the same buffers, with random numbers of its own. What comes out is added along one fixed
tree. Ranks only decide where a shard is computed. The price: smaller pieces of work, memory for sums
that wait for their neighbour, and messages that travel after the backward pass, not during it.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, default_collate

from hpcsched.compat import pairwise, zip
from hpcsched.contract.strategies import DEFAULT_SHARDS
from hpcsched.errors import ConfigError
from hpcsched.worker.process import rng
from hpcsched.worker.ranks.point_to_point import post
from hpcsched.worker.ranks.tree_sum import TreeSum, shards_of


class ShardRanks(Protocol):
    """Who takes part; asked anew in every step, so it may change between two."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


class _Flat:
    """Room for the values of some tensors: one flat buffer a dtype, and in it a view for each tensor.

    In a buffer the tensors of its dtype lie in the order in which they were given.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        kinds: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in like:
            kinds[tensor.dtype].append(tensor)
        self.buffers: dict[torch.dtype, torch.Tensor] = {}
        rooms: dict[torch.dtype, Iterator[torch.Tensor]] = {}
        for dtype, kind in kinds.items():
            sizes = [tensor.numel() for tensor in kind]
            self.buffers[dtype] = torch.empty(sum(sizes), dtype=dtype, device=kind[0].device)
            rooms[dtype] = iter(self.buffers[dtype].split(sizes))
        # With the strides of the tensors, channels last or not, so that copies run straight through.
        self.views = [
            next(rooms[t.dtype]).as_strided(t.shape, torch.empty_like(t, device="meta").stride())
            for t in like
        ]


@dataclass
class _Home:
    """Where a buffer lives. A forward pass may change it in place, or put another tensor there."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor

    def now(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.module, self.name)
        return tensor.detach()

    def put_back(self) -> None:
        if getattr(self.module, self.name) is not self.tensor:
            setattr(self.module, self.name, self.tensor)


class VirtualShards:
    """Computes each global batch in `count` shards; `.grad` and the buffers get what they add up to.

    Shard v has the v-th of `count` contiguous slices of the global batch. A step is:

        shards.begin(step)
        for part in shards.parts(shards.share(batch)):
            (loss(model(x[part]), y[part]).sum() / global_batch).backward()
        optimizer.step()

    Then `.grad` is the sum over all shards (None where no shard had one); a floating buffer is what
    it was before, plus the mean of what the shards added to it; any other buffer is what shard 0 made
    of it. Every rank has the same bits. The next step uses the memory of `.grad` again.

    Args:
        model: on its device. Parameters may be frozen and thawed between steps.
        ranks: this rank, and how many there are in torch's default process group.
        count: shards in a global batch; None: 8, or one a sample in smaller batches.
        global_batch: samples in a step.
        seed: of what is drawn at random, in the shards and between them.

    Raises ConfigError when there are more shards than samples, or fewer than ranks.
    """

    def __init__(
        self, model: torch.nn.Module, ranks: ShardRanks, *, count: int | None, global_batch: int, seed: int
    ) -> None:
        self.count = min(DEFAULT_SHARDS, global_batch) if count is None else count
        self.global_batch = global_batch
        self.seed = seed
        if not max(1, ranks.world_size) <= self.count <= global_batch:
            raise ConfigError(
                where="training",
                key="shards",
                got=f"{self.count} for {global_batch} samples and {ranks.world_size} ranks",
                accepted=f"1..{global_batch}, and at least as many as there will ever be ranks",
            )
        self._model = model
        self._ranks = ranks
        self._tree = TreeSum(self.count, self)
        self._step = 0
        self._awaited: set[int] = set()  # shards of this rank and step that are not done
        self._underway = False  # from the first shard of a step until all is added up
        self._form: list[Any] = []
        self._trained: list[torch.nn.Parameter] = []
        self._homes: list[_Home] = []
        self._like: list[torch.Tensor] = []
        self._before = self._others = _Flat([])
        self._spare: list[_Flat] = []
        self._root: _Flat | None = None
        self._reached: set[int] = set()

    @property
    def mine(self) -> range:
        """The shards of this rank, as many ranks as there are now."""
        return shards_of(self._ranks.rank, self._ranks.world_size, self.count)

    @property
    def place(self) -> slice:
        """Where in a global batch this rank's samples are."""
        return slice(self._cut(self.mine.start), self._cut(self.mine.stop))

    @property
    def complete(self) -> bool:
        """Whether the step that was begun last is computed and added up."""
        return not self._awaited and not self._underway

    def split(self, share: Any) -> list[Any]:
        """This rank's samples of a global batch (anything that can be sliced), shard by shard."""
        cuts = [self._cut(shard) - self.place.start for shard in (*self.mine, self.mine.stop)]
        return [share[first:end] for first, end in pairwise(cuts)]

    def begin(self, step: int) -> None:
        """Begin a step; one that was left half-way is forgotten.

        What is drawn at random outside the shards is the same on every rank.
        """
        if self._underway:
            self._put_back(self._before.views)
            self._spare += self._tree.clear()
            self._underway = False
        self._step = step
        self._awaited = set(self.mine)
        rng.reseed(self.seed, step, "before")

    def parts(self, share: Any) -> Iterator[Any]:
        """Yield this rank's shards, each to be computed at once; after the last, add up over the ranks."""
        for shard, part in zip(self.mine, self.split(share), strict=True):
            self._start(shard)
            yield part
            self._done(shard)
        self._finish()

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep so that `restore` can go on to the last bit."""
        return {"shards": self.count, "seed": self.seed, **self._conditions()}

    def restore(self, state: Mapping[str, Any], where: str) -> list[str]:
        """Go on as `state` says, with its seed and its number of threads.

        Returns, a sentence each, what is different and stays so (device, torch). Raises ConfigError
        when it has another number of shards; `where` says whence it came.
        """
        if state["shards"] != self.count:
            raise ConfigError(
                where=where,
                key="shards",
                got=f"{self.count}",
                accepted=f"{state['shards']}, as when this checkpoint was saved",
            )
        self.seed = state["seed"]
        pin_threads(state["threads"])
        return [
            f"{where}: {key} was {state[key]!r} and is {now!r}: the last digits may come out differently"
            for key, now in self._conditions().items()
            if state[key] != now
        ]

    # What the tree does with values.

    @torch.no_grad()
    def add(self, left: _Flat, right: _Flat) -> _Flat:
        for dtype, buffer in left.buffers.items():
            buffer.add_(right.buffers[dtype])
        self._spare.append(right)
        return left

    def send(self, value: _Flat, rank: int) -> None:
        post([(rank, buffer) for buffer in value.buffers.values()], [])()
        self._spare.append(value)

    def receive(self, rank: int) -> _Flat:
        value = self._room()
        post([], [(rank, buffer) for buffer in value.buffers.values()])()
        return value

    # How it works.

    def _cut(self, shard: int) -> int:
        return shard * self.global_batch // self.count

    @torch.no_grad()
    def _start(self, shard: int) -> None:
        """Make everything as it was before the step, but for the random numbers."""
        if self._underway:
            self._put_back(self._before.views)
        else:  # only now is it certain what the user trains in this step
            self._arrange()
            _copy([home.tensor for home in self._homes], self._before.views)
            self._reached.clear()
            self._underway = True
        for parameter in self._trained:
            parameter.grad = None
        rng.reseed(self.seed, self._step, shard)

    @torch.no_grad()
    def _done(self, shard: int) -> None:
        """Take over what a shard has made of gradients and buffers."""
        value = self._room()
        gradients, used, floating = self._sections(value)
        used.fill_(1)
        found: list[torch.Tensor] = []
        rooms: list[torch.Tensor] = []
        for i, (parameter, room) in enumerate(zip(self._trained, gradients, strict=True)):
            if parameter.grad is None:
                room.zero_()
                used[i] = 0
            else:
                found.append(parameter.grad)
                rooms.append(room)
                self._reached.add(i)
        _copy(found, rooms)
        now = [home.now() for home in self._homes]
        _copy(now[: len(floating)], floating)
        for changes, before in self._changes(value):
            same = changes == before  # minus infinity in a mask, too, which less itself is no number
            changes.sub_(before).masked_fill_(same, 0)
        if shard == 0:
            _copy(now[len(floating) :], self._others.views)
        self._awaited.remove(shard)
        self._tree.put(shard, value)

    @torch.no_grad()
    def _finish(self) -> None:
        """Add up over the ranks, and hand out the sums."""
        world_size = self._ranks.world_size
        root = self._tree.total(self._ranks.rank, world_size) or self._room()
        if world_size > 1:
            for buffer in (*root.buffers.values(), *self._others.buffers.values()):
                dist.broadcast(buffer, src=0)
        gradients, used, floating = self._sections(root)
        for i, (parameter, gradient) in enumerate(zip(self._trained, gradients, strict=True)):
            # To look at `used` is to wait for the GPU; nearly always this rank knows by itself.
            parameter.grad = gradient if i in self._reached or used[i] > 0 else None
        for changes, before in self._changes(root):
            changes.div_(self.count).add_(before)
        self._put_back([*floating, *self._others.views])
        self._root, self._underway = root, False
        rng.reseed(self.seed, self._step, "after")

    def _arrange(self) -> None:
        """See what there is to add up; make room for it, unless it is as in the step before."""
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        homes = {
            id(tensor): _Home(module, name, tensor)
            for module in self._model.modules()
            for name, tensor in module.named_buffers(recurse=False)
        }
        self._homes = sorted(homes.values(), key=lambda home: not _inexact(home.tensor.dtype))
        buffers = [home.tensor for home in self._homes]
        form = [len(self._trained), *((t.shape, t.stride(), t.dtype) for t in (*self._trained, *buffers))]
        if form != self._form:
            self._form = form
            floating = [buffer for buffer in buffers if _inexact(buffer.dtype)]
            used = next(iter(self._trained), torch.empty(0)).new_ones(len(self._trained))
            # Buffers behind gradients, so that in each dtype they lie together, as in `_before`.
            self._like = [*self._trained, used, *floating]
            self._before, self._others = _Flat(buffers), _Flat(buffers[len(floating) :])
            self._spare.clear()
        elif self._root is not None:
            self._spare.append(self._root)
        self._root = None

    def _room(self) -> _Flat:
        return self._spare.pop() if self._spare else _Flat(self._like)

    def _sections(self, value: _Flat) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """The gradients, by parameter how many shards have one, and the floating buffers."""
        end = len(self._trained)
        return value.views[:end], value.views[end], value.views[end + 1 :]

    def _changes(self, value: _Flat) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The floating buffers of each dtype in one piece, and beside it what they were before the step."""
        for dtype, before in self._before.buffers.items():
            if _inexact(dtype):
                everything = value.buffers[dtype]
                yield everything[everything.numel() - before.numel() :], before

    def _put_back(self, values: Sequence[torch.Tensor]) -> None:
        for home in self._homes:
            home.put_back()
        _copy(values, [home.tensor for home in self._homes])

    def _conditions(self) -> dict[str, Any]:
        device = next(self._model.parameters()).device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
        return {"threads": torch.get_num_threads(), "device": name, "torch": torch.__version__}


def deterministic(device: torch.device) -> None:
    """Let torch compute in ways that give the same bits each time; call it before CUDA is used.

    What has no such way raises RuntimeError when it is called, with the name of the operation.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def pin_threads(count: int) -> None:
    """Compute each operation with `count` threads: how many there are decides how sums are split."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


class Seeded(Dataset[tuple[int, Any]]):
    """A dataset whose random augmentations depend on when in the training, not where, a sample is drawn.

    Its samples are asked for as (position in the endless stream of samples, index in the dataset), and
    come with that position; `collate` takes it off, and has its own random numbers.

        seeded = Seeded(dataset, seed)
        DataLoader(seeded, batch_sampler=lists_of_pairs, collate_fn=seeded.collate, num_workers=n)

    Covers what Python's, numpy's and torch's global CPU generators draw.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self._collate = collate or default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: tuple[int, int]) -> tuple[int, Any]:
        position, index = place
        with rng.seeded(self.seed, "sample", position):
            return position, self.dataset[index]

    def collate(self, items: list[tuple[int, Any]]) -> Any:
        """A batch of what `[]` returned."""
        with rng.seeded(self.seed, "batch", items[0][0]):
            return self._collate([sample for _, sample in items])

    def batch(self, places: Iterable[tuple[int, int]]) -> Any:
        """The batch of these places, made in this process; equal to what a DataLoader's would make."""
        return self.collate([self[place] for place in places])


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _copy(values: Sequence[torch.Tensor], rooms: list[torch.Tensor]) -> None:
    if rooms:
        torch._foreach_copy_(rooms, list(values))  # a few launches on a GPU, instead of one a tensor


def _cpu_name() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
