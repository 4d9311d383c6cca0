"""A machine made again from a checkpoint is the one that went into it, and goes on as that would have."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from impossible import any_policy
from recorded import EVERY, Answering, Recorded, digest, read, sections_of

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms import registry
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.needs import Needs
from hpcsched.policy import POLICIES, make_policy
from hpcsched.store import archive, checkpoint, graph, journal
from hpcsched.store.archive import Mark
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.testing.builders import Driver, a_job, a_profile
from hpcsched.testing.simulation import Rehearsal, Scene

STORED = Path(__file__).parents[2] / "data" / "journals"
GROUPS = sorted(path.stem for path in STORED.glob("*.gz"))


@pytest.fixture(autouse=True)
def impossible_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of some recorded journals is one of the tests."""
    monkeypatch.setattr(graph, "ROOMS", (*graph.ROOMS, "impossible."))


def again(machine: Machine) -> Machine:
    """Through a checkpoint and back, which loses nothing: the same bytes come of what came of them."""
    body = checkpoint.encode(machine, any_policy, ("a",))
    made, commands = checkpoint.decode(body, any_policy)
    assert commands == {"a"} and made is not machine
    assert checkpoint.encode(made, any_policy, ("a",)) == body
    return made


def bytes_of(machine: Machine) -> bytes:
    """All of a state, and which objects in it are one and the same."""
    return checkpoint.encode(machine, any_policy, ())


def goes_on(before: Recorded, places: Sequence[int]) -> str:
    """A journal is replayed, and the machine made again before each of these events: what is another then."""
    one, whole = (Answering(stories=before.stories, plans=before.plans) for _ in range(2))
    for number, (event, expected) in enumerate(zip(before.decoded(), before.answers, strict=True), 1):
        if number in places:
            one.machine = again(one.machine)
        whole.answer(event)
        if one.answer(event) != expected:
            return f"{before.name}: the actions of event {number}"
        if number % EVERY == 0 and digest(sections_of(one.machine)) != before.pictures[str(number)]:
            return f"{before.name}: the state after event {number}"
        if number % EVERY == 0:
            sections_of(whole.machine)  # to look may forget what is known to be over
    if bytes_of(one.machine) != bytes_of(whole.machine) or sections_of(one.machine) != before.sections:
        return f"{before.name}: the last state"
    return ""


def some(group: str, share: int) -> Iterator[Recorded]:
    for number, one in enumerate(read(STORED / f"{group}.gz")):
        if number % share == 0:
            yield one


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_of_each_kind_of_recorded_journal_some_go_on_from_two_places(group: str) -> None:
    random = Random(group)
    found = []
    for one in some(group, 16):
        places = random.choices(range(1, len(one.events) + 1), k=2)
        found += [told] if (told := goes_on(one, places)) else []
    assert not found, "\n".join(found[:20])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_recorded_journals_go_on_from_every_place(group: str) -> None:
    """From one place after the other: what is lost at any of them is lost for all that follow."""
    journals = list(read(STORED / f"{group}.gz"))
    found = [told for one in journals if (told := goes_on(one, range(1, len(one.events) + 1)))]
    assert not found, "\n".join(found[:20])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_recorded_journals_go_on_from_one_place_alone(group: str) -> None:
    random = Random(group)
    found = []
    for one in read(STORED / f"{group}.gz"):
        for place in random.sample(range(1, len(one.events) + 1), min(8, len(one.events))):
            found += [told] if (told := goes_on(one, [place])) else []
    assert not found, "\n".join(found[:20])


