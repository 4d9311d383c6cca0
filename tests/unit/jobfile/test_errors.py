"""Whatever is wrong in a job file is refused on one line: file, key, what was found, what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched import durations, jobfile
from hpcsched.core.model import Kind
from hpcsched.errors import ConfigError

GOOD = 'schema = 1\n[[job]]\nname = "a"\nreplay = true\n'


def load(tmp_path, text, **rest):
    path = tmp_path / "jobs.toml"
    path.write_text(text, encoding="utf-8")
    return jobfile.load(path, workdir=tmp_path, **rest)


def job(lines, name="a", kind="replay = true"):
    return f'schema = 1\n[[job]]\nname = "{name}"\n{kind}\n{lines}\n'


def refusal(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert error.exit_code == 2
    message = str(error)
    assert "\n" not in message
    assert message == f"{tmp_path}/jobs.toml: " + (f"{error.key}: " if error.key else "") + (
        f"{error.got}; accepted: {error.accepted}"
    )
    assert error.got and error.accepted
    return error


TOO_LONG = "9" * 400
CASES = [
    # the file
    ("unreadable TOML", "schema = [", "", "not valid TOML: Invalid value (at end of document)", "TOML"),
    ("no schema", '[[job]]\nname = "a"\n', "schema", "missing", "1"),
    ("other schema", GOOD.replace("1", "2", 1), "schema", "2", "1"),
    ("schema true", GOOD.replace("1", "true", 1), "schema", "True", "1"),
    ("unknown top-level key", "jobs = 1\n" + GOOD, "jobs", "unknown key", "defaults, job, policy, schema"),
    ("a key over two lines", '"a\\nb" = 1\n' + GOOD, "'a\\nb'", "unknown key", "defaults, job"),
    ("no jobs", "schema = 1\n", "job", "no jobs", "at least one [[job]]"),
    ("job is no table", "schema = 1\njob = 3\n", "job", "3", "[[job]] tables"),
    ("defaults is no table", "defaults = 3\n" + GOOD, "defaults", "3", "a table"),
    ("name in defaults", GOOD + '[defaults]\nname = "x"\n', "defaults.name", "a name", "unique name"),
    ("policy is no table", "policy = 3\n" + GOOD, "policy", "3", "a table"),
    ("policy name is no text", GOOD + "[policy]\nname = 3\n", "policy.name", "3", "the name of a policy"),
    # names
    ("no name", "schema = 1\n[[job]]\nreplay = true\n", "job[0].name", "missing", "1 to 64 of"),
    ("bad name", job("", name="a b"), "job[0].name", "'a b'", "A-Z a-z 0-9"),
    ("long name", job("", name="x" * 65), "job[0].name", "'xxx", "1 to 64"),
    ("empty name", job("", name=""), "job[0].name", "''", "1 to 64"),
    ("name is no text", GOOD.replace('"a"', "3"), "job[0].name", "3", "1 to 64"),
    ("duplicate name", GOOD + GOOD.removeprefix("schema = 1\n"), "job a.name", "given twice", "no other job"),
    # what it runs
    ("nothing to run", job("", kind=""), "job a", "none of them", "exactly one of trainer, command"),
    ("two things to run", job('trainer = "m:T"'), "job a", "trainer and replay", "exactly one of"),
    ("three", job('trainer = "m:T"\ncommand = ["x"]'), "job a", "trainer and command and replay", "one"),
    ("bad trainer", job('trainer = "m"', kind=""), "job a.trainer", "'m'", '"package.module:Name"'),
    ("command as text", job('command = "x y"', kind=""), "job a.command", "'x y'", "a list of a program"),
    ("empty argument", job('command = ["x", ""]', kind=""), "job a.command[1]", "''", "not empty"),
    (
        "a number in command",
        job('command = ["x", 3]', kind=""),
        "job a.command[1]",
        "3",
        "a list of a program",
    ),
    ("NUL in command", job('command = ["x\\u0000"]', kind=""), "job a.command", "x\\x00", "without NUL"),
    ("replay is no bool", job("", kind="replay = 1"), "job a.replay", "1", "true or false"),
    # numbers
    ("no steps", job("steps = 0"), "job a.steps", "0", "a positive number of steps"),
    ("negative steps", job("steps = -5"), "job a.steps", "-5", "a positive number of steps"),
    ("half a step", job("steps = 1.5"), "job a.steps", "1.5", "a positive number of steps"),
    ("steps true", job("steps = true"), "job a.steps", "True", "a positive number of steps"),
    ("too many steps", job(f"steps = {2**53 + 1}"), "job a.steps", "9007199254740993", "a positive"),
    ("retries", job("retries = -1"), "job a.retries", "-1", "0 or more"),
    ("nodes", job("nodes = 0"), "job a.nodes", "0", "1 or more"),
    ("keep", job("keep_checkpoints = 0"), "job a.keep_checkpoints", "0", "1 or more"),
    ("background in words", job('background = "yes"'), "job a.background", "'yes'", "true or false"),
    (
        "4 behind",
        job("background = true\ngpus = 4"),
        "job a.gpus",
        "4",
        '"auto" or 1 for a job in the backgr',
    ),
    (
        "a range behind",
        job("background = true\ngpus = { min = 1, max = 2 }"),
        "job a.gpus",
        "{'min': 1, 'max': 2}",
        '"auto" or 1',
    ),
    ("2 hosts behind", job("background = true\nnodes = 2"), "job a.nodes", "2", "1 for a job in the backgr"),
    (
        "burst behind",
        job('background = true\nstrategy = "burst"'),
        "job a.strategy",
        "burst",
        "runs on 1 GPU",
    ),
    ("slowdown", job("max_foreground_slowdown = 5"), "job a.max_foreground_slowdown", "5", "0 to 1"),
    ("NaN slowdown", job("max_foreground_slowdown = nan"), "job a.max_foreground_slowdown", "nan", "0 to 1"),
    # GPUs
    ("no GPUs", job("gpus = 0"), "job a.gpus", "0", '"auto", "share", a whole number from 1, a share'),
    (
        "a share of nothing",
        job("gpus = 0.06"),
        "job a.gpus",
        "0.06",
        "a share of one GPU from 0.0625 to below 1",
    ),
    ("more than a share", job("gpus = 1.5"), "job a.gpus", "1.5", "a whole number from 1"),
    ("GPUs true", job("gpus = true"), "job a.gpus", "True", '"auto"'),
    ("GPUs in words", job('gpus = "all"'), "job a.gpus", "'all'", '"auto"'),
    ("max below min", job("gpus = { min = 3, max = 2 }"), "job a.gpus", "'min': 3", "with min <= max"),
    ("min 0", job("gpus = { min = 0 }"), "job a.gpus.min", "0", "{ min = 1, max = 4 }"),
    ("min is text", job('gpus = { min = "a" }'), "job a.gpus.min", "'a'", '"auto"'),
    (
        "unknown in gpus",
        job("gpus = { least = 1 }"),
        "job a.gpus.least",
        "unknown key",
        "{ min = 1, max = 4 }",
    ),
    # times
    ("duration", job('checkpoint_every = "soon"'), "job a.checkpoint_every", "'soon'", "10m"),
    ("no interval", job("checkpoint_every = 0"), "job a.checkpoint_every", "0", "a time above 0"),
    ("75 seconds", job('checkpoint_every = "10:75"'), "job a.checkpoint_every", "'10:75'", "seconds"),
    ("75 minutes", job('checkpoint_every = "1-02:75:00"'), "job a.checkpoint_every", "75", "seconds"),
    ("huge", job(f'submit_at = "{TOO_LONG}:00"'), "job a.submit_at", "'999", "seconds"),
    ("huge number", job(f"submit_at = {TOO_LONG}"), "job a.submit_at", "999", "seconds"),
    ("negative time", job("submit_at = -1.0"), "job a.submit_at", "-1.0", "seconds, or a time"),
    ("NaN", job("submit_at = nan"), "job a.submit_at", "nan", "seconds"),
    ("infinite", job("submit_at = inf"), "job a.submit_at", "inf", "seconds"),
    ("NaN as text", job('submit_at = "nan"'), "job a.submit_at", "'nan'", "seconds"),
    ("time true", job("submit_at = true"), "job a.submit_at", "True", "seconds"),
    # tables and lists
    ("unknown key", job("step = 3"), "job a.step", "unknown key", "name, model, steps"),
    ("args is no table", job("args = 3"), "job a.args", "3", "a table of"),
    ("NaN in args", job("args = { lr = [1.0, nan] }"), "job a.args", "nan", "finite numbers"),
    ("date in args", job("args = { d = 2020-01-01 }"), "job a.args", "datetime.date", "texts"),
    ("huge in args", job(f"args = {{ n = {2**63} }}"), "job a.args", str(2**63), "finite numbers"),
    ("env is no text", job("env = { A = 1 }"), "job a.env.A", "1", "a table of texts"),
    ("= in env", job('env = { "A=B" = "1" }'), "job a.env", "'A=B'", "without ="),
    ("NUL in env", job('env = { A = "\\u0000" }'), "job a.env", "\\x00", "without NUL"),
    ("no output", job('output = ""'), "job a.output", "''", "a file name"),
    ("processes", job('processes = "many"'), "job a.processes", "'many'", '"auto", "per-gpu", "one" or a'),
    ("strategy", job('strategy = "magic"'), "job a.strategy", "'magic'", "ddp"),
    (
        "option",
        job('strategy = { kind = "ddp", x = 1 }'),
        "job a.strategy.x",
        "unknown option",
        "micro_batch, reproducible, shards",
    ),
    (
        "flag",
        job('strategy = { kind = "ddp", reproducible = 1 }'),
        "job a.strategy.reproducible",
        "1",
        "true",
    ),
    (
        "count",
        job('strategy = { kind = "ddp", micro_batch = 0 }'),
        "job a.strategy.micro_batch",
        "0",
        "positive",
    ),
    (
        "no shards",
        job('strategy = { kind = "ddp", reproducible = true, shards = 2.5 }'),
        "job a.strategy.shards",
        "2.5",
        "a positive whole number",
    ),
    (
        "shards alone",
        job('strategy = { kind = "ddp", shards = 4 }'),
        "job a.strategy.shards",
        "4",
        "only with reproducible = true",
    ),
    (
        "more ranks than shards",
        job('gpus = 3\nnodes = 2\nstrategy = { kind = "ddp", reproducible = true, shards = 4 }'),
        "job a.gpus",
        "6",
        "at most as many ranks as shards (4)",
    ),
    (
        "statistics",
        job('strategy = { kind = "burst", batch_norm = "none" }'),
        "job a.strategy.batch_norm",
        "'none'",
        '"shared" or "local"',
    ),
    ("no kind", job("strategy = { x = 1 }"), "job a.strategy", "missing", "ddp"),
    # dependencies
    ("after is text", job('after = "b"'), "job a.after", "'b'", "a list of job names"),
    ("after nobody", job('after = ["b"]'), "job a.after", "'b' is no job", "names of other jobs"),
    ("after itself", job('after = ["a"]'), "after", "a cycle: a after a", "do not wait for each other"),
    (
        "cycle",
        job('after = ["b"]') + '[[job]]\nname = "b"\nreplay = true\nafter = ["a"]\n',
        "after",
        "a cycle: ",
        "do not wait for each other",
    ),
]


@pytest.mark.parametrize(
    ("text", "key", "got", "accepted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_bad_input_is_refused(tmp_path, text, key, got, accepted):
    error = refusal(tmp_path, text)
    assert error.key == key
    assert got in error.got
    assert accepted in error.accepted
    assert len(error.got) < 300


def test_files_that_cannot_be_read(tmp_path):
    for path, got in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=got):
            jobfile.load(path, workdir=tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        jobfile.load(tmp_path / "latin.toml", workdir=tmp_path)


def test_more_gpus_or_hosts_than_exist(tmp_path):
    (spec,) = load(tmp_path, job("gpus = { min = 7 }\nnodes = 2")).jobs
    with pytest.raises(ConfigError, match=r"jobs: job a.gpus: 7 GPUs; accepted: at most 6"):
        jobfile.check_fits([spec], gpus=6, hosts=2, where="jobs")
    with pytest.raises(ConfigError, match=r"jobs: job a.nodes: 2 hosts; accepted: at most 1"):
        jobfile.check_fits([spec], gpus=8, hosts=1, where="jobs")
    jobfile.check_fits([spec], gpus=7, hosts=2, where="jobs")


def test_names_of_the_run_so_far_count(tmp_path):
    text = job('after = ["before"]')
    assert load(tmp_path, text, known={"before"}).jobs[0].after == ("before",)
    with pytest.raises(ConfigError, match="in the run already"):
        load(tmp_path, text, known={"before", "a"})


def test_what_is_right_is_taken(tmp_path):
    text = """
        schema = 1
        [policy]
        name = "marble"
        promote = "always"
        [defaults]
        replay = true
        checkpoint_every = "1h"
        [[job]]
        name = "last"
        after = ["first", "first"]
        gpus = { min = 2, max = 4 }
        args = { lr = 0.1, deep = { list = [1, "x", true] } }
        [[job]]
        name = "first"
        model = "ResNet-50"
        command = ["python", "train.py"]
        gpus = 3
        submit_at = "1-00:00:01"
        workdir = "sub"
    """
    file = load(tmp_path, text)
    last, first = file.jobs
    assert (file.policy, file.policy_options) == ("marble", {"promote": "always"})
    assert (last.kind, last.model, last.after, last.gpus_min, last.gpus_max) == (
        Kind.REPLAY,
        "last",
        ("first",),
        2,
        4,
    )
    assert last.checkpoint_every_s == first.checkpoint_every_s == 3600
    assert (first.kind, first.command, first.gpus_min, first.gpus_max) == (
        Kind.COMMAND,
        ("python", "train.py"),
        3,
        3,
    )
    assert first.submit_at == 86401
    assert Path(first.workdir) == tmp_path / "sub"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (0.5, 0.5),
        ("90", 90),
        ("90s", 90),
        ("1.5h", 5400),
        ("10m", 600),
        ("2H", 7200),
        ("1d", 86400),
        (" 3m ", 180),
        ("90:00", 5400),
        ("1:02:03", 3723),
        ("1-12:00:00", 129600),
        ("2-03:04", 2 * 86400 + 3 * 3600 + 240),
        ("1-12", 129600),
        ("0-90", 324000),
        ("1e3", 1000),
    ],
)
def test_durations(text, seconds):
    assert durations.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "m", "ten", "1:2:3:4", "-5", "-1:00", "5w", "1e999", "0:60", "inf", "nan"),
        *("1-", "-12", "1-12h", "1-12:60", "1:60:00", "1-2:3:4:5"),
        *("\uff11\uff10s", "\uff11:00", "1_0s", "\u0663"),
    ],
)
def test_what_is_no_duration(text):
    with pytest.raises(ValueError):
        durations.parse_duration(text)


@pytest.mark.parametrize(
    ("lines", "most"),
    [
        ("strategy = { kind = 'ddp', reproducible = true }", 8),
        ("strategy = { kind = 'ddp', reproducible = true, shards = 5 }\nnodes = 2", 2),
        ("strategy = { kind = 'ddp', reproducible = true, shards = 5 }\ngpus = { max = 3 }", 3),
        ("strategy = { kind = 'ddp', reproducible = false }", None),
    ],
)
def test_a_reproducible_job_has_no_more_ranks_than_shards(tmp_path, lines, most):
    (spec,) = load(tmp_path, job(lines)).jobs
    assert (spec.gpus_min, spec.gpus_max) == (1, most)
