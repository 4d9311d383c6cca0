"""Search files: what they mean, and that whatever is wrong in one is refused on one line."""

from __future__ import annotations

import re

import pytest
from places import ROOT

from hpcsched.errors import ConfigError
from hpcsched.tuning import Tuning, parse_search, read_search

GOOD = """\
schema = 1
trainer = "hpcsched.examples.digits:Digits"
metric = "accuracy"
mode = "max"
R = 27
"""
SPACE = "[space]\nlr = { log = [1e-4, 1e-1] }\n"
FINITE = '[space]\nbatch = { choice = [16, 32, 64] }\nkind = { choice = ["mlp", "cnn"] }\n'


def search(lines="", *, tables=SPACE, base=GOOD):
    return parse_search(base + lines + "\n" + tables, where="search.toml")


def without(key):
    return "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(key))


def test_defaults_are_hyperband_by_thirds_in_epochs():
    found = search()
    assert (found.method, found.eta, found.unit, found.seed) == ("hyperband", 3, "epochs", 0)
    assert (found.packing, found.checkpoints, found.trials) == ("auto", "best", None)
    assert (found.args, found.defaults) == ({}, {})
    assert [bracket.trials for bracket in found.brackets()] == [27, 12, 6, 4]


def test_every_key_is_read(tmp_path):
    path = tmp_path / "search.toml"
    lines = (
        'method = "halving"\neta = 2.5\nunit = "steps"\nseed = 7\npacking = "knn"\n'
        'trials = 40\ncheckpoints = "all"\nargs = { kind = "cnn" }\n'
        '[defaults]\nretries = 0\ncheckpoint_every = "1m"\nenv = { OMP_NUM_THREADS = "1" }\n'
    )
    path.write_text(GOOD + lines + SPACE)
    found = read_search(path)
    assert (found.trainer, found.metric, found.mode) == ("hpcsched.examples.digits:Digits", "accuracy", "max")
    assert (found.R, found.eta, found.unit, found.seed, found.trials) == (27, 2.5, "steps", 7, 40)
    assert (found.method, found.packing, found.checkpoints) == ("halving", "knn", "all")
    assert found.args == {"kind": "cnn"}
    assert found.defaults == {
        "retries": 0,
        "checkpoint_every": "1m",
        "env": {"OMP_NUM_THREADS": "1"},
    }
    assert [axis.name for axis in found.space.axes()] == ["lr"]
    assert found.where == str(path)


def rungs(*lines, **rest):
    return [bracket.rungs for bracket in search("\n".join(lines), **rest).brackets()]


def test_each_method_plans_its_rungs():
    assert rungs('method = "random"', "trials = 10") == [((10, 27),)]
    assert rungs('method = "grid"', tables=FINITE) == [((6, 27),)]
    assert rungs('method = "halving"') == [((27, 1), (9, 3), (3, 9), (1, 27))]
    assert rungs('method = "halving"', "trials = 100") == [((100, 1), (33, 3), (11, 9), (3, 27))]
    assert rungs('method = "asha"') == rungs('method = "halving"')
    assert rungs('method = "asha"', "trials = 100") == rungs('method = "halving"', "trials = 100")
    # Each of 54 trials costs 3 epochs in the mean, and two may be expected to come to the end.
    assert rungs('method = "asha"', "budget = 162") == [((54, 1), (18, 3), (6, 9), (2, 27))]
    assert rungs('method = "asha"', "budget = 324") == [((108, 1), (36, 3), (12, 9), (4, 27))]
    assert rungs('method = "asha"', "budget = 324", "trials = 30") == [((30, 1), (10, 3), (3, 9), (1, 27))]
    assert rungs('method = "asha"', "budget = 161") == [((23, 3), (7, 9), (2, 27))]
    assert rungs('method = "asha"', "budget = 27") == [((1, 27),)]
    # All configurations of a finite space are one bracket, that begins where one of them comes to the end.
    assert rungs('method = "halving"', tables=FINITE) == [((6, 9), (2, 27))]


def test_a_space_of_fewer_configurations_than_asked_for_is_said():
    assert search().shortage() is None
    assert search(tables=FINITE).shortage() == (
        "the space has 6 configurations for 49 trials: each is tried once"
    )
    assert search('method = "grid"', tables=FINITE).shortage() is None
    few = search('method = "random"\ntrials = 9', tables=FINITE)
    assert "6 configurations for 9 trials" in few.shortage()
    assert len(Tuning(few).jobs({})) == 6


