"""Searches that try a program: what such a file may say, and the jobs that come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.core.events import JobsSubmitted
from hpcsched.core.model import Kind
from hpcsched.errors import ConfigError
from hpcsched.testing.builders import Driver
from hpcsched.tuning import parse_search, source_of
from hpcsched.tuning.feeding import Feeder
from hpcsched.tuning.search import example_of

GOOD = """\
schema = 1
command = ["python", "train.py", "--lr={lr}", "--epochs", "{budget}", "--out", "{dir}"]
metric = "accuracy"
mode = "max"
R = 9
"""
SPACE = "[space]\nlr = { log = [1e-3, 1.0] }\n"


def search(lines="", *, space=SPACE, base=GOOD):
    return parse_search(base + lines + "\n" + space, where="search.toml")


def folder_of(trial):
    return Path(f"/run/trials/t{trial:04d}")


def feeder(found):
    return Feeder(source_of(found), workdir=Path("/work"), user="ada", folder_of=folder_of)


def submit(driver, feed):
    new = feed(driver.machine)
    if new:
        driver.tell(JobsSubmitted, first_id=len(driver.machine.run.jobs) + 1, jobs=tuple(new))
    return new


def test_a_rung_s_job_runs_the_command_with_its_values_on_one_gpu():
    text = GOOD.replace('"--out"', '"{{lr}} ${HOME}", "--on={on}", "--n={trial}", "--out"')
    rest = 'args = { on = true }\nmethod = "halving"\ntrials = 9\n[defaults]\nenv = { WIDTH = "w{width}" }\n'
    found = search(rest, base=text, space=SPACE + "width = { choice = [16, 32] }\n")
    first = submit(Driver(gpus=2), feeder(found))[0]
    lr, width = first.args["lr"], first.args["width"]
    words = ["{lr} ${HOME}", "--on=true", "--n=0", "--out", "/run/trials/t0000"]
    assert first.command == ("python", "train.py", f"--lr={lr}", "--epochs", "1", *words)
    assert first.env == {"WIDTH": f"w{width}"} and first.args == {"on": True, "lr": lr, "width": width}
    assert (first.kind, first.gpus_min, first.gpus_max) == (Kind.COMMAND, 1, 1)
    assert (first.model, first.workdir, first.steps, first.epochs) == ("train", "/work", None, None)


def test_a_next_rung_comes_after_the_one_before_in_the_same_folder_for_the_whole_budget():
    driver = Driver(gpus=9)
    feed = feeder(search('method = "halving"\ntrials = 9\nunit = "steps"'))
    names = [spec.name for spec in submit(driver, feed)]
    for value, name in enumerate(names):
        driver.runs(name)
        driver.exits(name, 0, None, None, metrics={"accuracy": value / 10})
    again = submit(driver, feed)
    assert [spec.after for spec in again] == [(name,) for name in names[-3:]]
    assert [spec.command[-1] for spec in again] == [f"/run/trials/t000{trial}" for trial in (6, 7, 8)]
    assert {(spec.command[4], spec.steps, spec.continues) for spec in again} == {("3", 3, None)}


def test_budgets_of_a_program_are_whole():
    assert [
        bracket.rungs for bracket in search('method = "halving"', base=GOOD.replace("9", "10")).brackets()
    ] == [((9, 2), (3, 4), (1, 10))]


@pytest.mark.parametrize(
    ("lines", "trainings"),
    [
        ("", 2),
        ("parallel = 5", 5),
        ("[defaults]\ngpus = 0.25", 8),
        ('[defaults]\ngpus = "share"', 16),
        ("[defaults]\ngpus = 2", 1),
    ],
)
def test_asha_has_as_many_trainings_as_have_room(lines, trainings):
    found = search(f'method = "asha"\ntrials = 30\n{lines}')
    assert len(submit(Driver(gpus=2), feeder(found))) == trainings


def test_a_container_is_shown_the_folder():
    found = search('[defaults]\ncontainer = { image = "a.sif", mounts = ["/data"] }')
    first = submit(Driver(gpus=1), feeder(found))[0]
    assert [mount[0] for mount in first.container.mounts] == ["/data", "/run/trials/t0000"]


def test_of_an_architecture_only_the_models_are_named():
    text = GOOD.replace('"--out"', '"{width}"')
    found = search('architecture = ["width"]', base=text, space=SPACE + "width = { choice = [16] }\n")
    assert found.packing == "off"
    assert {spec.model for spec in submit(Driver(gpus=1), feeder(found))} == {"train-width=16"}


def test_a_job_like_those_of_the_search_has_their_environment():
    assert example_of(search('[defaults]\nvenv = "/env"')).environment.name == "/env"


CASES = [
    ("neither", GOOD.replace("command", "#"), "", "trainer", "missing", "`command`"),
    ("both", GOOD, 'trainer = "a:B"', "command", "a trainer too", "exactly one"),
    ("no words", GOOD.replace('["python"', '[] #'), "", "command", "[]", "a list of a program"),
    ("packing", GOOD, 'packing = "auto"', "packing", "'auto'", "only with a trainer"),
    ("exact", GOOD, "exact = false", "exact", "False", "only with a trainer"),
    ("against", GOOD, 'against = "off"', "against", "'off'", "only with a trainer"),
    ("threshold", GOOD, "knn_threshold = 1", "knn_threshold", "1", "only with a trainer"),
    ("unused", GOOD.replace("{lr}", "{{lr}}"), "", "space.lr", "used nowhere", "{lr} in a text"),
    ("unused args", GOOD, "args = { width = 1 }", "args.width", "used nowhere", "{width}"),
    ("a list", GOOD.replace("{lr}", "{lr}{w}"), "args = { w = [1] }", "args.w", "[1]", "a text"),
    ("reserved", GOOD, "args = { budget = 1 }", "args.budget", "'budget'", "another name than budget, trial"),
    ("no budget", GOOD.replace("{budget}", "3"), "", "command", "no {budget}", '"--epochs"'),
    ("R", GOOD.replace("R = 9", "R = 9.5"), "", "R", "9.5", "a whole number"),
    ("pattern", GOOD, "result = 'a|b(.)'", "result", "'a|b(.)'", "parentheses"),
    ("two results", GOOD, "result = 'a(.)'\nresult_file = '{dir}/a'", "result_file", "result too", "one of"),
    ("one file", GOOD, 'result_file = "out.json"', "result_file", "'out.json'", "{dir}"),
    ("trainer", GOOD.replace("command", "#"), "trainer='a:B'\nresult='a(.)'", "result", "'a(.)'", "evaluate"),
    ("default", GOOD, "[defaults]\nsteps = 3", "defaults.steps", "unknown key", "gpus"),
    ("default's value", GOOD, '[defaults]\ngpus = "all"', "defaults.gpus", "'all'", '"share"'),
    ("srun", GOOD.replace('"python"', '"srun"'), "", "command", "srun", "torchrun"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "lines", "key", "got", "accepted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_is_wrong_is_refused_by_name(base, lines, key, got, accepted):
    with pytest.raises(ConfigError) as caught:
        search(lines, base=base)
    assert (caught.value.where, caught.value.key) == ("search.toml", key)
    assert got in caught.value.got and accepted in caught.value.accepted


def test_a_value_that_no_command_may_have_is_found_before_anything_starts():
    with pytest.raises(ConfigError, match="command"):
        search(
            base=GOOD.replace('"--lr={lr}"', '"{lr}", "{opt}"'), space=SPACE + 'opt = { choice = ["a", ""] }'
        )


def test_without_rungs_a_program_need_not_be_told_a_budget():
    assert search('method = "random"\ntrials = 3', base=GOOD.replace("{budget}", "3")).trials == 3


def test_a_file_for_each_trial_may_be_so_by_the_folder_it_runs_in():
    assert search('result_file = "out.json"\n[defaults]\nworkdir = "{dir}"').result_file == "out.json"


def test_a_program_that_is_refused_again_and_again_ends_the_search():
    driver, feed = Driver(gpus=20), feeder(search("[defaults]\nretries = 0"))
    names = [spec.name for spec in submit(driver, feed)]
    for name in names[:3]:
        assert feed(driver.machine) == []
        driver.now += 1.0
        driver.exits(name, 2, None, None, detail="no such option: --lr")
    assert feed(driver.machine) == []  # others still run that began before
    for name in names[3:]:
        driver.exits(name, 2, None, None, detail="no such option: --lr")
    with pytest.raises(ConfigError, match=r"its program fails in the first \d+ trials: no such option: --lr"):
        feed(driver.machine)


@pytest.mark.parametrize("code", [0, 1])
def test_one_that_runs_in_some_trial_does_not(code):
    driver, feed = Driver(gpus=20), feeder(search("[defaults]\nretries = 0"))
    names = [spec.name for spec in submit(driver, feed)]
    driver.exits(names[0], code, None, None, metrics={"accuracy": 0.5} if code == 0 else {})
    for name in names[1:]:
        driver.exits(name, 2, None, None)
    feed(driver.machine)


def test_what_a_program_tells_itself_is_its_metric_and_its_names_are_said():
    driver, feed = Driver(gpus=20), feeder(search())
    name = submit(driver, feed)[0].name
    driver.exits(name, 0, None, None, metrics={"loss": 0.5})
    with pytest.raises(ConfigError, match="metric: 'accuracy'; accepted: loss"):
        feed(driver.machine)
