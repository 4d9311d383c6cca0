"""Checkpoints of a model that no rank has whole, because torch's `fully_shard` has spread it over all.

All ranks save and load together. A checkpoint is a folder: what torch.distributed.checkpoint writes, and
`rest.pt`, what every rank has whole. Any number of ranks can load it, and a single process without
`fully_shard` too: put together, it is what a checkpoint file would be.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from hpcsched.errors import ConfigError, StoreError
from hpcsched.ownership import make_private
from hpcsched.worker.checkpoint import files
from hpcsched.worker.checkpoint.files import CheckpointStore
from hpcsched.worker.checkpoint.plain_dcp import PlainReader, TensorPlanner
from hpcsched.worker.process.contract import say, sync_folder, write_atomically
from hpcsched.worker.process.storable import storable
from hpcsched.worker.ranks.messages import from_first, packed, unpacked

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[no-redef,attr-defined]
    from torch.distributed._tensor import DTensor  # type: ignore[no-redef,attr-defined]

_REST = "rest.pt"
_FAILURES = (CheckpointException, StoreError, OSError, RuntimeError, ValueError, LookupError)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether some parameter is spread over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def sum_gradients(model: torch.nn.Module, world_size: int) -> None:
    """Have `fully_shard` add gradients up over the ranks, where it would take their mean.

    Raises ConfigError when that would not be the whole gradient: with parameters that `fully_shard` does
    not manage, or that are spread in another way than over all ranks, each of which has its own samples; or
    when torch is too old to leave the sum alone.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        got = f"spread over the ranks by fully_shard, under torch {torch.__version__}"
        accepted = "torch 2.8 or later for that, or a model that every rank has whole"
        raise ConfigError(where="model", got=got, accepted=accepted)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            got = f"{name} is not spread over the ranks"
        elif parameter.device_mesh.size() != world_size:
            got = f"{name} is spread over {parameter.device_mesh.size()} of {world_size} ranks"
        elif sum(place.is_shard() for place in parameter.placements) > 1:
            got = f"{name} is spread in two ways"
        else:
            continue
        raise ConfigError(where="model", got=got, accepted="fully_shard(model) over all ranks, no more")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum, on any backend


@dataclass
class _Save:
    """A checkpoint on its way to `path`.

    `temporary` is where it is written (None: it is there already), `writing` what goes on in the background.
    """

    path: Path
    temporary: Path | None
    tensors: dict[str, Any]
    rest: dict[str, Any]
    writing: Future[Any] | None = None
    error: str | None = None


