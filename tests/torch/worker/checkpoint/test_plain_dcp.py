"""Sharded checkpoints that somebody has made to run something: nothing of it is run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

from hpcsched.errors import StoreError  # noqa: E402
from hpcsched.worker import load_checkpoint  # noqa: E402
from hpcsched.worker.checkpoint import files  # noqa: E402
from hpcsched.worker.checkpoint.plain_dcp import PlainReader, TensorPlanner  # noqa: E402

WEIGHT = torch.arange(6.0).reshape(2, 3)


class _Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sharded one, of a single rank."""
    path = tmp_path / "step-000000000003.dcp"
    save({"model.weight": WEIGHT.clone()}, checkpoint_id=path)
    rest = {"model": {}, "optimizer": {"state": {}}, "step": 3, "samples": 24}
    torch.save(rest, path / "rest.pt")
    record_sizes(path)
    return path


def record_sizes(path: Path) -> None:
    """Have the checkpoint look whole."""
    (path / files.RECORD).unlink(missing_ok=True)
    sizes = {part.name: part.stat().st_size for part in path.iterdir()}
    (path / files.RECORD).write_text(json.dumps({"schema": 1, "files": sizes, "step": 3, "samples": 24}))


def test_a_good_one_is_read(checkpoint: Path) -> None:
    state = load_checkpoint(checkpoint)
    assert state["step"] == 3 and torch.equal(state["model"]["weight"], WEIGHT)


def beside(index: Metadata, runs: _Runs) -> Any:
    index.planner_data = {"x": runs}
    return index


def in_place_of_it(index: Metadata, runs: _Runs) -> Any:
    return runs


def in_a_size(index: Metadata, runs: _Runs) -> Any:
    index.state_dict_metadata["model.weight"].size = runs  # type: ignore[union-attr,assignment]
    return index


def as_its_class(index: Metadata, runs: _Runs) -> Any:
    index.state_dict_metadata["model.weight"].properties = runs  # type: ignore[union-attr,assignment]
    return index


@pytest.mark.parametrize("put", [beside, in_place_of_it, in_a_size, as_its_class])
def test_a_hostile_index_runs_nothing(
    checkpoint: Path, tmp_path: Path, put: Callable[[Metadata, _Runs], Any]
) -> None:
    ran = tmp_path / "ran"
    index = put(PlainReader(checkpoint).read_metadata(), _Runs(ran))
    data = pickle.dumps(index)
    (checkpoint / ".metadata").write_bytes(data)
    record_sizes(checkpoint)
    with pytest.raises(StoreError, match=r"\.metadata holds a .*mkdir, which no index") as said:
        load_checkpoint(checkpoint)
    assert "\n" not in str(said.value) and not ran.exists()
    pickle.loads(data)
    assert ran.exists(), "it would have run"


@pytest.mark.parametrize(
    "words", [b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04\x8c\x05torch\x8c\x0aload_state\x93.", b"junk", b""]
)
def test_other_callables_and_junk_are_refused(checkpoint: Path, words: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(words)
    record_sizes(checkpoint)
    with pytest.raises(StoreError, match=r"\.metadata"):
        load_checkpoint(checkpoint)


def test_a_tensor_that_the_index_calls_an_object_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    index = PlainReader(checkpoint).read_metadata()
    # As `torch.load` would find it: the bytes of an object where the tensor was.
    (at, info) = next(iter(index.storage_data.items()))
    torch.save(_Runs(ran), checkpoint / info.relative_path)
    info.offset, info.length = 0, (checkpoint / info.relative_path).stat().st_size
    index.storage_data = {type(at)(at.fqn): info}
    index.state_dict_metadata = {"model.weight": BytesStorageMetadata()}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointException, match=r"model\.weight is no tensor in the checkpoint"):
        load(
            {"model.weight": torch.zeros(2, 3)},
            storage_reader=PlainReader(checkpoint),
            planner=TensorPlanner(),
            no_dist=True,
        )
    assert not ran.exists()
    load({"model.weight": torch.zeros(2, 3)}, checkpoint_id=checkpoint, no_dist=True)
    assert ran.exists(), "torch's own planner does"


@pytest.mark.parametrize("where", ["../secret", "/etc/passwd", "..", ""])
def test_an_index_names_no_files_of_other_folders(checkpoint: Path, where: str) -> None:
    index = PlainReader(checkpoint).read_metadata()
    next(iter(index.storage_data.values())).relative_path = where
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    record_sizes(checkpoint)
    with pytest.raises(StoreError, match="which is not in this folder"):
        load_checkpoint(checkpoint)
