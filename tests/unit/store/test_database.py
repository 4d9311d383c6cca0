"""The database: what goes in comes out, the schema moves up and down, and bad files are one line."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.core.profile import Profile
from hpcsched.core.shared_use import SharedUse
from hpcsched.errors import HpcschedError, StoreError
from hpcsched.store import database
from hpcsched.store.allocations import AllocationEntry, allocations, record_allocation
from hpcsched.store.database import HEAD, REVISIONS, Database, FinishedJob, RunEntry, TrialEntry, iso
from hpcsched.store.models import Base, HistoryRow
from hpcsched.store.profiles import RateSample

PROFILE = Profile(
    model="m", device="d", throughput={1: 1.5, 2: 2.5}, start_s={1: 3.0}, spread={1: 0.01}, global_batch=32
)
SAMPLES = (
    RateSample(gpus=1, rate=1.4, seconds=5.0, at="t0"),
    RateSample(gpus=2, rate=2.5, seconds=5.1, at="t1"),
)
RUN = RunEntry(
    run_id="r1", directory="/d", host="n1", policy="marble", gpus=6, started_at="2026-01-01T00:00:00.000Z"
)
JOB = FinishedJob(
    run_id="r1",
    job_id=1,
    name="a",
    model="m",
    state="COMPLETED",
    exit=0,
    submit_s=0.0,
    start_s=1.0,
    end_s=60.0,
    submit_at="2026-01-01T00:00:00.000Z",
    start_at="2026-01-01T00:00:01.000Z",
    end_at="2026-01-01T00:01:00.000Z",
    gpu_hours=0.05,
    steps=100,
    steps_repeated=None,
    suspensions=0,
    gpus_max=3,
    max_rss_bytes=3 * 2**40,
    attempts=[{"start_s": 1.0, "end_s": 60.0, "gpus": [0, 1, 2], "role": "primary", "ended": "completed"}],
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "h #1?.db"


@pytest.fixture
def db(path: Path) -> Iterator[Database]:
    with Database(path) as opened:
        yield opened


def day(n: int) -> datetime:
    return datetime(2026, 1, n, tzinfo=UTC)


def test_only_the_owner_can_read_it_and_it_is_not_wal(db: Database, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    db.record_profile(PROFILE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_profile_comes_back_with_its_samples(db: Database) -> None:
    db.record_profile(PROFILE, SAMPLES)
    assert db.profiles() == (PROFILE,) and db.profiles("m") == (PROFILE,) and db.profiles("n") == ()
    assert db.samples(PROFILE) == SAMPLES and db.samples(replace(PROFILE, device="e")) == ()


def test_a_profile_measured_again_replaces_the_old_one_and_its_samples(db: Database) -> None:
    db.record_profile(PROFILE, SAMPLES)
    again = replace(PROFILE, throughput={1: 9.0}, source="learned")
    db.record_profile(again, SAMPLES[:1])
    assert db.profiles() == (again,) and db.samples(again) == SAMPLES[:1]


@pytest.mark.parametrize("other", [{"device": "e"}, {"nodes": 2}, {"global_batch": None}, {"software": "s"}])
def test_profiles_that_differ_in_the_key_stand_side_by_side(db: Database, other: dict[str, object]) -> None:
    newer = replace(PROFILE, **other)  # type: ignore[arg-type]
    db.record_profile(newer, at=day(2))
    db.record_profile(PROFILE, at=day(1))
    db.record_profile(PROFILE, at=day(1))
    assert db.profiles() == (newer, PROFILE)


def test_several_profiles_are_recorded_together_or_not_at_all(db: Database) -> None:
    def failing() -> Iterator[Profile]:
        yield PROFILE
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        db.record_profiles(failing())
    assert db.profiles() == ()
    db.record_profiles([replace(PROFILE, model=name) for name in "cab"])
    assert [p.model for p in db.profiles()] == ["c", "a", "b"]


def test_history_is_kept_once_in_the_order_of_ending(db: Database) -> None:
    late = replace(JOB, job_id=2, name="b", start_s=None, start_at=None, exit=None, end_at=iso(day(3)))
    db.record_run(RUN)
    for _ in range(2):
        db.record_jobs([late, JOB])
    assert db.history() == (JOB, late) and db.history(last=1) == (late,)
    assert db.history(run_id="r2") == ()
    ended = replace(RUN, ended_at=iso(day(3)))
    db.record_run(ended)
    assert db.runs() == (ended,) and len(db.history(run_id="r1")) == 2


def test_a_job_belongs_to_a_recorded_run(db: Database) -> None:
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        db.record_jobs([JOB])


def test_the_trials_of_a_search_replace_what_was_known_of_it(db: Database) -> None:
    db.record_run(RUN)
    trial = TrialEntry(
        run_id="r1",
        trial=3,
        bracket=2,
        args={"lr": 0.1, "opt": "adam"},
        unit="epochs",
        budget=9.0,
        metric="accuracy",
        value=None,
        state="failed",
        best=False,
        job="t0003-b2-r0",
    )
    first = replace(trial, trial=1, value=0.9, best=True, checkpoint="/somewhere/step-1.pt")
    db.record_trials("r1", [trial])
    db.record_trials("r1", [trial, first])
    assert db.trials(run_id="r1") == db.trials() == (first, trial)
    assert db.trials(run_id="other") == ()


# The schema


def scripts() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(database.__file__).with_name("migrations")))
    return config


def test_what_was_seen_of_models_that_share_a_device_is_renewed(path: Path) -> None:
    alone = SharedUse(models=("a",), memory_mib=1000.0, busy=0.5)
    both = SharedUse(models=("a", "b b"), together=1.5)
    with Database(path) as db:
        db.record_shared("H100", [alone, both])
        db.record_shared("H100", [replace(both, together=None)])
        db.record_shared("A100", [both])
        assert db.shared("H100") == (alone, replace(both, together=None))
        assert db.shared("A100") == (both,)
        assert db.shared("V100") == ()


def test_the_known_revisions_are_the_shipped_ones() -> None:
    directory = ScriptDirectory.from_config(scripts())
    assert directory.get_current_head() == HEAD
    assert tuple(r.revision for r in reversed(list(directory.walk_revisions()))) == REVISIONS


def test_the_models_and_the_migrations_agree(db: Database) -> None:
    with db.transaction() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


@pytest.mark.parametrize("revision", ["base", *REVISIONS[:-1]])
def test_the_schema_goes_down_and_up_again(path: Path, revision: str) -> None:
    with Database(path) as db, db.transaction(write=True) as connection:
        config = scripts()
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    with Database(path) as db:
        assert db._revision() == HEAD
        db.record_profile(PROFILE)
        assert db.profiles() == (PROFILE,)


def test_profiles_of_an_earlier_schema_stay_and_newer_costs_can_be_kept(path: Path) -> None:
    with Database(path) as db:
        db.record_profile(PROFILE)
        with db.transaction(write=True) as connection:
            config = scripts()
            config.attributes["connection"] = connection
            command.downgrade(config, "0001")
        assert db._revision() == "0001"
    in_place = replace(PROFILE, device="e", grow_s={2: 0.04}, shrink_s=0.02)
    with Database(path) as db:
        assert db._revision() == HEAD != "0001"
        db.record_profile(in_place)
        assert set(map(str, db.profiles())) == {str(PROFILE), str(in_place)}


def test_jobs_of_an_earlier_schema_stay_and_have_no_memory(db: Database) -> None:
    db.record_run(RUN)
    db.record_jobs([JOB])
    with db.transaction(write=True) as connection:
        config = scripts()
        config.attributes["connection"] = connection
        command.downgrade(config, "0006")
    with Database(db.path) as again:
        assert again.history() == (replace(JOB, max_rss_bytes=None),)


# Files that are not what they should be


def refused(path: Path, match: str) -> None:
    with pytest.raises(StoreError, match=match) as error:
        Database(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_newer_schema_is_refused(db: Database, path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    refused(path, "newer hpcsched .schema 9999, known up to")


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("these are my notes, not a database\n" * 100)
    refused(text, "not a database")
    assert text.read_text().startswith("these are my notes")
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()
    refused(other, "something else")
    refused(tmp_path, "unable to open")


def test_a_damaged_file_is_refused(db: Database, path: Path) -> None:
    db.record_profiles([replace(PROFILE, model=f"{i}", note="x" * 500) for i in range(100)])
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(b ^ 0xFF for b in content[4096:])
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"), Database(path) as damaged:
        damaged.profiles()


@pytest.mark.parametrize(
    "value", ["\x1b]0;x\x07", "[[[", "[" * 5000, b"\xff\xfe", '{"model": 1}', "{}", "NaN", -1]
)
def test_what_a_member_of_the_group_has_put_into_it_is_refused(
    db: Database, path: Path, value: object
) -> None:
    """A database that a group shares is data of others."""
    db.record_profile(PROFILE, SAMPLES)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE profile SET document = ?", (value,))
    other.close()
    for words in (["list"], ["export", "m"]):
        said = CliRunner().invoke(cli, ["profile", *words, "--database", str(path)])
        assert said.exit_code in (1, 2) and isinstance(said.exception, (SystemExit, HpcschedError))
        assert "\x1b" not in said.output and "Traceback" not in said.output
        told = said.stderr or str(said.exception)
        assert told.rstrip("\n").count("\n") == 0 and told


@pytest.mark.long
@pytest.mark.parametrize("value", ["\x1b]0;x\x07", "x" * 5000, b"\xff\xfe", -1, 1e308, None])
def test_rows_that_a_member_has_put_in_are_refused_or_shown_as_they_are(
    db: Database, path: Path, value: object
) -> None:
    db.record_run(RUN)
    db.record_jobs([JOB])
    names = [column.name for column in HistoryRow.__table__.columns]
    refused = 0
    for name in (name for name in names if name not in ("run_id", "job_id")):
        with sqlite3.connect(path) as other, contextlib.suppress(sqlite3.IntegrityError):
            old = other.execute(f"SELECT {name} FROM history").fetchone()
            other.execute(f"UPDATE history SET {name} = ?", (value,))
        other.close()
        said = CliRunner().invoke(cli, ["history", "--all", "--database", str(path)])
        assert "\x1b" not in said.output and isinstance(said.exception, (type(None), SystemExit, StoreError))
        refused += said.exit_code != 0
        with sqlite3.connect(path) as other:
            other.execute(f"UPDATE history SET {name} = ?", old)
        other.close()
    assert refused > 8 or value in (-1, 1e308, None)


def test_a_schema_of_others_is_not_trusted(db: Database) -> None:
    with db.transaction() as connection:
        assert connection.execute(sa.text("PRAGMA trusted_schema")).scalar() == 0


def test_a_place_where_nothing_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "h.db", "Not a directory")
    refused(Path("/proc/hpcsched/h.db"), "No such file")


def test_a_full_disk_and_a_busy_database_are_one_line(db: Database, path: Path) -> None:
    big = replace(PROFILE, note="x" * 100_000)

    @sa.event.listens_for(db._engine, "connect")
    def full(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 20")

    with pytest.raises(StoreError, match="disk is full; make room"):
        db.record_profile(big)
    assert db.profiles() == ()
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with Database(path, busy_s=0) as second, pytest.raises(StoreError, match="locked; another process"):
        second.record_profile(PROFILE)
    writer.close()


def test_a_read_only_database_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database(path) as db:
        db.record_profile(PROFILE)
    connect = sqlite3.connect
    # Root may write anywhere, so the driver is told instead of the file.
    monkeypatch.setattr(
        database.sqlite3,
        "connect",
        lambda p, **kw: connect(
            f"file:{str(p).replace('#', '%23').replace('?', '%3f')}?mode=ro", uri=True, **kw
        ),
    )
    with Database(path) as db:
        assert db.profiles() == (PROFILE,)
        with pytest.raises(StoreError, match="readonly database; make it writable"):
            db.record_profile(PROFILE)


def test_how_long_allocations_waited_is_kept_once_and_read_by_system(db):
    entry = AllocationEntry(
        kind="slurm", cluster="c", job_id="7", started_at="2026-11-28T23:48:00.000Z",
        submitted_at="2026-11-28T23:45:45.000Z", eligible_at="2026-11-28T23:47:46.000Z",
        partition="main", nodes=2, gpus=6, limit_s=1200.0,
    )  # fmt: skip
    later = replace(entry, started_at="2026-11-29T00:48:00.000Z")
    for one in (entry, entry, later, replace(entry, kind="lsf")):
        record_allocation(db, one)
    assert allocations(db, "slurm") == (later, entry)
    assert entry.waited_s == 14.0
