"""Pool files: what is wrong is refused in one line that says what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.errors import ConfigError
from hpcsched.pool.poolfile import parse_pool

GOOD = """schema = 1
dir = "runs/a"
[pool]
max_allocations = 4
max_gpus = 16
gpu_hours = 200
idle = "5m"
[[template]]
name = "short"
partition = "gpu"
gpus_per_node = 4
gpu_type = "a100"
time = "2h"
max = 3
account = "me"
directives = ["--qos=low"]
[run]
margin = 90
policy_option = { depth = 3 }
"""


def read(text: str):
    return parse_pool(text, where="pool.toml", folder=Path("/home/me"))


def test_a_pool_file_is_read() -> None:
    pool = read(GOOD)
    assert pool.dir == Path("/home/me/runs/a") and pool.idle_s == 300.0 and pool.period_s == 60.0
    (short,) = pool.templates
    assert (short.gpus, short.limit_s, short.most) == (4, 7200.0, 3)
    assert short.more == {"gpu_type": "a100", "account": "me", "directives": ["--qos=low"]}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("max_gpus", "max_gpu", "pool.max_gpu: unknown key; did you mean 'max_gpus'?; accepted:"),
        ("gpu_hours = 200\n", "", "pool.gpu_hours: missing; accepted: GPU-hours of all allocations"),
        ('time = "2h"', 'time = "soon"', "template[0].time: 'soon'; accepted: the time limit, such as"),
        ('time = "2h"', 'time = "1m"', "template[0].time: '1m', but saving starts 90 s before the end"),
        ("gpus_per_node = 4", "gpus_per_node = 32", "template[0]: 32 GPUs (short); accepted: at most"),
        ("gpu_hours = 200", "gpu_hours = 1", "template[0]: up to 8 GPU-hours (short); accepted: at most"),
        ('idle = "5m"', 'idle = "5m"\nperiod = "1s"', "pool.period: '1s'; accepted: a time such as \"1m\""),
        ('partition = "gpu"', 'partition = "gpu\\n#SBATCH -x"', "template[0].partition: 'gpu\\n#SBATCH -x'"),
        ('account = "me"', 'account = "me\\n"', "template[0].account: 'me\\n'; accepted: an account"),
        ("[run]\nmargin = 90", "[run]\nrequeue = true", "run.requeue: unknown key"),
        ("depth = 3", "depth = [3]", "run.policy_option.depth: [3]; accepted: a text"),
        ("schema = 1", "schema = 2", "schema: 2; accepted: 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_one_line(old: str, new: str, why: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as error:
        read(GOOD.replace(old, new))
    assert str(error.value).startswith("pool.toml: ") and "\n" not in str(error.value)
    assert why in str(error.value), error.value
