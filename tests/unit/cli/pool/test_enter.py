"""What a pool's batch job does: it leads the run where no agent does, and joins it else."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.cli.pool import enter as module
from hpcsched.cli.pool.scripts import script_of
from hpcsched.errors import NoSuchRun
from hpcsched.pool.poolfile import Pool, Template
from hpcsched.pool.record import PoolFiles, Wanted
from hpcsched.store.rundir import RunDir, RunDirError

NONE = NoSuchRun("no agent has come in time")
OTHER = RunDirError("another agent runs")


class Commands:
    """`run` and `join`, played: what each of their calls comes to, and whether an agent works before it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        RunDir(root).make()
        self.root, self.calls, self.now = root, list[tuple[str, tuple[str, ...]]](), 0.0
        self.outcomes: list[int | Exception] = []
        self.works: list[bool] = []
        monkeypatch.setattr(module, "agent_works", lambda rundir: self.works.pop(0))
        monkeypatch.setattr(module, "_call", self._call)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def _call(self, ctx: object, name: str, words: tuple[str, ...]) -> int:
        self.calls.append((name, words))
        if name == "join":
            self.now += self.lasts_s
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def enter(self, *, works: list[bool], outcomes: list[int | Exception], lasts_s: float = 120.0) -> object:
        """The exit code, or the error that ends the command."""
        self.works, self.outcomes, self.lasts_s = works, outcomes, lasts_s
        words = ["pool", "enter", "--dir", str(self.root), "--", "--margin", "20"]
        result = CliRunner().invoke(cli, words, standalone_mode=False)
        assert not self.outcomes and not self.works
        return result.exception or result.return_value

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path / "run", monkeypatch)


def test_the_first_one_leads_with_the_options_of_the_pool(commands: Commands) -> None:
    assert commands.enter(works=[False], outcomes=[75]) == 0, "the pool sees to what is left"
    where = ("--dir", str(commands.root))
    assert commands.calls == [("run", (*where, "--resume", "--joinable", "--margin", "20"))]


def test_a_failure_is_one(commands: Commands) -> None:
    assert commands.enter(works=[False], outcomes=[1]) == 1


def test_the_others_join(commands: Commands) -> None:
    assert commands.enter(works=[True], outcomes=[0]) == 0
    assert commands.calls == [("join", ("--dir", str(commands.root), "--wait", "120s"))]


def test_of_two_that_start_together_one_joins_the_other(commands: Commands) -> None:
    assert commands.enter(works=[False], outcomes=[OTHER, 0]) == 0
    assert commands.names == ["run", "join"]


def test_one_that_has_joined_leads_when_no_agent_comes_any_more(commands: Commands) -> None:
    assert commands.enter(works=[True, False], outcomes=[NONE, 0]) == 0
    assert commands.names == ["join", "run"]
    again = commands.enter(works=[False, False], outcomes=[OTHER, NONE, 0], lasts_s=3600.0)
    assert again == 0 and commands.names[2:] == ["run", "join", "run"]


def test_what_cannot_be_led_and_has_nobody_to_join_is_said_as_it_is(commands: Commands) -> None:
    assert commands.enter(works=[False], outcomes=[OTHER, NONE]) is OTHER


@pytest.mark.parametrize("wanted", [Wanted.PAUSE, Wanted.STOP])
def test_a_run_that_was_ended_is_not_begun_again(commands: Commands, wanted: Wanted) -> None:
    PoolFiles(commands.root).want(wanted)
    assert commands.enter(works=[True], outcomes=[NONE]) is NONE


def test_the_options_are_in_each_script_as_the_pool_file_has_them(tmp_path: Path) -> None:
    template = Template(name="t", gpus_per_node=2)
    run = {"margin": 90.0, "policy_option": {"share": True}, "profiles": ["a.json", "b.json"]}
    pool = Pool(
        dir=tmp_path,
        templates=(template,),
        max_allocations=3,
        max_gpus=6,
        gpu_hours=20.0,
        idle_s=30.0,
        run=run,
    )
    last = script_of(pool, template, "pool-x-1").splitlines()[-1]
    assert last == (
        f"exec hpcsched pool enter --dir {tmp_path} -- --release-idle-nodes 0.5 --margin 90"
        " --policy-option share=true --profiles a.json --profiles b.json"
    )
