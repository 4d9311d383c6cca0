"""A project's settings file that others can write is obeyed only once its user has said so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcsched import config
from hpcsched.cli.main import cli

STRANGER = 54321


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: of this user, with a settings file."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "hpcsched.toml").write_text('[script]\nsetup = ["true"]\n')
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("HPCSCHED_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


def of_a_stranger(*paths: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    for path in paths:
        os.chown(path, STRANGER, -1, follow_symlinks=False)


def obeyed(place: Path) -> bool:
    return "script" in config.load(os.environ, here=place).values


@pytest.mark.parametrize("whose", ["file", "directory", "link", "writable"])
def test_what_others_can_write_is_passed_over_until_it_is_accepted(place: Path, whose: str) -> None:
    file = place / "hpcsched.toml"
    assert obeyed(place)
    if whose == "writable":
        file.chmod(0o666)
    elif whose == "link":
        file.rename(place / "other.toml")
        file.symlink_to("other.toml")
        of_a_stranger(file)
    else:
        of_a_stranger(file if whose == "file" else place)
    assert not obeyed(place)
    run = CliRunner()
    shown = run.invoke(cli, ["config", "show"])
    assert shown.stderr.count("\n") == 1 and "`hpcsched config trust`" in shown.stderr
    assert "is not obeyed" in run.invoke(cli, ["status"]).stderr
    told = run.invoke(cli, ["config", "trust"])
    assert told.exit_code == 0 and "is not obeyed" not in told.stderr
    assert obeyed(place)
    assert run.invoke(cli, ["config", "show"]).stderr == ""
    with file.open("a") as more:
        more.write("# changed\n")
    assert not obeyed(place)


def test_a_strangers_pipe_or_unreadable_file_stops_nobody(place: Path) -> None:
    file = place / "hpcsched.toml"
    file.unlink()
    os.mkfifo(file)
    of_a_stranger(file)
    assert not obeyed(place)
    assert isinstance(CliRunner().invoke(cli, ["config", "trust"]).exception, config.ConfigError)


def test_a_file_that_is_named_is_obeyed_whoever_it_belongs_to(place: Path) -> None:
    file = place / "hpcsched.toml"
    of_a_stranger(file, place)
    assert "script" in config.load(os.environ, here=place, config=file).values
