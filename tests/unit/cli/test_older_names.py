"""Options with an older name: it does the same, and says what to write instead where it is deprecated."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from simulatebench import make_place

from hpcsched.cli.common import Renamed, option
from hpcsched.cli.main import cli


@click.command()
@option("--colours", "colours", older="--colors", multiple=True)
@click.option("--shape", cls=Renamed, older="--form", type=click.IntRange(1))
@option("--size", older="--breadth", alias=True)
def paint(colours: tuple[str, ...], shape: int | None, size: str | None) -> None:
    click.echo(f"{colours} {shape} {size}")


@pytest.mark.parametrize(
    ("words", "variables", "does", "says"),
    [
        ("", {}, "() None None", ""),
        ("--colours a --shape 3 --size b", {"COLORS": "c", "BREADTH": "d"}, "('a',) 3 b", ""),
        ("--colors a --colors b", {}, "('a', 'b') None None", "--colors is deprecated: say --colours"),
        ("--form 3", {}, "() 3 None", "--form is deprecated: say --shape"),
        ("--breadth=4", {"SIZE": "5"}, "() None 4", ""),
        ("", {"BREADTH": "4"}, "() None 4", ""),
        ("", {"COLORS": "a"}, "('a',) None None", "HPCSCHED_COLORS is deprecated: say HPCSCHED_COLOURS"),
        ("", {"COLORS": "a", "COLOURS": "b"}, "('b',) None None", ""),
    ],
)
def test_an_older_name_does_the_same(words: str, variables: dict[str, str], does: str, says: str) -> None:
    done = CliRunner().invoke(paint, words.split(), env={f"HPCSCHED_{k}": v for k, v in variables.items()})
    assert done.stdout == f"{does}\n" and done.stderr == (f"hpcsched: {says}\n" if says else "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--form 0", "Invalid value for '--shape'"),
        ("--form 2 --shape 2", "--form is an older name of --shape: give one"),
        ("--form", "Option '--form' requires an argument"),
    ],
)
def test_what_is_wrong_with_it_is_refused(words: str, says: str) -> None:
    done = CliRunner().invoke(paint, words.split())
    assert done.exit_code == 2 and says in done.stderr


def test_help_has_the_new_names_only() -> None:
    text = CliRunner().invoke(paint, ["--help"]).stdout
    assert "--shape" in text and "--form" not in text and "--breadth" not in text


SET = ("jobs.toml", "--profiles", "p.json")
HINT = "hpcsched: {} means GPUs on each node, not the total: say {}\n"


def call(*words: str, **variables: str) -> Result:
    done = CliRunner().invoke(cli, words, env=variables)
    assert done.exit_code == 0, done.exception
    return done


@pytest.mark.parametrize(
    "command", [("simulate", *SET), ("script", "slurm", "jobs.toml")], ids=lambda c: c[0]
)
def test_gpus_is_an_alias_that_is_explained_on_several_nodes(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_place(tmp_path, monkeypatch)
    names = ("--gpus", "HPCSCHED_GPUS"), ("--gpus-per-node", "HPCSCHED_GPUS_PER_NODE")
    for flags in ((), ("--nodes", "2")):
        (flag, variable), (new_flag, new_variable) = (
            (call(*command, *flags, name, "4"), call(*command, *flags, **{env: "4"})) for name, env in names
        )
        assert flag.stdout and new_flag.stderr == new_variable.stderr == ""
        assert flag.stderr == (HINT.format("--gpus", "--gpus-per-node") if flags else "")
        assert variable.stderr == (HINT.format(names[0][1], names[1][1]) if flags else "")
        if command[0] == "simulate":
            assert flag.stdout == variable.stdout == new_flag.stdout == new_variable.stdout
        else:
            assert all("#SBATCH --gres=gpu:4\n" in done.stdout for done in (flag, variable, new_flag))
            assert "gpus_per_node = 4  (HPCSCHED_GPUS)" in variable.stdout
            assert "gpus_per_node = 4  (HPCSCHED_GPUS_PER_NODE)" in new_variable.stdout


def test_script_takes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_place(tmp_path, monkeypatch)
    (place / "more.toml").write_bytes((place / "jobs.toml").read_bytes())
    sets = ("script", "slurm", "jobs.toml", "more.toml", "--gpus-per-node", "1")
    done = call(*sets, "--at-once", "1")
    assert "#SBATCH --array=0-1%1\n" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("command", "older", "new"),
    [
        (("plan", "burst", "vgg16-a100"), "--svg", "--gantt"),
        (("report",), "--svg", "--figures"),
        (("tune", "search.toml"), "--svg", "--learning-curves"),
    ],
)
def test_older_names_of_figures_are_deprecated(
    command: tuple[str, ...], older: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_place(tmp_path, monkeypatch)
    done = CliRunner().invoke(cli, [*command, older, "no/where/x.svg"])
    assert done.exception and done.stderr == f"hpcsched: {older} is deprecated: say {new}\n"


def test_against_is_deprecated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_place(tmp_path, monkeypatch)
    lines = 'schema = 1|trainer = "a:B"|metric = "m"|mode = "max"|R = 9|[space]|lr = { log = [1e-3, 1.0] }'
    (place / "search.toml").write_text("\n".join(lines.split("|")))
    done = CliRunner().invoke(cli, ["tune", "search.toml", "--packing", "off", "--against", "off"])
    assert done.stderr == "hpcsched: --against is deprecated: say --compare\n"
    assert str(done.exception).startswith("--compare: off; accepted: another packing")
