"""Checkpoints of torch.distributed.checkpoint (DCP), read so that nothing in them is run.

torch unpickles their index, `.metadata`, and what is no tensor. Here an index is made of the classes that DCP
itself writes, and of no others; tensors are read with `weights_only`, as torch does, too.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from hpcsched.errors import StoreError

_METADATA = "torch.distributed.checkpoint.metadata"
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}


def _layout(name: str) -> torch.layout:
    """In the place of `torch.serialization._get_layout`."""
    return _LAYOUTS[name]


_ADMITTED: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(metadata, name)
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
    # Of another system's checkpoint, or from Python 3.13 on, too.
    **{
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")
    },
}


class _Unpickler(pickle.Unpickler):
    """Makes what an index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if found := _ADMITTED.get((module, name)):
            return found
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise StoreError(f".metadata holds a {module}.{name}, which no index of a checkpoint has")


class PlainReader(FileSystemReader):
    """Reads a checkpoint's folder as torch's reader does, but unpickles nothing of which code could be run.

    Raises StoreError for an index that has other classes in it, or that names files of other folders.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; with `rank`, that of a rank alone."""
        rank = kwargs.get("rank")
        name = ".metadata" if rank is None else f"__{rank}.metadata"
        data = (Path(self.path) / name).read_bytes()
        try:
            found = _Unpickler(io.BytesIO(data)).load()
        except (OSError, StoreError):
            raise
        except Exception as error:  # a damaged pickle can fail in any way
            raise StoreError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise StoreError(f"{name} is no index of a checkpoint")
        for info in found.storage_data.values():
            where = getattr(info, "relative_path", None)
            if not isinstance(where, str) or where in ("", "..") or PurePath(where).name != where:
                raise StoreError(f"{name} names the file {where!r}, which is not in this folder")
        kept = getattr(found, "storage_meta", None)  # torch before 2.3 has none
        found.storage_meta = kept if isinstance(kept, metadata.StorageMeta) else metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class TensorPlanner(DefaultLoadPlanner):
    """Reads tensors into those that it is given, as torch's planner does, which would unpickle what an index
    says is an object. Raises StoreError for that."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """What is read for a tensor is no tensor."""
        raise StoreError(f"{read_item.dest_index.fqn} is no tensor in the checkpoint")
