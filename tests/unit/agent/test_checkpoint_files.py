"""Checkpoints as they lie in a program's directory: found within limits, and not beyond links of others."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from hpcsched.agent import checkpoint_files
from hpcsched.agent.checkpoint_files import Last, ends_as_an_archive, find_checkpoints, step_in_name


def write(path: Path, text: str = "x", *, at: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def folder(path: Path, *, at: float, **files: float) -> Path:
    for name, written in files.items():
        write(path / name, at=written)
    os.utime(path, (at, at))
    return path


def names(workdir: Path, *patterns: str) -> list[str]:
    return [one.path.name for one in find_checkpoints(workdir, patterns)]


@pytest.mark.parametrize(
    ("name", "pattern", "step"),
    [
        ("checkpoint-40", "checkpoint-*", 40),
        ("step_0000400", "*", 400),
        ("epoch=3-step=120.ckpt", "*.ckpt", 120),
        ("epoch=3-step=120-val_loss=0.25.ckpt", "*.ckpt", 120),
        ("iter_500-lr-3.pt", "iter_*", 500),
        ("loss=0.25-e7.pt", "*.pt", 7),
        ("weights_40.h5", "weights_*", 40),
        ("model.0100", "model.*", 100),
        ("last.ckpt", "*.ckpt", None),
        ("checkpoint", "*", None),
        ("x" + "9" * 16, "x*", None),
        ("model_seed1234.pt", "model_seed1234.pt", None),
        ("resnet50-7.pt", "resnet50-*.pt", 7),
        ("resnet50-best.pt", "resnet50-*.pt", None),
        ("gpt2-temp-0.81.pt", "gpt2-temp-0.8*.pt", None),
        ("fp16-16.pt", "fp16-[0-9]*.pt", 16),
    ],
)
def test_the_step_is_a_number_in_the_name_that_the_pattern_does_not_have(
    name: str, pattern: str, step: int | None
) -> None:
    assert step_in_name(name, pattern) == step


def test_a_pattern_may_be_absolute(tmp_path: Path) -> None:
    write(tmp_path / "scratch/a-1", at=10)
    write(tmp_path / "scratch/a-2", at=20)
    assert names(tmp_path / "work", f"{tmp_path}/scratch/a-*") == ["a-1", "a-2"]


def test_the_newest_come_last_whatever_their_numbers(tmp_path: Path) -> None:
    folder(tmp_path / "out/checkpoint-9", at=10, state=30)
    folder(tmp_path / "out/checkpoint-20", at=10, state=20)
    folder(tmp_path / "out/other", at=50, state=50)
    write(tmp_path / "out/checkpoint-30", at=25)
    assert names(tmp_path, "out/checkpoint-*") == ["checkpoint-20", "checkpoint-30", "checkpoint-9"]
    assert names(tmp_path, str(tmp_path / "out/checkpoint-?")) == ["checkpoint-9"]
    assert names(tmp_path, "out/*-20", "*/checkpoint-20") == ["checkpoint-20"]


@pytest.mark.parametrize("pattern", ["", "none/*", "../*/none", "[", "out/checkpoint-[", "\0", "out/*/*/*"])
def test_patterns_that_name_nothing(tmp_path: Path, pattern: str) -> None:
    place = tmp_path / "own" / "work"  # nothing of other tests is beside it
    folder(place / "out/checkpoint-1", at=1, state=1)
    assert names(place, pattern) == []


def test_what_is_not_finished_has_another_name(tmp_path: Path) -> None:
    for name in ("tmp-step-2", ".step-3.part", "step-4.orbax-checkpoint-tmp-17", "step-5"):
        write(tmp_path / name, at=1)
    found = {one.path.name: one.last for one in find_checkpoints(tmp_path, ["step-[0-9]"])}
    assert found.pop("step-5") is Last.UNKNOWN
    assert set(found.values()) == {Last.MISSING}, "they are seen to change, and are never whole"
    write(tmp_path / "ckpt.pt.tmp", at=1)
    write(tmp_path / "ckpt_tmp.pt", at=1)
    assert names(tmp_path, "ckpt.pt") == ["ckpt.pt.tmp", "ckpt_tmp.pt"], "also of a name without a sign"


def test_names_of_something_else_are_not_taken_for_unfinished_ones(tmp_path: Path) -> None:
    write(tmp_path / "ckpt.pt", at=1)
    for number in range(9):
        write(tmp_path / f"eval_tmp_{number}", at=10 + number)
    assert names(tmp_path, "ckpt.pt") == ["ckpt.pt"]
    assert names(tmp_path, "no-such") == []


def test_unfinished_ones_leave_room_for_the_others(tmp_path: Path) -> None:
    write(tmp_path / "step-1", at=1)
    for number in range(9):
        write(tmp_path / f"step-{number}.tmp", at=10 + number)
    found = find_checkpoints(tmp_path, ["step-*"])
    assert [one.last for one in found] == [Last.UNKNOWN, *4 * [Last.MISSING]]


def test_a_word_of_the_pattern_says_nothing(tmp_path: Path) -> None:
    write(tmp_path / "gpt2-temp-0.8-5.pt", at=1)
    write(tmp_path / "gpt2-temp-0.8-6.pt.tmp", at=2)
    found = {one.path.name: one.last for one in find_checkpoints(tmp_path, ["gpt2-temp-0.8-*"])}
    assert found == {"gpt2-temp-0.8-5.pt": Last.UNKNOWN, "gpt2-temp-0.8-6.pt.tmp": Last.MISSING}


def test_the_end_of_an_archive(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    assert ends_as_an_archive(whole)
    assert not ends_as_an_archive(write(tmp_path / "empty", "", at=1))
    for bytes_less in range(1, 60):
        (tmp_path / "cut").write_bytes(whole.read_bytes()[:-bytes_less])
        assert not ends_as_an_archive(tmp_path / "cut")


@pytest.mark.parametrize(
    ("files", "last"),
    [
        ({"model": 10, "rng": 11}, Last.MISSING),
        ({"model": 10, "state": 12}, Last.NEWEST),
        ({"model": 13, "state": 12}, Last.OVERTAKEN),
    ],
)
def test_the_file_that_is_written_last(tmp_path: Path, files: dict[str, float], last: Last) -> None:
    folder(tmp_path / "checkpoint-1", at=5, **files)
    (found,) = find_checkpoints(tmp_path, ["checkpoint-*"], "state")
    assert found.last is last
    assert find_checkpoints(tmp_path, ["checkpoint-*"])[0].last is Last.UNKNOWN


def test_a_change_deep_inside_is_seen(tmp_path: Path) -> None:
    shard = write(tmp_path / "c-1/a/b/shard", at=10)
    (before,) = find_checkpoints(tmp_path, ["c-*"])
    write(shard, "longer", at=20)
    (after,) = find_checkpoints(tmp_path, ["c-*"])
    assert before.mark != after.mark
    assert after.folder


def test_links_of_others_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "elsewhere/c-1", at=1)
    (tmp_path / "out").symlink_to("elsewhere")
    assert names(tmp_path, "out/c-*") == ["c-1"]
    monkeypatch.setattr(checkpoint_files, "_TRUSTED", {12345})
    assert names(tmp_path, "out/c-*") == []
    assert names(tmp_path, "o*/c-*") == []


def test_a_link_within_a_checkpoint_is_only_a_link(tmp_path: Path) -> None:
    write(tmp_path / "big", "x" * 1000, at=1)
    folder(tmp_path / "c-1", at=1, state=1)
    (tmp_path / "c-1/link").symlink_to("../big")
    assert find_checkpoints(tmp_path, ["c-*"])[0].mark[1] < 100


def test_what_is_looked_at_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        write(tmp_path / f"out/c-{number}", at=number + 1)
    assert len(names(tmp_path, "out/c-*")) == checkpoint_files.NEWEST
    monkeypatch.setattr(checkpoint_files, "MOST_ENTRIES", 2)
    assert len(names(tmp_path, "out/c-*")) <= 2
