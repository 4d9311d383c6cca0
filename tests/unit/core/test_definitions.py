"""How two definitions of a job of one name differ, in the words of a job file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcsched.core.definitions import differing, was_unsaid
from hpcsched.core.model import AUTO, PER_GPU, Array, JobSpec, Kind, Restart
from hpcsched.testing.builders import a_job


def command(**rest: Any) -> JobSpec:
    return a_job("x", "m", kind=Kind.COMMAND, command=("train",), **rest)


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [(1, 2, ("processes",)), (PER_GPU, AUTO, ("processes",)), ("one", 1, ()), (3, 3, ())],
)
def test_of_a_command_it_counts_how_many_processes_it_is(old: Any, new: Any, keys: tuple[str, ...]) -> None:
    assert differing(command(processes=old), command(processes=new)) == keys


def test_of_anything_else_it_does_not() -> None:
    trainer = a_job("x", "m", kind=Kind.TRAINER, trainer="m:T")
    assert differing(replace(trainer, processes=PER_GPU), replace(trainer, processes=AUTO)) == ()


@pytest.mark.parametrize(
    ("old", "new", "unsaid"), [(PER_GPU, AUTO, True), (AUTO, PER_GPU, False), (2, AUTO, False)]
)
def test_what_0_1_0_took_for_granted_was_not_said(old: Any, new: Any, unsaid: bool) -> None:
    assert was_unsaid(command(processes=old), command(processes=new)) is unsaid


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        (None, Restart(), ("restartable",)),
        (Restart(), Restart(signal="SIGUSR1", saved_codes=(3,)), ("saved_exit_codes", "suspend_signal")),
        (Restart(recognised="its script says so"), Restart(), ()),
        (Restart(batch="fixed"), Restart(batch="scales"), ("batch",)),
    ],
)
def test_how_it_saves_by_itself_is_told_key_by_key(old: Any, new: Any, keys: tuple[str, ...]) -> None:
    assert sorted(differing(command(restart=old), command(restart=new))) == list(keys)


def test_a_multiple_is_a_part_of_gpus() -> None:
    assert differing(command(), command(gpus_multiple=2)) == ("gpus",)


def test_a_job_that_is_restartable_by_its_pattern_alone_as_of_0_6_0_is_the_same():
    job = JobSpec(name="a", kind=Kind.COMMAND, model="m", command=("x",), progress_pattern=r"(\d+)")
    assert differing(replace(job, restart=Restart()), job) == ()
    assert differing(replace(job, restart=Restart(signal="SIGUSR1")), job) == ("restartable",)
    assert differing(job, replace(job, restart=Restart())) == ("restartable",)


def test_of_an_array_only_its_limit_is_what_a_user_has_said() -> None:
    one = a_job("a-1", array=Array(name="a", index=1, at_once=2))
    assert differing(one, replace(one, array=Array(name="a", index=7, at_once=2))) == ()
    assert differing(one, replace(one, array=Array(name="a", index=1, at_once=3))) == ("at_once",)
    assert differing(one, replace(one, array=None)) == ("at_once",)
