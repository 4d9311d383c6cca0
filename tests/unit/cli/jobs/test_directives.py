"""Options of `submit`, on its command line and in scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.cli.jobs.control import submit


@pytest.mark.parametrize(
    ("said", "nice"),
    [
        (["--nice=-7"], -7),
        (["--nice", "-7"], -7),
        (["--nice", "7"], 7),
        (["--nice"], 100),
        (["--nice", "--priority", "-3"], 100),
    ],
)
def test_nice_has_a_negative_number_a_positive_one_or_none(said: list[str], nice: int) -> None:
    program = ("echo", "--nice", "-9", "--nice=-9")
    params = submit.make_context("submit", [*said, "--", *program]).params
    assert (params["nice"], params["words"]) == (nice, program)


def test_a_script_may_say_that_it_is_less_nice(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n#HPCSCHED --nice=-5\n")
    assert submit.make_context("submit", [str(script)]).params["nice"] == -5
