"""The options of `run` that another agent of the run gets."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.cli.run.handed_on import words_of


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is handed on of each call of `run`, which does nothing else."""
    told: list[tuple[str, ...]] = []
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None

    @click.pass_context
    def keep(ctx: click.Context, **given: object) -> None:
        told.append(words_of(ctx))

    monkeypatch.setattr(command, "callback", keep)
    return told


def call(*words: str, env: dict[str, str] | None = None) -> None:
    result = CliRunner().invoke(cli, ["run", *words], env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_what_is_about_the_run_is_handed_on_and_what_is_about_one_allocation_is_not(
    told: list[tuple[str, ...]],
) -> None:
    call("jobs.toml", "--joinable", "--margin", "90", "--grace=7", "--policy", "planner")
    assert set(told[0]) == {"--joinable", "--margin=90", "--grace=7"}
    call("jobs.toml", "--hosts", "a,b", "--launcher", "local", "--requeue", "--devices", "cpu:2", "--resume")
    assert told[1] == ()


def test_variables_count_as_options(told: list[tuple[str, ...]]) -> None:
    call("jobs.toml", env={"HPCSCHED_MARGIN": "75"})
    assert told == [("--margin=75",)]


def test_files_are_named_as_they_are_found_from_anywhere(
    told: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text("")
    call("jobs.toml", "--profiles", "p.toml", "--profiles", "marble-summit")
    assert told == [(f"--profiles={tmp_path / 'p.toml'}", "--profiles=marble-summit")]
    call("jobs.toml", "--checkpoints", "to-come", "--metrics-file", "m.prom")
    assert set(told[1]) == {f"--checkpoints={tmp_path / 'to-come'}", f"--metrics-file={tmp_path / 'm.prom'}"}