class ShardedStore:
    """Saves and loads sharded checkpoints in the folder of `store`; all ranks call its methods together.

    Everything else that is done with checkpoints `store` does for both kinds, on rank 0.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        # A group of its own: a save in the background must not meet the messages of the training.
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self._first = dist.get_rank() == 0
        self._begun: _Save | None = None

    def save(self, rest: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Make the state durable as the checkpoint of `rest["step"]`; returns its path, on every rank.

        `rest` is all that belongs into a checkpoint but `model` and `optimizer`; that of rank 0 is saved.
        Older checkpoints beyond the store's `keep` go only after that.

        Raises StoreError, on all ranks, when it cannot be written, or holds what could not be read back.
        """
        self.settle()
        new = self._prepare(rest, model, optimizer)
        if new.temporary is not None:
            try:
                save(new.tensors, checkpoint_id=new.temporary, process_group=self._group)
            except _FAILURES as problem:
                new.error = _reason(problem)
            if self._first:
                self._complete(new)
            if error := self._tell(new.error or ""):
                raise StoreError(error)
        return new.path

    def begin_save(
        self, rest: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[], Path | None]:
        """Copy the state, to be written while the training goes on.

        Call what is returned now and then, on rank 0 at least: its answer is None until the checkpoint is
        durable, then its path; it raises StoreError when it could not be written.
        """
        self.settle()
        new = self._begun = self._prepare(rest, model, optimizer)
        if new.temporary is not None:
            begun = async_save(new.tensors, checkpoint_id=new.temporary, process_group=self._group)
            new.writing = cast("Future[Any]", begun)
            new.tensors = {}
        return lambda: self._look_at(new)

    def settle(self) -> None:
        """Wait until what was begun is written; if it could not be, rank 0 says so."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.writing is not None:
            begun.writing.exception()
            try:
                self._look_at(begun)
            except StoreError as error:
                if self._first:
                    say(str(error))

    def close(self) -> None:
        """Let go of the process group, before that is left."""
        self.settle()
        self._group = None

    def load(self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Read a checkpoint of any number of ranks into `model` and `optimizer`; returns the rest of it.

        Raises StoreError when it cannot be read, or is of another model.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        try:
            tensors = {f"model.{name}": value for name, value in _tensors(model.state_dict()).items()}
            for key, (size, dtype) in _index(path).items():
                if key.startswith("optimizer."):
                    parameter = parameters[int(key.split(".")[1])]
                    if size == parameter.shape:  # spread like it
                        tensors[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    else:
                        tensors[key] = torch.empty(size, dtype=dtype)
            load(
                tensors,
                storage_reader=PlainReader(path),
                planner=TensorPlanner(),
                process_group=self._group,
            )
            state = _put_together(path, tensors)
        except _FAILURES as problem:
            raise StoreError(f"{path}: cannot be loaded: {_reason(problem)}") from problem
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
        return state

    def _prepare(
        self, rest: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> _Save:
        new = _Save(self._store.folder / f"step-{rest['step']:012d}{files.SHARDED}", None, {}, {})
        try:
            new.tensors, others = _take_apart(model, optimizer)
            if self._first:
                new.rest = _whole(storable({**rest, **others}))
                if not new.path.exists() or files.damage(new.path):
                    new.temporary = files.temporary_of(new.path, os.getpid())
                    shutil.rmtree(new.temporary, ignore_errors=True)
                    make_private(new.temporary)
        except (StoreError, OSError) as problem:
            new.error = f"{new.path}: cannot be saved: {_reason(problem)}"
        if error := self._tell(new.error or ""):
            raise StoreError(error)
        name = self._tell(new.temporary.name if new.temporary else "")
        new.temporary = new.path.with_name(name) if name else None
        return new

    def _complete(self, new: _Save) -> None:
        """Give what all ranks have written its name."""
        temporary = cast(Path, new.temporary)
        try:
            if new.error is None:
                with (temporary / _REST).open("wb") as file:
                    torch.save(new.rest, file)
                    file.flush()
                    os.fsync(file.fileno())
                sizes = {part.name: part.stat().st_size for part in temporary.iterdir()}
                record = {
                    "schema": 1,
                    "files": sizes,
                    "step": new.rest["step"],
                    "samples": new.rest["samples"],
                }
                write_atomically(temporary / files.RECORD, json.dumps(record).encode())
                if new.path.exists():
                    files.set_damaged_aside(new.path)
                temporary.replace(new.path)
                sync_folder(self._store.folder)
        except (OSError, RuntimeError) as problem:  # torch.save makes one of the other
            new.error = _reason(problem)
        if new.error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            new.error = f"{new.path}: cannot be written: {new.error}"
        else:
            self._store.prune(self._store.keep)

    def _look_at(self, begun: _Save) -> Path | None:
        if begun.writing is not None:
            if not begun.writing.done():
                return None
            problem, begun.writing = begun.writing.exception(), None
            begun.error = _reason(problem) if problem else None
            if self._first:
                self._complete(begun)
        if begun.error is not None:
            raise StoreError(begun.error)
        return begun.path

    def _tell(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        told: str = unpacked(from_first(packed(text) if self._first else None, self._group), str)
        return told


def read_whole(path: Path) -> dict[str, Any]:
    """Read a sharded checkpoint in one process, put together on the CPU. Raises StoreError."""
    try:
        tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in _index(path).items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            whole = cast("dict[str, Any]", tensors)
            load(whole, storage_reader=PlainReader(path), planner=TensorPlanner(), no_dist=True)
        return _put_together(path, tensors)
    except _FAILURES as problem:
        raise StoreError(f"{path}: cannot be read: {_reason(problem)}") from problem


def _take_apart(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of both by their names, and all the rest.

    By our own hand, as torch's `get_state_dict` takes an optimizer's first step if that has not been taken.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    theirs = optimizer.state_dict()
    parts = {"model": model.state_dict()}
    parts |= {f"optimizer.{number}": state for number, state in theirs["state"].items()}
    tensors = {
        f"{where}.{name}": value for where, part in parts.items() for name, value in _tensors(part).items()
    }
    others = {
        where: {name: value for name, value in part.items() if not isinstance(value, torch.Tensor)}
        for where, part in parts.items()
    }
    for number, state in theirs["state"].items():
        for name, value in state.items():
            if isinstance(value, DTensor) and value.shape != parameters[number].shape:
                raise StoreError(f"the optimizer's {name} is spread over the ranks, and unlike its parameter")
    state = {number: others[f"optimizer.{number}"] for number in theirs["state"]}
    return tensors, {"model": others["model"], "optimizer": {**theirs, "state": state}}


def _put_together(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state as a checkpoint file has it."""
    state: dict[str, Any] = torch.load(path / _REST, map_location="cpu", weights_only=True)
    for key, tensor in tensors.items():
        where, name = key.split(".", 1)
        if where == "model":
            state["model"][name] = tensor
        else:
            number, name = name.split(".", 1)
            state["optimizer"]["state"][int(number)][name] = tensor
    return state


def _tensors(part: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in part.items() if isinstance(value, torch.Tensor)}


def _index(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Sizes and types of the tensors in a checkpoint."""
    found = PlainReader(path).read_metadata().state_dict_metadata
    return {
        key: (what.size, what.properties.dtype)
        for key, what in found.items()
        if isinstance(what, TensorStorageMetadata)
    }


def _whole(value: Any) -> Any:
    """The same. Raises StoreError if some of it is spread over ranks: rank 0 saves it alone."""
    if isinstance(value, DTensor):
        raise StoreError("only a model and its optimizer may be sharded, nothing that is saved with them")
    if isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            _whole(part)
    return value


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, on the first rank on which something did."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while isinstance(error.__cause__ or error.__context__, OSError):
        error = cast(BaseException, error.__cause__ or error.__context__)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]