ASHA = 'method = "asha"\n'
BIG = "[space]\nn = { int = [1, 1000000] }\n"
CASES = [
    ("unreadable TOML", "schema = [", "", "not valid TOML", "TOML"),
    (
        "unknown key",
        GOOD + "patience = 3\n" + SPACE,
        "patience",
        "unknown key",
        "schema, trainer, command, metric",
    ),
    ("a key over two lines", '"a\\nb" = 1\n' + GOOD + SPACE, "'a\\nb'", "unknown key", "schema"),
    *(
        (f"no {key}", without(key) + SPACE, key, "missing", accepted)
        for key, accepted in [
            ("schema", "1"),
            ("trainer", "package.module:Name"),
            ("metric", "evaluate"),
            ("mode", '"max" or "min"'),
            ("R", "at least 1"),
        ]
    ),
    ("no space", GOOD, "space", "missing", "a table"),
    ("empty space", GOOD + "[space]\n", "space", "no arguments", "a table"),
    ("space in words", GOOD + 'space = "lr"\n', "space", "'lr'", "a table"),
    ("bad axis", GOOD + "[space]\nlr = { log = [1, 0.1] }\n", "space.lr", "[1, 0.1]", "0 < a < b"),
    ("schema", GOOD.replace("schema = 1", "schema = true") + SPACE, "schema", "True", "1"),
    ("trainer", GOOD.replace(":Digits", "") + SPACE, "trainer", "'hpcsched.examples.digits'", "module:Name"),
    ("trainer as a number", without("trainer") + "trainer = 3\n" + SPACE, "trainer", "3", "module:Name"),
    ("threshold", GOOD + "knn_threshold = 1\n" + SPACE, "knn_threshold", "1", "only with packing or against"),
    ("threshold below", GOOD + "knn_threshold = -1\n" + SPACE, "knn_threshold", "-1", "0 or more"),
    ("empty metric", GOOD.replace("accuracy", "") + SPACE, "metric", "''", "the name of a number"),
    ("mode", GOOD.replace('"max"', '"maximum"') + SPACE, "mode", "'maximum'", '"max" or "min"'),
    ("R of 0", GOOD.replace("27", "0") + SPACE, "R", "0", "at least 1"),
    ("R of half", GOOD.replace("27", "0.5") + SPACE, "R", "0.5", "at least 1"),
    ("R of nan", GOOD.replace("27", "nan") + SPACE, "R", "nan", "at least 1"),
    ("R true", GOOD.replace("27", "true") + SPACE, "R", "True", "at least 1"),
    ("R too large", GOOD.replace("27", "1" + "0" * 400) + SPACE, "R", "1000", "at least 1"),
    ("half a step", GOOD.replace("27", "27.5") + 'unit = "steps"\n' + SPACE, "R", "27.5", "whole number"),
    ("eta", GOOD + "eta = 1\n" + SPACE, "eta", "1", "above 1"),
    ("eta in words", GOOD + 'eta = "3"\n' + SPACE, "eta", "'3'", "above 1"),
    ("unit", GOOD + 'unit = "minutes"\n' + SPACE, "unit", "'minutes'", '"epochs" or "steps"'),
    (
        "method",
        GOOD + 'method = "bayes"\n' + SPACE,
        "method",
        "'bayes'",
        '"hyperband", "asha", "halving", "random" or "grid"',
    ),
    ("method as a list", GOOD + "method = []\n" + SPACE, "method", "[]", "hyperband"),
    (
        "packing",
        GOOD + 'packing = "on"\n' + SPACE,
        "packing",
        "'on'",
        '"off", "auto", "knn", "batch" or "random"',
    ),
    ("seed", GOOD + "seed = 1.5\n" + SPACE, "seed", "1.5", "a whole number"),
    ("checkpoints", GOOD + 'checkpoints = "none"\n' + SPACE, "checkpoints", "'none'", '"best" or "all"'),
    ("trials", GOOD + 'method = "random"\ntrials = 0\n' + SPACE, "trials", "0", "1 to"),
    ("no trials", GOOD + 'method = "random"\n' + SPACE, "trials", "missing", "method random"),
    (
        "trials of hyperband",
        GOOD + "trials = 9\n" + SPACE,
        "trials",
        "9",
        "only with the methods asha, halving",
    ),
    ("architecture", GOOD + 'architecture = "n"\n' + BIG, "architecture", "'n'", "a list of arguments"),
    ("no such argument", GOOD + 'architecture = ["m"]\n' + BIG, "architecture", "'m'", "whole numbers: n"),
    ("a rate as model", GOOD + 'architecture = ["lr"]\n' + SPACE, "architecture", "'lr'", "numbers: none"),
    ("twice", GOOD + 'architecture = ["n", "n"]\n' + BIG, "architecture", "'n'", "each once"),
    ("budget of hyperband", GOOD + "budget = 99\n" + SPACE, "budget", "99", "only with method asha"),
    ("parallel of hyperband", GOOD + "parallel = 4\n" + SPACE, "parallel", "4", "only with method asha"),
    ("parallel", GOOD + ASHA + "parallel = 0\n" + SPACE, "parallel", "0", "1 to"),
    ("a budget below R", GOOD + ASHA + "budget = 26\n" + SPACE, "budget", "26", "at least R, 27"),
    ("a huge budget", GOOD + ASHA + "budget = 1e9\n" + SPACE, "budget", "trials", "at most 100000"),
    ("a huge asha", GOOD + ASHA + BIG, "trials", "1000000 trials", "at most 100000"),
    ("packs of a rung", GOOD + ASHA + 'packing = "knn"\n' + SPACE, "packing", "'knn'", "off or auto"),
    ("against", GOOD + ASHA + 'against = "batch"\n' + SPACE, "against", "'batch'", "off or auto"),
    ("an endless grid", GOOD + 'method = "grid"\n' + SPACE, "space.lr", "log", "int or choice"),
    ("a huge grid", GOOD + 'method = "grid"\n' + BIG, "space", "1000000 trials", "at most 100000"),
    ("a huge halving", GOOD + 'method = "halving"\n' + BIG, "trials", "1000000 trials", "at most 100000"),
    ("a huge R", GOOD.replace("27", "1e6") + SPACE, "R", "trials", "at most 100000"),
    ("too many brackets", GOOD.replace("27", "1e6") + "eta = 1.01\n" + SPACE, "R", "eta = 1.01", "brackets"),
    ("args as text", GOOD + 'args = "x"\n' + SPACE, "args", "'x'", "a table"),
    ("args of nan", GOOD + "args = { a = nan }\n" + SPACE, "args", "nan", "finite"),
    ("fixed and searched", GOOD + "args = { lr = 1.0 }\n" + SPACE, "space.lr", "in args too", "either fixed"),
    ("defaults as text", GOOD + 'defaults = "x"\n' + SPACE, "defaults", "'x'", "a table of env, retries"),
    ("other defaults", GOOD + "[defaults]\ngpus = 2\n" + SPACE, "defaults.gpus", "unknown key", "env, retr"),
    ("retries", GOOD + "[defaults]\nretries = -1\n" + SPACE, "defaults.retries", "-1", "0 or more"),
    ("env", GOOD + "[defaults]\nenv = { A = 1 }\n" + SPACE, "defaults.env.A", "1", "a table of texts"),
    (
        "interval",
        GOOD + '[defaults]\ncheckpoint_every = "soon"\n' + SPACE,
        "defaults.checkpoint_every",
        "'soon'",
        '"10m"',
    ),
]


@pytest.mark.parametrize(
    ("text", "key", "got", "accepted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_is_wrong_is_refused_by_name(text, key, got, accepted):
    with pytest.raises(ConfigError) as caught:
        parse_search(text, where="search.toml")
    error = caught.value
    assert error.where == "search.toml"
    assert error.key.startswith(key) if key else error.key == ""
    assert got in error.got
    assert accepted in error.accepted
    assert "\n" not in str(error)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_search(tmp_path / "search.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_search(tmp_path / "bytes.toml")


def test_the_example_in_the_documentation_is_a_search_of_the_size_it_says():
    text = (ROOT / "docs" / "search-files.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    progress = Tuning(parse_search(example[1], where="search-files.md")).progress({})
    assert len(Tuning(parse_search(example[1], where="search-files.md")).jobs({})) == 49
    assert round(progress.budget / 27) == 13
