"""What a job file says of a program that saves by itself, and of the multiples in which it takes GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched import jobfile
from hpcsched.core.model import Restart
from hpcsched.errors import ConfigError


def read(**keys):
    job = {"name": "a", "command": ["python", "train.py"], **keys}
    job = {key: value for key, value in job.items() if value is not None}
    return jobfile.parse({"schema": 1, "job": [job]}, where="x", workdir=Path("/w")).jobs[0]


@pytest.mark.parametrize(
    ("keys", "restart"),
    [
        ({}, None),
        ({"restartable": False}, None),
        ({"speaks": "none"}, None),
        ({"progress_pattern": r"step (\d+)"}, None),
        ({"restartable": False, "progress_pattern": r"step (\d+)"}, None),
        ({"restartable": True}, Restart()),
        ({"suspend_signal": "usr1"}, Restart(signal="SIGUSR1")),
        ({"suspend_signal": "SIGINT", "batch": "scales"}, Restart(signal="SIGINT", batch="scales")),
        ({"suspend_signal": "none"}, Restart(signal="")),
        (
            {"checkpoints": "out/c-*", "resume_args": ["--from", "{checkpoint}"]},
            Restart(checkpoints=("out/c-*",), resume_args=("--from", "{checkpoint}")),
        ),
        (
            {"resume_args": ["--accumulate={accumulation}"], "accumulation": 4},
            Restart(resume_args=("--accumulate={accumulation}",), accumulation=4, batch="kept"),
        ),
        ({"saved_exit_codes": [85, 99]}, Restart(saved_codes=(85, 99))),
        (
            {"suspend_command": ["s"], "resume_command": ["r"]},
            Restart(suspend_command=("s",), resume_command=("r",)),
        ),
    ],
)
def test_any_key_but_its_pattern_makes_it_one_that_saves_by_itself(keys, restart):
    assert read(**keys).restart == restart


def test_jobs_that_say_the_same_share_it():
    assert read(checkpoints="c").restart is read(checkpoints=["c"]).restart


@pytest.mark.parametrize(
    ("keys", "key", "accepted"),
    [
        ({"suspend_signal": "KILL"}, "suspend_signal", "SIGTERM, SIGUSR1"),
        ({"suspend_signal": "SIGTSTP"}, "suspend_signal", "SIGTERM, SIGUSR1"),
        ({"speaks": "cobol"}, "speaks", "none"),
        ({"checkpoints": "/*/a"}, "checkpoints", "without .."),
        ({"checkpoints": "/"}, "checkpoints", "without .."),
        ({"checkpoints": ["a", "b/../../c"]}, "checkpoints", "without .."),
        ({"checkpoints": "a\0b"}, "checkpoints", "without NUL"),
        ({"checkpoints": ["a"] * 17}, "checkpoints", "at most 16"),
        ({"resume_args": ["{checkpoint}"]}, "resume_args", "only with `checkpoints`"),
        ({"resume_args": ["\ud800"]}, "resume_args", "UTF-8"),
        ({"suspend_command": ["s"]}, "suspend_command", "both"),
        ({"saved_exit_codes": [0]}, "saved_exit_codes[0]", "1 to 255"),
        ({"saved_exit_codes": [256]}, "saved_exit_codes[0]", "1 to 255"),
        ({"batch": "kept"}, "batch", '"fixed" or "scales"'),
        ({"accumulation": 0}, "accumulation", "positive"),
        ({"progress_pattern": "step ("}, "progress_pattern", "one (\\d+)"),
        ({"command": None, "trainer": "m:T", "progress_pattern": r"(\d+)"}, "progress_pattern", "a command"),
        ({"restartable": False, "batch": "scales"}, "restartable", "no batch"),
        ({"command": None, "trainer": "m:T", "restartable": True}, "restartable", "with a command"),
        ({"command": None, "replay": True, "checkpoints": "c"}, "checkpoints", "with a command"),
        ({"gpus": {"multiple_of": 0}}, "gpus.multiple_of", "multiple_of"),
        ({"gpus": {"min": 5, "max": 7, "multiple_of": 4}}, "gpus", "a multiple of 4"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(keys, key, accepted):
    with pytest.raises(ConfigError) as caught:
        read(**keys)
    assert caught.value.key == f"job a.{key}"
    assert accepted in caught.value.accepted
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "limits"),
    [
        ({"multiple_of": 4}, (4, None)),
        ({"min": 5, "multiple_of": 4}, (8, None)),
        ({"min": 2, "max": 9, "multiple_of": 4}, (4, 8)),
    ],
)
def test_limits_are_multiples_too(gpus, limits):
    spec = read(gpus=gpus)
    assert (spec.gpus_min, spec.gpus_max, spec.gpus_multiple) == (*limits, 4)
