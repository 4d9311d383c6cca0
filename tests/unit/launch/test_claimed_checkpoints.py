"""The folder of a run's checkpoints in a place that others may write, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.errors import ConfigError
from hpcsched.launch.plans import checkpoint_dir, claim_checkpoints

STRANGER = 54321


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder of everybody's; the umask is that of somebody who thinks of nothing."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    folder.chmod(0o1777)
    before = os.umask(0)
    yield folder
    os.umask(before)


def test_it_is_this_users_alone_whatever_the_umask(scratch: Path) -> None:
    for _ in range(2):
        claim_checkpoints(scratch, "r1")
        assert (scratch / "r1").stat().st_mode & 0o777 == 0o700
    assert checkpoint_dir(Path("/run"), "r1", 3, scratch) == scratch / "r1" / "3"


@pytest.mark.parametrize("what", ["of another user", "a link", "a dangling link", "open to everybody"])
def test_what_somebody_has_put_there_is_refused(scratch: Path, what: str) -> None:
    folder = scratch / "r1"
    if "link" in what:
        folder.symlink_to(scratch if what == "a link" else scratch / "nowhere")
    else:
        folder.mkdir()
    if what == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to somebody else")
        folder.chmod(0o700)
        os.chown(folder, STRANGER, -1)
    with pytest.raises(ConfigError, match=r"^--checkpoints: .*/r1 is a link, somebody else's, or one that"):
        claim_checkpoints(scratch, "r1")


def test_a_place_without_room_is_told_of_when_a_job_saves(scratch: Path) -> None:
    (scratch / "file").touch()
    claim_checkpoints(scratch / "file", "r1")
