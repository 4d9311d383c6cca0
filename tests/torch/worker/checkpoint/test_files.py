"""Checkpoints are whole or not there, and the last good one survives everything."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hiccups import Hiccups

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.errors import StoreError  # noqa: E402
from hpcsched.worker import load_checkpoint  # noqa: E402
from hpcsched.worker.checkpoint.files import CheckpointStore, temporary_of  # noqa: E402
from hpcsched.worker.process.storable import storable  # noqa: E402


def state(step: int) -> dict[str, Any]:
    return {"step": step, "samples": 10 * step, "model": {"w": torch.full((1000,), float(step))}}


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_a_file_or_a_folder_is_read_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint")
    path = store.save(state(7))
    for place in (path, store.folder, str(path)):
        loaded = load_checkpoint(place)
        assert (loaded["step"], loaded["samples"]) == (7, 70)
        assert torch.equal(loaded["model"]["w"], torch.full((1000,), 7.0))
    record = json.loads(path.with_suffix(".json").read_text())
    assert (record["step"], record["samples"], record["bytes"]) == (7, 70, path.stat().st_size)


class _Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    ran, file = tmp_path / "ran", tmp_path / "step-000000000001.pt"
    torch.save({"step": 1, "model": _Runs(ran)}, file)
    with pytest.raises(StoreError, match="cannot be read"):
        load_checkpoint(file)
    assert not ran.exists()
    torch.load(file, weights_only=False)
    assert ran.exists(), "it would have run"


def test_a_file_system_that_answers_nothing_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "kept", keep=1)
    hiccups = Hiccups(tmp_path, monkeypatch)
    for calls in range(12):
        hiccups.fails(1, errno.ESTALE, after=calls)
        path = store.save(state(calls + 1))
        hiccups.fails(1, after=calls)
        assert store.newest() == path
        store.quarantine_newer(path)
        hiccups.fails(1, after=calls)
        store.clear_leftovers()
        hiccups.fails(0)
        assert names(store) == [path.with_suffix(".json").name, path.name]
    assert capsys.readouterr().out == ""


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 30):
        store.save(state(step))
    assert names(store) == [f"step-{step:012d}{end}" for step in (2, 30) for end in (".json", ".pt")]


@pytest.mark.parametrize("harm", ["torn", "flipped", "empty", "no checksum"])
def test_a_damaged_one_is_passed_over_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(state(1))
    path = store.save(state(2))
    content = bytearray(path.read_bytes())
    if harm == "no checksum":
        path.with_suffix(".json").unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes({"torn": content[:-9], "flipped": content, "empty": b""}[harm])
    assert load_checkpoint(tmp_path)["step"] == 1
    assert capsys.readouterr().err.count("\n") == 1
    if harm != "no checksum":
        with pytest.raises(StoreError, match=str(path)):
            load_checkpoint(path)

    good = store.newest()
    store.quarantine_newer(good)
    assert good is not None
    assert store.save(state(2)) == path  # trained again, saved again
    store.keep = 1
    store.save(state(3))
    kept = ["step-000000000003.json", "step-000000000003.pt"]
    assert names(store) == ["step-000000000002.pt.damaged", *kept]  # never deleted: it may be all there is


def test_the_only_good_one_is_never_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        path = store.save(state(step))
    path.write_bytes(bytes(path.stat().st_size))  # right length, wrong content
    store.prune(1, thorough=True)
    assert load_checkpoint(tmp_path)["step"] == 2


@pytest.mark.parametrize("place", ["fsync", "write", "replace"])
def test_no_space_leaves_the_old_one_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1))
    before = names(store)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if place == "fsync":
            monkeypatch.setattr(os, "fsync", full)
        elif place == "replace":
            monkeypatch.setattr(Path, "replace", full)
        else:  # a real error, in the middle of torch.save
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(
            StoreError, match=r"step-000000000002\.pt: cannot be written: (No space|File too)"
        ):
            store.save(state(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        monkeypatch.undo()
    assert names(store) == before
    assert load_checkpoint(tmp_path)["step"] == 1


def test_a_good_one_that_appeared_meanwhile_is_not_set_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    good = store.save(state(5))
    store.save(state(6)).write_bytes(b"torn")
    assert store.newest() == good
    newer = store.save(state(7))
    store.quarantine_newer(good)
    assert sorted(path.name for path in tmp_path.glob("*.pt*")) == [
        good.name, "step-000000000006.pt.damaged", newer.name
    ]  # fmt: skip


def test_what_a_dead_process_left_is_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    temporary_of(tmp_path / "step-000000000008.pt", 2**22 + 1).write_bytes(b"half")
    (tmp_path / f".step-000000000009.pt.{2**22 + 1}.tmp").write_bytes(b"half")
    store.clear_leftovers()
    assert names(store) == []


def test_what_another_host_is_writing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uname, pid = os.uname(), 2**22 + 1  # no process here has that number
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="node-7.example.org"))
    fresh, old = (temporary_of(tmp_path / f"step-00000000000{n}.pt", pid) for n in (8, 9))
    monkeypatch.setattr(os, "uname", lambda: uname)
    for file in (fresh, old):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    CheckpointStore(tmp_path).clear_leftovers()
    assert list(tmp_path.iterdir()) == [fresh]


def test_all_that_is_being_written_is_named_after_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    replace = Path.replace

    def note(path: Path, target: Path) -> Path:
        written.append(path)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", note)
    path = CheckpointStore(tmp_path).save(state(1))
    assert written == [temporary_of(end, os.getpid()) for end in (path.with_suffix(".json"), path)]
    assert os.uname().nodename in written[0].name


def test_what_a_living_process_is_writing_stays(tmp_path: Path) -> None:
    keeper = subprocess.Popen(["sleep", "600"])
    try:
        files = [tmp_path / f".step-000000000009.{end}.{keeper.pid}.tmp" for end in ("pt", "json")]
        ours = tmp_path / f".step-000000000009.pt.{os.getpid()}.tmp"  # of an earlier process of our number
        for file in (*files, ours, tmp_path / ".step-somebody's.tmp"):
            file.write_bytes(b"half")
        CheckpointStore(tmp_path).clear_leftovers()
        assert set(tmp_path.iterdir()) == set(files)
    finally:
        keeper.kill()
        keeper.wait()


def test_the_newest_step_is_told_by_names_and_lengths(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.newest_step() is None
    store.save(state(3))
    path = store.save(state(12))
    assert store.newest_step() == 12
    path.write_bytes(b"torn")
    assert store.newest_step() == 3


def test_no_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no good checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(StoreError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_text("hello")
    with pytest.raises(StoreError, match="cannot be read"):
        load_checkpoint(tmp_path / "x.pt")


def test_all_that_is_accepted_can_be_read_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    value = {
        "step": 1,
        "numbers": [1, 2.5, True, None, "text", (1, (2,))],
        "numpy": [np.float64(0.1), np.int64(3), np.arange(3)],
        "counter": Counter({4: 2}),
        "model": model.state_dict(),
        "dtype": torch.float16,
    }
    store = CheckpointStore(tmp_path)
    loaded = load_checkpoint(store.save(value))
    assert loaded["numbers"] == value["numbers"]
    assert loaded["numpy"][:2] == [0.1, 3]
    assert loaded["numpy"][2].tolist() == [0, 1, 2]
    assert loaded["counter"] == value["counter"]
    assert isinstance(loaded["model"], OrderedDict)
    assert loaded["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_what_could_not_be_read_back_is_refused_with_its_place() -> None:
    with pytest.raises(StoreError, match=r"state\['a'\]\[1\] is a object"):
        storable({"a": [1, object()]})
