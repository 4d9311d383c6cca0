"""Whose files are, and folders for this user alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.ownership import foreign, make_private

STRANGER = 54321


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_folders_are_private_whatever_the_umask(tmp_path: Path, no_umask: None) -> None:
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    for _ in range(2):
        make_private(there / "run" / "1")
    modes = [path.stat().st_mode & 0o777 for path in (there, there / "run", there / "run" / "1")]
    assert modes == [0o755, 0o700, 0o700]
    (there / "file").touch()
    with pytest.raises(OSError):
        make_private(there / "file")
    with pytest.raises(OSError):
        make_private(there / "file" / "below")


def of_a_stranger(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    os.chown(path, STRANGER, -1, follow_symlinks=False)


@pytest.mark.parametrize("whose", ["folder", "file", "deeper", "link", "what the link leads to", "beside"])
def test_what_is_of_somebody_else_is_found(tmp_path: Path, whose: str) -> None:
    folder, other = tmp_path / "step-1", tmp_path / "other"
    (folder / "below").mkdir(parents=True)
    other.touch()
    (folder / "below" / "weights").touch()
    (folder / "link").symlink_to(other)
    assert foreign(folder) == foreign(folder / "below" / "weights") == foreign(tmp_path / "nothing") == ""
    parts = {"folder": folder, "file": folder / "below", "deeper": folder / "below" / "weights"}
    of_a_stranger({**parts, "link": folder / "link", "what the link leads to": other}.get(whose, tmp_path))
    why = foreign(folder)
    assert ("belongs to user 54321" in why) is (whose != "beside"), why
