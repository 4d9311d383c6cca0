"""Programs are looked for in PATH at most every tenth of a second: launches in a row find the same."""

from __future__ import annotations

import time

import pytest

from hpcsched.errors import LaunchError
from hpcsched.launch.spawn import FoundPrograms


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def program(folder):
    folder.mkdir(exist_ok=True)
    (folder / "train").write_text("")
    (folder / "train").chmod(0o755)
    return str(folder / "train")


def test_one_that_comes_earlier_in_path_is_found_a_moment_later(tmp_path, clock):
    early, late = tmp_path / "early", tmp_path / "late"
    path, last = f"{early}:{late}", program(late)
    found = FoundPrograms()
    assert found.find("train", tmp_path, path) == last
    first = program(early)
    clock[0] += 0.05
    assert found.find("train", tmp_path, path) == last
    clock[0] += 0.06
    assert found.find("train", tmp_path, path) == first
    assert found.find("train", tmp_path, str(late)) == last


def test_relative_names_are_those_of_each_directory(tmp_path, clock):
    found = FoundPrograms()
    one, other = program(tmp_path / "one"), program(tmp_path / "other")
    assert [found.find("./train", tmp_path / name, "") for name in ("one", "other")] == [
        one.replace("/train", "/./train"),
        other.replace("/train", "/./train"),
    ]


def test_one_that_was_not_there_is_found_as_soon_as_it_is(tmp_path, clock):
    found = FoundPrograms()
    with pytest.raises(LaunchError, match="command not found: 'train'"):
        found.find("train", tmp_path, str(tmp_path / "bin"))
    new = program(tmp_path / "bin")
    assert found.find("train", tmp_path, str(tmp_path / "bin")) == new
