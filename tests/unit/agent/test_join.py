"""What a `hpcsched join` makes of the end of its node agents."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rundirs import a_run

from hpcsched.agent.join import Membership, Parted
from hpcsched.store.rundir import RunDir

ENDED, FAILED = (SimpleNamespace(succeeded=well, why="exit code 2") for well in (True, False))


@pytest.mark.parametrize(
    ("state", "commands", "left_s", "parted"),
    [
        ("FINISHED", [FAILED], 3600.0, Parted.OVER),  # its keys went as the run ended
        ("FINISHED", [ENDED], 3600.0, Parted.OVER),
        ("RUNNING", [FAILED, FAILED], 3600.0, Parted.NEVER_CAME),
        ("RUNNING", [ENDED, FAILED], 3600.0, Parted.LOST),
        ("RUNNING", [ENDED], 10.0, Parted.LEFT),
    ],
)
def test_a_run_that_is_over_is_no_failure(
    tmp_path: Path, state: str, commands: list[Any], left_s: float, parted: Parted
) -> None:
    told = list[str]()
    member = SimpleNamespace(
        _rundir=RunDir(a_run(tmp_path / "run", state=state)),
        _commands=commands,
        _log=tmp_path / "log",
        _tell=told.append,
        _end=SimpleNamespace(left_s=lambda: left_s, reserve_s=60.0),
    )
    assert Membership._parted(cast(Any, member)) is parted
    assert bool(told) == (parted is Parted.NEVER_CAME)
