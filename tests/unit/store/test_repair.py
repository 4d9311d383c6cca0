"""`hpcsched journal check|repair`: what is wrong is said; as little is lost as can be, with a copy kept."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.core import events as ev
from hpcsched.core.reasons import Why
from hpcsched.policy import make_policy
from hpcsched.store import journal
from hpcsched.store.journal import Journal
from hpcsched.store.repair import check, repair
from hpcsched.store.replay import replay
from hpcsched.store.rundir import RunDir, RunLock
from hpcsched.testing.builders import Driver, a_job, a_profile


@pytest.fixture
def rundir(tmp_path):
    """A run that was left with two of three jobs done."""
    driver = Driver(a_job("a", "m"), a_job("b", "m"), a_job("c", "m"), profiles=[a_profile("m", [1, 2, 3])])
    driver.runs("a", "b")
    driver.reports("a", 10, rate=2.5)
    driver.exits("a", 0, 100)
    driver.exits("b", 0, 100)
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    write(rundir, driver.events)
    return rundir


def write(rundir, events, **where):
    writer = Journal(rundir.journal, **where)
    writer.append(events)
    writer.close()


def run(rundir, what):
    return CliRunner().invoke(cli, ["journal", what, "--dir", str(rundir.root)], standalone_mode=False)


def states(rundir):
    machine = replay(rundir.journal, make_policy).machine
    return {job.spec.name: str(job.state) for job in machine.run.jobs.values()}


def number_of(rundir, kind):
    numbered = enumerate((event for event, _ in journal.read(rundir.journal)), 1)
    return next(number for number, event in numbered if isinstance(event, kind))


def damage(rundir, record):
    """Flip a bit of a letter in a record; returns the journal as it was."""
    data = rundir.journal.read_bytes()
    lines = data.splitlines(keepends=True)
    line = bytearray(lines[record - 1])
    at = next(i for i in range(len(line) // 2, len(line)) if chr(line[i]).isalpha())
    line[at] ^= 1
    lines[record - 1] = bytes(line)
    rundir.journal.write_bytes(b"".join(lines))
    return data


def test_a_good_journal_is_left_alone(rundir):
    before = rundir.journal.read_bytes()
    assert run(rundir, "check").return_value == 0
    found = run(rundir, "repair")
    assert (found.return_value, found.output) == (0, "nothing is wrong\n")
    assert rundir.journal.read_bytes() == before
    assert not list(rundir.root.glob("*.bak"))


def test_a_damaged_record_in_the_middle_is_voided_and_the_others_stand(rundir):
    before = states(rundir)
    number = number_of(rundir, ev.ProgressObserved)
    was = damage(rundir, number)
    broken = rundir.journal.read_bytes()
    told = run(rundir, "check")
    assert told.return_value == 1
    assert f"record {number}: wrong checksum" in told.output
    mended = run(rundir, "repair")
    assert mended.return_value == 0, mended.output
    assert f"record {number} (ProgressObserved) cannot be read: a void is in its place" in mended.output
    assert states(rundir) == before
    assert (rundir.root / "journal.jsonl.1.bak").read_bytes() == broken != was
    assert run(rundir, "check").return_value == 0
    assert f"count for nothing: {number}" in run(rundir, "check").output


def test_a_damaged_last_record_is_cut(rundir):
    last = replay(rundir.journal, make_policy).records
    damage(rundir, last)
    told = run(rundir, "repair").output
    assert f"record {last} (WorkersExited) cannot be read, and is the last one" in told
    assert replay(rundir.journal, make_policy).records == last - 1
    assert states(rundir)["b"] == "RUNNING"


def test_what_cannot_stand_without_a_lost_record_goes_with_it(rundir):
    """Without the first life nothing after it makes sense."""
    damage(rundir, 1)
    repair(rundir.journal, make_policy)
    assert check(rundir.journal, make_policy).wrong == []


def test_a_record_that_cannot_be_handled_is_voided_and_the_run_goes_on(rundir):
    records = replay(rundir.journal, make_policy)
    write(rundir, [ev.CancelRequested(at=500.0, job_id=77)], length=records.length, records=records.records)
    number = records.records + 1
    before = run(rundir, "check")
    assert before.return_value == 1
    assert f"record {number} (CancelRequested) cannot be handled: KeyError" in before.output
    assert f"voided record {number} (CancelRequested)" in run(rundir, "repair").output
    assert states(rundir) == {"a": "COMPLETED", "b": "COMPLETED", "c": "STARTING"}


def test_a_record_of_a_newer_version_is_never_mended_away(rundir):
    lines = rundir.journal.read_bytes().splitlines(keepends=True)
    number, body = len(lines) + 1, b'{"at":1.0}'
    crc = journal._checksum(number, "WorkersDancing", body)
    head = f'{{"v":1,"seq":{number},"crc":"{crc}","type":"WorkersDancing","event":'
    rundir.journal.write_bytes(b"".join([*lines, head.encode() + body + b"}\n"]))
    before = rundir.journal.read_bytes()
    found = run(rundir, "repair")
    for told in (found, run(rundir, "check")):
        assert "of another hpcsched" in str(told.exception)
        assert "repair" not in str(told.exception)
    assert rundir.journal.read_bytes() == before


def test_nothing_is_mended_while_an_agent_works(rundir):
    damage(rundir, 3)
    lock = RunLock(rundir)
    assert "another agent runs" in str(run(rundir, "repair").exception)
    lock.release()


def test_a_lost_journal_puts_what_is_left_aside(rundir):
    rundir.status.write_text("{}")
    (rundir.root / "jobs" / "1").mkdir()
    rundir.journal.write_bytes(b"")
    assert run(rundir, "check").return_value == 1
    assert "jobs is jobs.1.bak now" in run(rundir, "repair").output
    assert (rundir.root / "jobs.1.bak" / "1").is_dir()
    assert run(rundir, "check").output == "no run has begun here\n"


def test_a_void_ends_the_attempt_whose_news_it_was_and_is_told(rundir):
    driver = Driver(a_job("a", "m", retries=0), profiles=[a_profile("m", [1])])
    driver.runs("a")
    at = driver.machine.run.now
    about = {"job_id": 1, "attempt": 1, "record": 9, "error": "KeyError: 3"}
    driver.handle(ev.EventVoided(at=at, kind="WorkersReady", **about))
    assert driver.machine.run.jobs[1].story[-1].reason.why is Why.VOIDED
    driver.handle(ev.EventVoided(at=at, kind="WorkersExited", ended=True, **about))
    assert driver.machine.run.jobs[1].attempts[0].ended == "lost"


@pytest.mark.parametrize("how", ["doubled", "swapped"])
def test_records_out_of_their_order_are_put_back(rundir, how):
    before, was = states(rundir), rundir.journal.read_bytes()
    lines = was.splitlines(keepends=True)
    lines[2:4] = [lines[3], lines[2]] if how == "swapped" else [lines[2], lines[2], lines[3]]
    rundir.journal.write_bytes(b"".join(lines))
    assert run(rundir, "check").return_value == 1
    assert "record 3 " in run(rundir, "repair").output
    assert rundir.journal.read_bytes() == was
    assert states(rundir) == before


def test_where_nothing_can_be_kept_one_repair_is_enough(rundir):
    rundir.status.write_text("{}")
    rundir.journal.write_text("garbage\n")
    assert "a run can begin here anew" in run(rundir, "repair").output
    assert not rundir.status.exists()
