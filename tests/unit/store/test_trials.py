"""What the programs of a search leave, and that a search decides by it as it did before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hpcsched.core.events import JobsSubmitted
from hpcsched.errors import ConfigError
from hpcsched.store import trials as store
from hpcsched.store.trials import ProgramTrials
from hpcsched.testing.builders import Driver, a_job
from hpcsched.tuning import parse_search, source_of
from hpcsched.tuning.feeding import Feeder

SEARCH = """\
schema = 1
command = ["train", "{{lr}}", "{{budget}}", "{{dir}}"]
metric = "loss"
mode = "min"
method = "halving"
trials = 3
R = 3
{result}
[space]
lr = {{ log = [1e-3, 1.0] }}
"""
PRINTED = "result = 'loss: (.+)'"
WRITTEN = 'result_file = "{dir}/out.json"'


class Run:
    """A search in a run directory; `again` is the next agent, which knows the jobs and the files only."""

    def __init__(self, root: Path, result: str) -> None:
        self.root, self.driver = root, Driver(gpus=9)
        self.search = parse_search(SEARCH.format(result=result), where="search.toml")
        self.again()

    def again(self) -> None:
        self.trials = ProgramTrials(self.search, self.root)
        self.feed = Feeder(
            source_of(self.search),
            workdir=self.root,
            trials=self.trials,
            folder_of=self.trials.make_folder,
        )

    def submit(self) -> list[str]:
        new = self.feed(self.driver.machine)
        if new:
            self.driver.tell(JobsSubmitted, first_id=len(self.driver.machine.run.jobs) + 1, jobs=tuple(new))
        return [spec.name for spec in new]

    def ends(self, name: str, text: str) -> None:
        """The job's program completes: it has printed this, or written it into its file."""
        job = self.driver.machine.run.job_of(name)
        assert job is not None
        if self.search.result:
            path = self.root / "jobs" / str(job.id) / f"hpcsched-{job.id}.out"
        else:
            path = Path(job.spec.command[-1]) / "out.json"
        (self.root / "jobs" / str(job.id)).mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.driver.exits(name, 0, None, None)

    def values(self) -> list[float | None]:
        outcomes = self.trials.outcomes(self.driver.machine)
        return [outcome.metrics.get("loss") for outcome in outcomes.values()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("loss: 3\nloss: 1.5\nbye\n", 1.5),
        ("10%\rloss: 2\r", 2.0),
        ("loss: 4   \nhpcsched: ---- attempt 2, loss: 5 ----\nresumed\n", 4.0),
        ("loss: 1" + "\n" + "x" * 2000 + "\xff", 1.0),
    ],
)
def test_the_last_match_in_the_output_is_the_metric(tmp_path, text, value):
    run = Run(tmp_path, PRINTED)
    name = run.submit()[0]
    run.ends(name, text)
    assert run.values() == [value, None, None]


def test_what_is_cut_off_by_the_bound_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_OUTPUT", 20)
    run = Run(tmp_path, PRINTED)
    first, second, _ = run.submit()
    run.ends(first, "valloss: 1\nloss: 22222222222\nnothing\n")  # the bound is within the number's line
    run.ends(second, "loss: 1\n" + "." * 10 + "\n")
    assert run.values()[:2] == [None, 1.0]


@pytest.mark.parametrize(
    ("text", "value", "why"),
    [
        ('{"loss": 0.5, "n": [1]}', 0.5, ""),
        ('{"loss": 3}', 3.0, ""),
        ('{"loss": NaN}', math.nan, ""),
        ('{"loss": null, "x": Infinity}', math.nan, ""),
        ('{"lost": 1}', None, "no 'loss' among 'lost'"),
        ('{"loss": "1"}', None, "a finite number is expected, not text"),
        ('{"loss": true}', None, "not true"),
        ("[1]", None, "an object is expected"),
        ('{"loss": 1', None, "Expecting"),
        ("[" * 99999, None, "within each other"),
    ],
)
def test_the_metric_is_in_the_file(tmp_path, text, value, why):
    run = Run(tmp_path, WRITTEN)
    name = run.submit()[0]
    run.ends(name, text)
    assert run.values()[0] == (value if value is None else pytest.approx(value, nan_ok=True))
    looked = run.trials.missing(name)
    assert (why in looked and f"{tmp_path}/trials/t0000/out.json" in looked) if why else not looked


def test_a_job_without_the_metric_ends_the_search_only_where_none_has_it(tmp_path):
    run = Run(tmp_path, PRINTED)
    first, second, third = run.submit()
    run.ends(first, "accuracy: 3\n")
    with pytest.raises(ConfigError) as caught:
        run.submit()
    assert (
        caught.value.key == "result"
        and f"nothing like 'loss: (.+)' in {tmp_path}/jobs/1/" in caught.value.got
    )
    assert "its last line is 'accuracy: 3'" in caught.value.got
    run.ends(second, "loss: 2\n")
    run.ends(third, "loss: nan\n")
    assert run.submit() == [second.replace("r0", "r1")]
    rows = run.feed.source.trials(run.trials.outcomes(run.driver.machine))
    assert [row.state for row in rows] == ["no metric", "running", "no metric"]


def test_a_pattern_that_found_nothing_is_mended_by_going_on(tmp_path):
    run = Run(tmp_path, "result = 'lost: (.+)'")
    name = run.submit()[0]
    run.ends(name, "loss: 1\n")
    with pytest.raises(ConfigError):
        run.submit()
    assert not run.trials.any_read()
    run.search = parse_search(SEARCH.format(result=PRINTED), where="search.toml")
    run.again()
    assert run.submit() == [] and run.values()[0] == 1.0 and run.trials.any_read()


def test_after_a_crash_a_search_decides_as_before_whatever_a_next_rung_has_written_over(tmp_path):
    run = Run(tmp_path, WRITTEN)
    for name, value in zip(run.submit(), (3, 1, 2), strict=True):
        run.ends(name, json.dumps({"loss": value}))
    (second,) = run.submit()
    run.ends(second, '{"loss": 9}')  # the same file as of its first rung
    before = run.values()
    run.again()
    assert run.values() == before == [3, 1, 2, 9]
    assert run.submit() == [] and run.feed.source.finished(run.trials.outcomes(run.driver.machine))
    best = run.feed.source.best(run.trials.outcomes(run.driver.machine))
    assert (best.job.name, best.metric) == (second.replace("r1", "r0"), 1)


def test_another_s_job_in_the_run_is_none_of_the_search(tmp_path):
    run = Run(tmp_path, PRINTED)
    run.submit()
    run.driver.submit(a_job("t1"))
    run.driver.exits("t1", 0, 10, 10, metrics={"loss": 0.1})
    assert run.values() == [None, None, None, 0.1] and not run.trials.missing("t1")
