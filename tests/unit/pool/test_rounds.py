"""Rounds of a pool over a batch system that is played: nothing is forgotten or asked for twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcsched.batch.base import BatchJobState
from hpcsched.batch.queue import Planned, Shape
from hpcsched.batch.slurm_submissions import rows_in
from hpcsched.batch.submissions import Submitted
from hpcsched.errors import BatchError
from hpcsched.pool import rounds as module
from hpcsched.pool.deciding import Work
from hpcsched.pool.foresight import Rest
from hpcsched.pool.observing import Seen
from hpcsched.pool.poolfile import Pool, Template
from hpcsched.pool.record import PoolBusy, PoolFiles, State, Wanted
from hpcsched.pool.rounds import Rounds
from hpcsched.testing.builders import a_job, a_profile


class Cluster:
    """A batch system: jobs by name, and what goes wrong."""

    kind = "slurm"

    def __init__(self) -> None:
        self.jobs: dict[str, Submitted] = {}
        self.wrong: BatchError | None = None
        self.dies_after_submit = False
        self.silent = False
        self.cancelled: list[str] = []
        self.tried = 0

    def submit(self, script: str) -> str:
        self.tried += 1
        if self.wrong:
            raise self.wrong
        number = str(len(self.jobs) + 1)
        self.jobs[script] = Submitted(job_id=number, name=script, state=BatchJobState.PENDING, word="PENDING")
        if self.dies_after_submit:
            raise KeyboardInterrupt
        return number

    def found(self, names: Sequence[str]) -> tuple[Submitted, ...]:
        if self.silent:
            raise BatchError("squeue did not answer within 15 s")
        return tuple(job for name, job in self.jobs.items() if name in names)

    def accounted(self, job_id: str, name: str) -> None:
        return None

    def cancel(self, job_ids: Sequence[str]) -> None:
        self.cancelled += job_ids

    def planned(self, shape: Shape, options: Sequence[str] = ()) -> Planned:
        return Planned(start=0.0)

    def set(self, name: str, state: BatchJobState, word: str, **about: float) -> None:
        self.jobs[name] = replace(self.jobs[name], state=state, word=word, **about)


class Played:
    """A pool, its cluster, its run and the clock."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = Pool(
            dir=root,
            templates=(Template(name="t", gpus_per_node=2),),
            max_allocations=3,
            max_gpus=6,
            gpu_hours=20.0,
            failures=3,
        )
        self.cluster, self.files = Cluster(), PoolFiles(root)
        self.work, self.clock, self.told = Work(waiting=2, wanted_gpus=2), 1000.0, []
        self.about: dict[str, Any] = {}
        monkeypatch.setattr(module, "look", lambda *_: Seen(work=self.work, **self.about))

    def seen(self, work: Work, **about: Any) -> None:
        """What the run is seen to do, and its hosts."""
        self.work, self.about = work, about

    def round(self, *, dry: bool = False):
        rounds = Rounds(
            self.pool,
            self.cluster,
            self.cluster,  # type: ignore[arg-type]
            script_of=lambda template, name: name,
            profiles_of=lambda models: (),
            tell=self.told.append,
            now=lambda: self.clock,
        )
        return rounds.once(dry=dry)

    @property
    def record(self):
        record = self.files.read()
        assert record is not None
        return record


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_allocations_are_asked_for_and_given_up_and_all_is_charged(played: Played) -> None:
    played.seen(Work(waiting=4, wanted_gpus=4))
    played.round()
    first, second = played.record.allocations
    assert (first.job_id, first.state, second.job_id) == ("1", State.WAITING, "2")
    played.round()
    assert len(played.record.allocations) == 2, "four GPUs are needed, and asked for"
    played.cluster.set(first.name, BatchJobState.RUNNING, "RUNNING", start=1000.0)
    played.clock = 1100.0
    played.seen(Work(waiting=3, running=2, leads=True, wanted_gpus=3), leader="1", own=1)
    played.round()
    assert len(played.record.allocations) == 3
    played.clock = 2800.0
    played.seen(Work())
    played.cluster.set(first.name, BatchJobState.ENDED, "COMPLETED", start=1000.0, end=2800.0)
    played.round()
    assert played.record.used_gpu_s(played.clock) == 2 * 1800.0
    assert played.cluster.cancelled == ["2", "3"], "what still waits is not needed any more"


@pytest.mark.parametrize(
    ("seen", "held_s", "asked"),
    [
        ({}, 10.0, 0),  # two have just started: one is about to lead, the other to join
        ({"leader": "1", "own": 1}, 10.0, 0),  # the second is about to join
        ({"leader": "1", "own": 1, "joined": 1}, 10.0, 1),
        ({"leader": "2", "joined": 2}, 10.0, 1),  # whoever leads
        ({"leader": "another", "own": 1, "joined": 2}, 10.0, 1),
        ({"leader": "another", "own": 1, "joined": 1}, 10.0, 0),
        ({"leader": "1", "own": 1}, 500.0, 1),  # its hosts have not come, or have left
    ],
)
def test_what_is_about_to_join_counts_as_there(
    played: Played, seen: dict[str, Any], held_s: float, asked: int
) -> None:
    played.seen(Work(waiting=4, wanted_gpus=4))
    played.round()
    for one in played.record.allocations:
        played.cluster.set(one.name, BatchJobState.RUNNING, "RUNNING", start=played.clock)
    played.clock += held_s
    played.seen(Work(waiting=2, running=2, leads=bool(seen), wanted_gpus=2), **seen)
    played.round()
    assert len(played.record.allocations) == 2 + asked


