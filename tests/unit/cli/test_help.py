"""Help that helps: groups, examples that parse, guesses, completion."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from rundirs import a_home, a_run

from hpcsched.cli import examples, option_groups
from hpcsched.cli.main import cli


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


ALL = dict(commands(cli))


def test_every_command_has_examples_and_there_are_no_others() -> None:
    assert set(examples.EXAMPLES) == set(ALL)


@pytest.mark.parametrize("path", ALL)
def test_examples_parse(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_home(tmp_path, monkeypatch)
    for line in examples.EXAMPLES[path]:
        words = shlex.split(line.removeprefix('eval "$(').removesuffix(')"'))
        assert words[:2] == ["hpcsched", path.split()[0]]
        command: click.Command = cli
        # With the group's names of --help: a command keeps the option that it made first.
        context, rest = click.Context(cli, **cli.context_settings), words[1:]
        while isinstance(command, click.Group):
            command = command.get_command(context, rest.pop(0))  # type: ignore[assignment]
        command.make_context(" ".join(words), rest, parent=context)
    help_ = CliRunner().invoke(cli, [*path.split(), "--help"], terminal_width=100)
    assert f"Examples:\n    {examples.EXAMPLES[path][0]}\n" in help_.output


def test_commands_stand_in_groups() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output
    heads = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Options", "Run", "Look", "Jobs", "Measure and plan", "Site"]
    assert all(f"\n  {name} " in shown for name in cli.list_commands(click.Context(cli)))


def test_options_stand_in_groups() -> None:
    known = {parameter.name for name in ("run", "tune") for parameter in ALL[name].params}
    assert known >= {name for names in option_groups.RUN.values() for name in names}
    for name in ("run", "tune"):
        shown = CliRunner().invoke(cli, [name, "--help"], terminal_width=80).output
        for parameter in ALL[name].params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[0] in shown
        assert "\nBatch job:\n" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stat"], "did you mean 'status'"),
        (["submit", "bad.toml"], "unknown key; did you mean 'command'?"),
        (["status", "tarin"], "did you mean 'train'?"),
    ],
)
def test_what_is_nearly_right_gets_a_guess(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = a_home(tmp_path, monkeypatch)
    (home / "bad.toml").write_text('schema = 1\n[[job]]\nname = "a"\ncomand = ["x"]\n')
    CliRunner().invoke(cli, ["submit", "--name", "train", "--", "true"], standalone_mode=False)
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    told = getattr(done.exception, "message", None) or str(done.exception)
    assert says.lower() in told.lower()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_shells_get_their_completion(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0 and "_HPCSCHED_COMPLETE" in done.output


def test_jobs_policies_and_commands_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = a_home(tmp_path, monkeypatch)
    a_run(home / "hpcsched-run")
    a_run(home / "other", jobs=())
    shell = ShellComplete(cli, {}, "hpcsched", "_HPCSCHED_COMPLETE")

    def offered(words: list[str], begun: str) -> list[str]:
        return [item.value for item in shell.get_completions(words, begun)]

    assert offered([], "sta") == ["status"]
    assert offered(["cancel"], "job") == ["job-1", "job-2", "job-3"]
    assert offered(["cancel"], "job-1,job-2") == ["job-1,job-2"]
    assert offered(["cancel", "--dir", "other"], "job") == []
    assert offered(["--dir", "none", "logs"], "") == []
    assert "planner" in offered(["run", "--policy"], "pl")
    assert offered(["simulate", "--policy"], "marble,pla") == ["marble,planner"]