@pytest.mark.long
def test_jobs_that_are_over_stay_bytes_until_they_are_asked_for(tmp_path: Path) -> None:
    """And go into the next checkpoint as they are, with those that are over since."""
    Rehearsal(SCENE, tmp_path)
    path = tmp_path / "whole.jsonl"
    whole = replay(path, make_policy)
    early = replay(path, make_policy, before=whole.records * 2 // 3).machine
    over = {job.id for job in early.run.jobs.values() if job.state.final}
    assert 0 < len(over) < len(early.run.jobs)
    keep(path, whole.records * 2 // 3 - 1)
    late = replay(path, make_policy).machine
    assert {kept[0] for kept in late.run.jobs.kept()} == over
    before = {kept[0]: kept for kept in late.run.jobs.kept()}
    body = checkpoint.encode(late, make_policy, (), again=True)
    made, _ = checkpoint.decode(body, make_policy)
    kept_now = {kept[0]: kept for kept in made.run.jobs.kept()}
    assert kept_now.keys() == late.run.jobs.keys() and before.items() <= kept_now.items()
    assert bytes_of_live(made) == bytes_of_live(late) == bytes_of_live(whole.machine)
    made.run.jobs[min(over)].held = True  # one that was looked at is no longer what it was
    changed, _ = checkpoint.decode(checkpoint.encode(made, make_policy, (), again=True), make_policy)
    assert changed.run.jobs[min(over)].held


SCENE = Scene(
    jobs=(
        a_job("a", "short", 200, checkpoint_every_s=13.0),
        a_job("b", "wide", 600, checkpoint_every_s=13.0),
        a_job("c", "short", 300, after=("a",)),
        a_job("d", "wide", 400, gpus=(2, 3), submit_at=60.1),
        a_job("behind", "wide", 60, background=True, gpus=1),
        a_job("part", "short", 50, gpus=1, needs=Needs(share=0.5)),
    ),
    profiles=(
        a_profile(
            "short", [2, 3, 4, 3.5], start_s=5.0, suspend_s=4.0, resume_s=3.0, grow_s=2.0, shrink_s=1.0
        ),
        a_profile("wide", [1, 2, 3, 4, 5], start_s=10.0, suspend_s=8.0, resume_s=6.0),
    ),
    gpus=4,
    commands=(ev.SuspendRequested(at=20.0, job_id=2), ev.ResumeRequested(at=120.0, job_id=2)),
)
OPTIONS: Mapping[str, Mapping[str, Any]] = {"planner": {"budget": 3}}


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_run_under_each_policy_is_the_same_by_a_checkpoint_of_any_place(
    policy: str, tmp_path: Path
) -> None:
    scene = Scene(SCENE.jobs, SCENE.profiles, SCENE.gpus, policy, OPTIONS.get(policy, {}), SCENE.commands)
    Rehearsal(scene, tmp_path)
    path = tmp_path / "whole.jsonl"
    whole = replay(path, make_policy)
    assert whole.machine.run.finished and whole.mark == Mark()
    for records in range(1, whole.records + 1, 7):
        keep(path, records)
        found = replay(path, make_policy)
        assert found.mark.records == records
        assert found[1:4] == whole[1:4]
        assert bytes_of_live(found.machine) == bytes_of_live(whole.machine)


def bytes_of_live(machine: Machine) -> bytes:
    return checkpoint.encode(machine, make_policy, ())


def keep(path: Path, records: int) -> Mark:
    """Write the checkpoint after so many records of a journal."""
    found = replay(path, make_policy, before=records + 1, short_cut=False)
    mark = journal.Contents(path).mark(found.records, found.length)
    archive.make(path)
    body = checkpoint.encode(found.machine, make_policy, found.commands)
    checkpoint.write(archive.folder_of(path) / archive.CHECKPOINT, body, mark)
    return mark


# -- what is no short cut ------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    driver = Driver(a_job("a", "m"), a_job("b", "m"), profiles=[a_profile("m", [1, 2, 3])])
    driver.runs("a", "b")
    driver.reports("a", 10, rate=2.5)
    driver.suspend("a")
    driver.leaves("a", 20)
    driver.exits("b", 1, 5, detail="no such data set")
    path = tmp_path / "journal.jsonl"
    writer = Journal(path)
    writer.append(driver.events)
    writer.close()
    keep(path, len(driver.events) - 2)
    return path


def is_used(path: Path) -> bool:
    """Whether the checkpoint of a journal is gone by; the machine is the same in any case."""
    found, whole = replay(path, make_policy), replay(path, make_policy, short_cut=False)
    assert bytes_of_live(found.machine) == bytes_of_live(whole.machine)
    assert found[1:4] == whole[1:4]
    return found.mark.records > 0


def file_of(path: Path) -> Path:
    return archive.folder_of(path) / archive.CHECKPOINT


def test_a_checkpoint_is_gone_by(path: Path) -> None:
    assert is_used(path)
    assert file_of(path).stat().st_mode & 0o777 == 0o600
    assert file_of(path).parent.stat().st_mode & 0o777 == 0o700


def test_one_of_other_code_is_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "code", lambda: "of tomorrow")
    assert not is_used(path)


@pytest.mark.parametrize("passes", [True, False])
def test_where_the_code_cannot_be_read_it_ends_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    fails, own = [errno.ESTALE] if passes else [errno.ENOENT], checkpoint.code

    def code() -> str:
        if fails:
            raise OSError(fails.pop(), "no code")
        return own()

    monkeypatch.setattr(checkpoint, "code", code)
    assert (checkpoint.read(file_of(path)) is not None) == passes


def test_other_code_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core").mkdir()
    monkeypatch.setattr("hpcsched.__file__", str(tmp_path / "__init__.py"))
    seen = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "core" / "jobs.py").write_text(text)
        checkpoint.code.cache_clear()
        seen.add(checkpoint.code())
    monkeypatch.setattr("hpcsched.__version__", "99.0.0")
    checkpoint.code.cache_clear()
    seen.add(checkpoint.code())
    checkpoint.code.cache_clear()
    assert len(seen) == 3