def test_what_was_submitted_before_a_crash_is_found_again(played: Played) -> None:
    played.cluster.dies_after_submit = True
    with pytest.raises(KeyboardInterrupt):
        played.round()
    (one,) = played.record.allocations
    assert one.state is State.ASKED and not one.job_id
    played.cluster.dies_after_submit = False
    played.round()
    (one,) = played.record.allocations
    assert (one.state, one.job_id) == (State.WAITING, "1") and played.cluster.tried == 1


def test_what_never_came_into_the_queue_is_given_up_after_a_while(played: Played) -> None:
    played.cluster.wrong = BatchError("sbatch did not answer within 15 s")
    played.round()
    played.clock += 60.0
    played.round()
    assert played.record.allocations[0].state is State.ASKED and played.cluster.tried == 1
    played.cluster.wrong = None
    played.clock += 70.0
    played.round()
    assert [one.state for one in played.record.allocations] == [State.FAILED, State.WAITING]


@pytest.mark.long
def test_failures_are_said_once_backed_off_and_then_no_more(played: Played) -> None:
    played.cluster.wrong = BatchError("sbatch failed: denied")
    for _ in range(1000):
        played.round()
        played.clock += 10.0
    assert played.cluster.tried == 3
    assert played.told == ["t: sbatch failed: denied", "t: sbatch failed: denied: set aside after 3 failures"]
    assert played.record.words[0].startswith("t: set aside after 3 failures")


def test_one_that_lasts_ends_no_failures_that_came_after_it_began(played: Played) -> None:
    played.round()
    (first,) = played.record.allocations
    played.cluster.set(first.name, BatchJobState.RUNNING, "RUNNING", start=played.clock)
    played.seen(Work(waiting=2, running=2, leads=True, wanted_gpus=2), leader="1", own=1)
    played.clock += 300.0
    for count in (1, 2, 3):
        played.round()
        new = played.record.allocations[-1]
        ends = {"start": played.clock, "end": played.clock + 2.0}
        played.cluster.set(new.name, BatchJobState.ENDED, "FAILED", **ends)
        played.clock += 10.0
        played.round()
        assert played.record.troubles["t"].count == count
        played.clock += 1000.0
    played.round()
    assert "set aside after 3 failures" in played.record.words[0]


@pytest.mark.parametrize(
    ("word", "about", "why"),
    [
        ("CANCELLED", {}, "ended without having started: CANCELLED"),
        ("FAILED", {"start": 1010.0, "end": 1013.0}, "ended after 3 s: FAILED: no module named x"),
    ],
)
def test_an_allocation_that_never_starts_or_ends_at_once_has_failed(
    played: Played, word: str, about: dict[str, float], why: str
) -> None:
    played.round()
    (one,) = played.record.allocations
    output = "hello\nhpcsched: no module named x\nJOBID  NAME\n"
    (played.files.output / f"{one.name}-1.out").write_text(output if about else "")
    played.cluster.set(one.name, BatchJobState.ENDED, word, **about)
    played.clock += 20.0
    played.round()
    (one,) = played.record.allocations
    assert one.state is State.FAILED and one.note == why
    assert played.record.troubles["t"].count == 1


def test_without_an_answer_of_the_queue_nothing_is_asked_for(played: Played) -> None:
    played.round()
    played.cluster.silent = True
    played.work = Work(waiting=3, running=1, leads=True, wanted_gpus=4)
    played.round()
    assert played.cluster.tried == 1 and "queue is not known" in played.record.words[0]


def test_a_dry_run_writes_and_submits_nothing(played: Played) -> None:
    decision = played.round(dry=True).decisions[0]
    assert decision.template is not None
    assert played.cluster.tried == 0 and played.files.read() is None


def test_a_paused_pool_asks_for_nothing_and_one_process_looks_after_it(played: Played) -> None:
    played.files.want(Wanted.PAUSE)
    played.round()
    assert played.cluster.tried == 0 and played.record.words == ["paused"]
    with played.files.locked(), pytest.raises(PoolBusy, match="another process"), played.files.locked():
        pass


def test_lines_of_squeue_are_read_and_odd_ones_left_out() -> None:
    text = "12|pool-a-1|RUNNING|2026-11-29T01:00:00|2026-11-29T02:00:00|None\nx|y\n"
    text += "13|p|PENDING|N/A|N/A|Resources"
    running, waiting = rows_in(text)
    assert (
        running.state is BatchJobState.RUNNING and running.end == running.start + 3600 and not running.reason
    )
    assert waiting.start is None and waiting.reason == "Resources"


def test_jobs_of_several_hosts_have_several_allocations_asked_for(played: Played) -> None:
    profile = a_profile("m", [1.0], start_s=0.0, suspend_s=0.0, resume_s=0.0)
    rest = Rest(jobs=[a_job("wide", "m", 9000, gpus=(1, 1), nodes=2)], profiles=[profile])
    played.seen(Work(waiting=1, wanted_gpus=2), rest=rest)
    first, second, nothing = played.round().decisions
    assert first.why[0].startswith("no agent leads the run, and 1 job waits, for not all of which")
    assert second.template is not None and "instead of never" in second.why[0]
    assert nothing.template is None
