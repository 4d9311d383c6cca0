"""`hpcsched run`: what it is asked for, and what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from simulatebench import JOBS, make_place, write_set

from hpcsched import config
from hpcsched.agent import start
from hpcsched.agent.request import RunRequest
from hpcsched.cli.main import cli
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.policy import make_policy
from hpcsched.policy.planner.planner import Planner
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job


class Asked(Exception):
    """In place of a run."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def no_run(order: RunRequest, **_: object) -> None:
        raise Asked(order)

    monkeypatch.setattr(start, "run", no_run)
    return make_place(tmp_path, monkeypatch)


def asked(*words: object) -> tuple[str | None, dict[str, object]]:
    """Policy and options of the run that would begin."""
    done = CliRunner().invoke(cli, ["run", *map(str, words)])
    assert isinstance(done.exception, Asked), done.exception or done.output
    order = done.exception.args[0]
    return order.policy, dict(order.policy_options)


def refused(*words: object) -> str:
    done = CliRunner().invoke(cli, ["run", *map(str, words)])
    assert isinstance(done.exception, HpcschedError), done.exception or done.output
    assert done.exception.exit_code == 2 and "\n" not in str(done.exception)
    return str(done.exception)


def keep(driver: Driver) -> None:
    rundir = RunDir(Path("hpcsched-run"))
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append(driver.events)
    journal.close()


def test_a_run_that_goes_on_keeps_its_policy_and_the_options_that_are_not_given() -> None:
    keep(Driver(a_job("a", "m", 10), policy="planner", eps=0.5, goal="makespan"))
    assert asked("--resume") == ("planner", {"eps": 0.5, "goal": "makespan"})
    assert asked("--resume", "--policy-option", "goal=jct") == ("planner", {"eps": 0.5, "goal": "jct"})
    assert asked("jobs.toml", "--resume", "--policy-option", "eps=inf")[1]["eps"] == float("inf")
    assert refused("--resume", "--policy-option", "promote=pays") == (
        "--policy-option: planner.promote: unknown option; accepted: goal, eps, budget, seed"
    )
    assert asked("--resume", "--policy", "marble") == ("marble", {})
    write_set(JOBS, head='[policy]\nname = "planner"\nbudget = 9')
    assert asked("jobs.toml", "--resume", "--policy-option", "eps=1") == ("planner", {"budget": 9, "eps": 1})


def test_an_unlimited_option_comes_back_from_the_journal() -> None:
    keep(Driver(a_job("a", "m", 10), policy="planner", eps=float("inf")))
    name, options = asked("--resume", "--policy-option", "goal=jct")
    made = make_policy(name or "", options)
    assert isinstance(made, Planner) and made.eps == float("inf")


def test_where_a_wrong_policy_or_option_comes_from_is_said(place: Path) -> None:
    assert refused("jobs.toml", "--policy", "plannr").startswith("--policy: 'plannr'; accepted: marble")
    assert refused("jobs.toml", "--policy", "planner", "--policy-option", "eps=-1").startswith(
        "--policy-option: eps: -1; accepted:"
    )
    (place / "hpcsched.toml").write_text('policy = "planner"\npolicy_option = { eps = -1 }\n')
    assert refused("jobs.toml").endswith(
        "hpcsched.toml: policy_option: eps: -1; accepted: a number of at least 0, or inf"
    )
    (place / "hpcsched.toml").write_text('policy = "plannr"\n')
    assert "hpcsched.toml: policy: 'plannr'" in refused("jobs.toml")
    (place / "hpcsched.toml").unlink()
    write_set(JOBS, head='[policy]\nname = "plannr"')
    assert refused("jobs.toml", "--policy", "marble").startswith("jobs.toml: policy: 'plannr'")
    write_set(JOBS, head='[policy]\nname = "planner"\neps = -1')
    assert refused("jobs.toml").startswith("jobs.toml: policy: eps: -1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--policy", "marble", "--policy", "planner"), "--policy: 'marble' and 'planner'; accepted: one"),
        (
            ("--policy-option", "promote=pays", "--policy-option", "promote=never"),
            "--policy-option: promote: pays and never; accepted: one value",
        ),
        (("--compare", "foo"), "--compare: 'foo'; accepted: marble, exclusive"),
        (("--compare", "marble,foo"), "--compare: 'foo'"),
        (("--gantt", "/nodir/x.svg"), "--gantt: no folder /nodir"),
        (("--gantt", "."), "--gantt: .: a folder"),
    ],
)
def test_what_could_only_fail_at_the_end_fails_at_once(words: tuple[str, ...], says: str) -> None:
    assert refused("jobs.toml", *words).startswith(says)


def test_policies_to_compare_with_come_with_commas_or_one_by_one() -> None:
    assert asked("jobs.toml", "--compare", "exclusive,planner", "--compare", "marble") == (None, {})


def test_what_is_wrong_with_a_job_is_said_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(order: RunRequest, **_: object) -> None:
        raise ConfigError(where="job one", key="model", got="no profile of 'a'", accepted="b")

    monkeypatch.setattr(start, "run", run)
    assert refused("jobs.toml") == "jobs.toml: job one.model: no profile of 'a'; accepted: b"


def test_help_names_all_policies() -> None:
    for command in ("run", "simulate"):
        text = " ".join(CliRunner().invoke(cli, [command, "--help"]).output.split())
        assert "marble (default), exclusive, planner, equal, optimus" in text


def test_locked_checkpoints_without_a_value_stop_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    monkeypatch.setattr(config, "SITE_FILES", (site,))
    site.write_text('locked = ["checkpoints"]\n')
    asked("jobs.toml")
    assert "has locked checkpoints" in refused("jobs.toml", "--checkpoints", "elsewhere")
    site.write_text('[limits]\ncheckpoints = { below = ["/scratch"] }\n')
    assert "checkpoints in --dir" in refused("jobs.toml")
