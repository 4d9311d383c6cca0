"""`hpcsched tune`: what it refuses before anything starts, and what it prints of a search."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.cli.run.search_display import SearchDisplay
from hpcsched.cli.run.search_result import _adapter, trial_table
from hpcsched.cli.run.tune import _check_same
from hpcsched.core.events import WorkersExited
from hpcsched.errors import HpcschedError
from hpcsched.report.trials import trials_svg
from hpcsched.store.trials import ProgramTrials
from hpcsched.testing.builders import Driver, a_job
from hpcsched.tuning import TrialOutcome, Tuning, parse_search
from hpcsched.tuning.feeding import Feeder, Trials

SEARCH = """
schema = 1
trainer = "examples.digits:Digits"
metric = "accuracy"
mode = "max"
R = 9
[args]
kind = "mlp"
[space]
lr = { log = [1e-3, 1.0] }
"""


def tune(tmp_path, text, *words):
    file = tmp_path / "search.toml"
    file.write_text(text)
    return CliRunner().invoke(cli, ["tune", str(file), "--dir", str(tmp_path / "run"), *words])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("R = 9", "R = 9\neta = 1", "search.toml: eta: 1; accepted: a number above 1"),
        ("R = 9", "R = 0", "search.toml: R: 0; accepted: the largest budget of one trial"),
        ("R = 9", "R = 9\nlimit = 3", "search.toml: limit: unknown key"),
        ("mode", "direction", "search.toml: direction: unknown key"),
        ("{ log = [1e-3, 1.0] }", "{ log = [0, 1.0] }", "search.toml: space.lr"),
        ("{ log = [1e-3, 1.0] }", "{ gauss = [0, 1.0] }", "search.toml: space.lr"),
        ("R = 9", 'R = 9\npacking = "some"', 'search.toml: packing: \'some\'; accepted: "off", "auto"'),
        ("R = 9", "R = ", "search.toml: not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_search_is_refused_by_name_before_anything_starts(tmp_path, old, new, said):
    result = tune(tmp_path, SEARCH.replace(old, new, 1))
    assert isinstance(result.exception, HpcschedError) and result.exception.exit_code == 2
    assert said in str(result.exception) and "\n" not in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_the_best_adapter_is_where_its_job_has_written_it(tmp_path):
    run = Driver()
    run.submit(a_job("t0"))
    life = SimpleNamespace(machine=run.machine, folders={1: tmp_path})
    assert _adapter(life, "t0") is None
    (tmp_path / "adapter").mkdir()
    assert _adapter(life, "t0") == tmp_path / "adapter"


def test_a_picture_that_cannot_be_drawn_is_refused_first(tmp_path):
    result = tune(tmp_path, SEARCH, "--learning-curves", str(tmp_path / "none" / "x.svg"))
    assert isinstance(result.exception, HpcschedError)
    assert "--learning-curves: no folder" in str(result.exception)


def finished(search, source):
    """A search in which the trial with the largest learning rate is the best, and trial 3 fails."""
    outcomes = {}
    while not source.finished(outcomes):
        for job in source.jobs(outcomes):
            failed = job.trial == 3
            state = "failed" if failed else "completed"
            outcomes.setdefault(
                job.name,
                TrialOutcome(state, {} if failed else {search.metric: job.args["lr"] + job.budget / 1e3}),
            )
    return outcomes


def test_the_table_has_the_best_trials_first_and_what_was_chosen():
    search = parse_search(SEARCH, where="search.toml")
    source = Tuning(search)
    rows = source.trials(finished(search, source))
    lines = trial_table(rows, search).splitlines()
    assert lines[0].split() == ["TRIAL", "BRACKET", "EPOCHS", "ACCURACY", "STATE", "ARGS"]
    values = [float(line.split()[3]) for line in lines[1:11]]
    assert values == sorted(values, reverse=True) and "best" in lines[1]
    assert lines[-1] == f"... and {len(rows) - 10} more"
    assert "kind=" not in "".join(lines), "the same for all: not told"


@pytest.mark.long
def test_the_picture_has_every_training_and_the_best(tmp_path):
    search = parse_search(SEARCH, where="search.toml")
    source = Tuning(search)
    file = tmp_path / "trials.svg"
    trials_svg(source, finished(search, source), file)
    text = "".join(ET.parse(file).getroot().itertext())
    assert "epochs trained" in text and "accuracy" in text and "best:" in text and "bracket 2" in text


def test_progress_is_told_rung_by_rung_and_best_by_best(tmp_path, capsys):
    search = parse_search(SEARCH.replace("R = 9", 'R = 9\nmethod = "halving"\ntrials = 9'), where="s.toml")
    source = Tuning(search)
    driver, feed = Driver(gpus=20), Feeder(source, workdir=tmp_path)
    view = SearchDisplay(driver.machine, source, Trials(), quiet=False)

    def go_on(value):
        new = feed(driver.machine)
        driver.submit(*new) if new else None
        for number, spec in enumerate(new):
            driver.runs(spec.name)
            driver.exits(spec.name, 0, 10, 10, metrics={"accuracy": value + number / 100})
            view.event(next(e for e in reversed(driver.events) if isinstance(e, WorkersExited)), [])

    go_on(0.5)
    go_on(0.7)
    view.close()
    said = capsys.readouterr().err.splitlines()
    assert sum("best so far" in line for line in said) == 9 + 3
    assert any("1 of 3 rungs done, 9 of 13 trainings" in line for line in said)
    assert any("2 of 3 rungs done, 12 of 13 trainings" in line for line in said)


PROGRAM = """
schema = 1
command = ["train", "{lr}", "{budget}"]
metric = "loss"
mode = "min"
R = 9
result = 'lost: (.+)'
[space]
lr = { log = [1e-3, 1.0] }
"""


def test_a_pattern_may_be_mended_until_it_has_found_something_and_a_command_may_not(tmp_path):
    kept = tmp_path / "search.toml"
    kept.write_text(PROGRAM)
    mended = parse_search(PROGRAM.replace("lost", "loss"), where="s.toml")
    _check_same(mended, kept, tmp_path / "s.toml")
    with pytest.raises(HpcschedError, match="command: not what it was"):
        _check_same(replace(mended, command=("eval",)), kept, tmp_path / "s.toml")
    (tmp_path / "jobs/1").mkdir(parents=True)
    (tmp_path / "jobs/1/metric.1.json").touch()
    with pytest.raises(HpcschedError, match="result: not what it was"):
        _check_same(mended, kept, tmp_path / "s.toml")


def test_a_job_without_the_metric_is_told_with_where_it_was_looked_for(tmp_path, capsys):
    search = parse_search(PROGRAM, where="s.toml")
    source, trials, driver = Tuning(search), ProgramTrials(search, tmp_path), Driver(gpus=1)
    driver.submit(a_job("t0000-b2-r0"))
    view = SearchDisplay(driver.machine, source, trials, quiet=False)
    driver.exits("t0000-b2-r0", 0)
    view.event(WorkersExited(at=1.0, job_id=1, attempt=1, code=0), ())
    assert f"t0000-b2-r0 has no metric: {tmp_path}/jobs/1/hpcsched-1.out: No such" in capsys.readouterr().err