def test_one_that_is_damaged_anywhere_is_not(path: Path) -> None:
    data = bytearray(file_of(path).read_bytes())
    for at in {*range(0, 80, 3), *range(80, len(data), len(data) // 20)}:
        damaged = data.copy()
        damaged[at] ^= 0x41
        file_of(path).write_bytes(damaged)
        assert replay(path, make_policy).mark == Mark(), at
    for length in (0, 5, 30, len(data) // 2, len(data) - 1):
        file_of(path).write_bytes(data[:length])
        assert not is_used(path), length


def test_one_of_a_journal_with_other_records_is_not(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    seq, event = journal.decode(lines[3])
    lines[3] = journal.encode(seq, ev.TimerFired(at=event.at, key=("term", 9, 9)))
    path.write_bytes(b"".join(lines))
    assert not is_used(path)


def test_one_of_a_journal_that_has_lost_its_end_is_not(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-3]))
    assert not is_used(path)


@pytest.mark.parametrize(("record", "used"), [(4, False), (-3, False), (-2, True)])
def test_one_with_a_record_that_was_voided_later_is_not(path: Path, record: int, used: bool) -> None:
    """`journal repair` voids records of long ago."""
    events = [event for event, _ in journal.read(path)]
    number = record if record > 0 else len(events) + 1 + record
    writer = Journal(path, length=path.stat().st_size, records=len(events))
    at = events[-1].at
    writer.append([ev.EventVoided(at=at, record=number, kind="TimerFired", error="wrong")])
    writer.close()
    keep_before = replay(path, make_policy, short_cut=False)
    found = replay(path, make_policy)
    assert bytes_of_live(found.machine) == bytes_of_live(keep_before.machine)
    assert (found.mark.records > 0) == used


def test_one_that_goes_beyond_what_is_asked_for_is_not(path: Path) -> None:
    records = replay(path, make_policy).records
    assert replay(path, make_policy, before=records).mark.records == records - 2
    early = replay(path, make_policy, before=records - 2)
    assert (early.mark.records, early.records) == (0, records - 3)


def test_what_another_package_adds_is_in_no_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Licences(Mechanism):
        name = "licences"

    machine = replay(path, make_policy).machine
    monkeypatch.setitem(registry._made_by, "licences", Licences)
    with pytest.raises(graph.NotPlain):
        checkpoint.encode(machine, make_policy, ())
    assert checkpoint.read(file_of(path)) is None
