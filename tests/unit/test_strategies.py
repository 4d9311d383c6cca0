"""What a job file may say of `strategy = { kind = "burst" }`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsched import jobfile
from hpcsched.errors import ConfigError


def load(folder: Path, strategy: str) -> Any:
    path = folder / "jobs.toml"
    path.write_text(f'schema = 1\n[[job]]\nname = "a"\ntrainer = "a:B"\nsteps = 1\nstrategy = {strategy}\n')
    return jobfile.load(path, workdir=folder)


@pytest.mark.parametrize(
    "strategy",
    [
        '"burst"',
        '{ kind = "burst", amplification = 2 }',
        '{ kind = "burst", amplification = 1.5, profile = "layers.json" }',
        '{ kind = "burst", plan = "plan.json" }',
    ],
)
def test_a_burst_job_is_accepted(tmp_path: Path, strategy: str) -> None:
    load(tmp_path, strategy)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ('{ kind = "burst", amplification = 0.9 }', "amplification: 0.9; accepted: a number of at least 1"),
        ('{ kind = "burst", amplification = true }', "strategy.amplification: True"),
        ('{ kind = "burst", amplification = nan }', "job a.strategy: nan"),
        ('{ kind = "burst", plan = 3 }', "strategy.plan: 3; accepted: a file name"),
        ('{ kind = "burst", plan = "" }', "strategy.plan: ''; accepted: a file name"),
        ('{ kind = "burst", micro_batch = 3 }', "accepted: amplification, batch_norm, plan, profile"),
        ('{ kind = "burst", plan = "p.json", profile = "l.json" }', "or what to make one from, not both"),
    ],
)  # fmt: skip
def test_other_options_are_refused(tmp_path: Path, strategy: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, strategy)
    assert message in str(caught.value)
