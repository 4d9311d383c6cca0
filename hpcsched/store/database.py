"""The SQLite database of one user: measured profiles and the history of finished jobs.

One file, one writer at a time, made for home directories on network filesystems: never WAL, short
transactions, and a wait where another process writes.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError

from hpcsched.core.processes import Program
from hpcsched.core.profile import Profile
from hpcsched.core.shared_use import SharedUse
from hpcsched.errors import StoreError
from hpcsched.store.database_rows import entries
from hpcsched.store.models import (
    HistoryRow,
    LayerProfileRow,
    ParallelProgramRow,
    ProfileRow,
    RunRow,
    SampleRow,
    SharedUseRow,
    TrialRow,
)
from hpcsched.store.profiles import RateSample, parse_profiles, to_json

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
"""The schema revisions that this version knows, oldest first; it works with the last one."""
HEAD = REVISIONS[-1]


def default_path() -> Path:
    """The default path of the database, in the user's data directory (XDG)."""
    import platformdirs

    return Path(platformdirs.user_data_dir("hpcsched")) / "hpcsched.db"


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of the scheduler; times are ISO, UTC; `ended_at` None while it goes on."""

    run_id: str
    directory: str
    host: str
    policy: str
    gpus: int
    allocation: str = ""
    started_at: str
    ended_at: str | None = None


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """A job that has ended, as `history` shows it.

    `_s` are seconds of the run's clock, `_at` the wall time (ISO, UTC); `start_*` is None for a job
    that never started; `steps` are those it has done, None where nothing has told of any, `steps_repeated`
    None for a program that reports no progress. `max_rss_bytes` is the
    most memory that its processes together had resident when they were looked at; None: not measured.
    `attempts` are as in `simulate --json`.
    """

    run_id: str
    job_id: int
    name: str
    model: str
    state: str
    exit: int | None
    submit_s: float
    start_s: float | None
    end_s: float
    submit_at: str
    start_at: str | None
    end_at: str
    gpu_hours: float
    steps: int | None
    steps_repeated: int | None
    suspensions: int
    gpus_max: int
    max_rss_bytes: int | None = None
    attempts: Sequence[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrialEntry:
    """The result of one configuration of a search.

    `value` is that of `metric` after `budget` (epochs or steps, as `unit` says; None: there is none), `job`
    the newest one of the trial, `checkpoint` the file with its state, if that was kept.
    """

    run_id: str
    trial: int
    bracket: int
    args: Mapping[str, Any]
    unit: str
    budget: float
    metric: str
    value: float | None
    state: str
    best: bool
    job: str
    checkpoint: str | None = None


class Database:
    """The database at `path`, made or brought up to date on opening.

    Raises StoreError, one line, where the file is not such a database, is of a newer hpcsched, or
    cannot be read or written. Recording the same thing twice leaves one.
    """

    def __init__(self, path: Path, *, busy_s: float = 20.0) -> None:
        self.path = path
        with self._told():
            _create(path)
            self._engine = _engine(path, busy_s)
            try:
                if self._revision() != HEAD:
                    self._upgrade()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    # Profiles

    def record_profile(
        self, profile: Profile, samples: Iterable[RateSample] = (), *, at: datetime | None = None
    ) -> None:
        """Store a profile with its samples, in place of an earlier one with the same key.

        The key is model, device, nodes, global batch and software. `at` is when it was made (now).
        """
        with self.transaction(write=True) as connection:
            _put(connection, profile, samples, at or datetime.now(UTC))

    def record_profiles(self, profiles: Iterable[Profile], *, at: datetime | None = None) -> None:
        """Store all profiles in one transaction, the first as the newest."""
        at = at or datetime.now(UTC)
        with self.transaction(write=True) as connection:
            for profile in profiles:
                _put(connection, profile, (), at)

    def profiles(self, model: str | None = None) -> tuple[Profile, ...]:
        """The profiles (of one model), the newest first."""
        newest_first = ProfileRow.created_at.desc(), ProfileRow.id
        query = sa.select(ProfileRow.document).order_by(*newest_first)
        if model is not None:
            query = query.where(ProfileRow.model == model)
        with self.transaction() as connection:
            documents = connection.execute(query).scalars().all()
        return parse_profiles(json.dumps({"schema": 1, "profiles": documents}), where=str(self.path))

    def samples(self, profile: Profile) -> tuple[RateSample, ...]:
        """The samples of a profile, in order of measurement; empty if none were stored."""
        query = (
            sa.select(SampleRow.gpus, SampleRow.rate, SampleRow.seconds, SampleRow.at)
            .join(ProfileRow)
            .where(*(getattr(ProfileRow, name) == value for name, value in _key(profile).items()))
            .order_by(SampleRow.id)
        )
        with self.transaction() as connection:
            return entries(self.path, RateSample, connection.execute(query).mappings())

    def record_layers(self, profile: Mapping[str, Any], *, at: datetime | None = None) -> None:
        """Store a layer profile (its JSON form) in place of an earlier one of its model and device.

        `at` is when it was made (now).
        """
        key = {"model": profile["model"], "device": profile["device"]}
        rest = {"document": dict(profile), "created_at": iso(at or datetime.now(UTC))}
        statement = insert(LayerProfileRow).values(**key, **rest)
        with self.transaction(write=True) as connection:
            connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=rest))

    def layers(self, model: str | None = None, device: str | None = None) -> tuple[dict[str, Any], ...]:
        """The layer profiles (of one model, on one type of device) in their JSON form, the newest first."""
        newest_first = LayerProfileRow.created_at.desc(), LayerProfileRow.id.desc()
        query = sa.select(LayerProfileRow.document).order_by(*newest_first)
        for column, wanted in ((LayerProfileRow.model, model), (LayerProfileRow.device, device)):
            query = query if wanted is None else query.where(column == wanted)
        with self.transaction() as connection:
            return tuple(connection.execute(query).scalars())

    def record_parallel(self, programs: Iterable[Program], *, at: datetime | None = None) -> None:
        """Store that these programs have reported to be parallel."""
        said_at = iso(at or datetime.now(UTC))
        rows = [{"model": model, "program": program, "said_at": said_at} for model, program in programs]
        if not rows:
            return
        statement = insert(ParallelProgramRow)
        renewed = {"said_at": statement.excluded.said_at}
        with self.transaction(write=True) as connection:
            connection.execute(
                statement.on_conflict_do_update(index_elements=["model", "program"], set_=renewed), rows
            )

    def parallel(self) -> frozenset[Program]:
        """The programs that have reported to be parallel."""
        query = sa.select(ParallelProgramRow.model, ParallelProgramRow.program)
        with self.transaction() as connection:
            return frozenset((model, program) for model, program in connection.execute(query))

    def record_shared(self, device: str, uses: Iterable[SharedUse], *, at: datetime | None = None) -> None:
        """Store what was seen on a type of device, in place of what was of the same models."""
        seen_at = iso(at or datetime.now(UTC))
        rows = [
            {**asdict(use), "device": device, "models": "\n".join(use.models), "seen_at": seen_at}
            for use in uses
        ]
        if not rows:
            return
        statement = insert(SharedUseRow)
        names = ("memory_mib", "busy", "together", "seen_at")
        renewed = {name: statement.excluded[name] for name in names}
        with self.transaction(write=True) as connection:
            connection.execute(
                statement.on_conflict_do_update(index_elements=["device", "models"], set_=renewed), rows
            )

    def shared(self, device: str) -> tuple[SharedUse, ...]:
        """What was seen of models on a type of device, in order of their names."""
        columns = SharedUseRow.models, SharedUseRow.memory_mib, SharedUseRow.busy, SharedUseRow.together
        query = sa.select(*columns).where(SharedUseRow.device == device).order_by(SharedUseRow.models)
        with self.transaction() as connection:
            found = connection.execute(query).mappings().all()
        split = ({**row, "models": str(row["models"]).split("\n")} for row in found)
        return entries(self.path, SharedUse, split)

    # History

    def record_run(self, run: RunEntry) -> None:
        """Store a run, in place of its earlier entry."""
        values = asdict(run)
        with self.transaction(write=True) as connection:
            statement = insert(RunRow).values(**values)
            connection.execute(statement.on_conflict_do_update(index_elements=["run_id"], set_=values))

    def record_jobs(self, jobs: Iterable[FinishedJob]) -> None:
        """Store finished jobs of a recorded run; the same (run_id, job_id) replaces the earlier one."""
        rows = [dict(vars(job)) for job in jobs]  # no copy of each list in them: there are many jobs
        if not rows:
            return
        statement = insert(HistoryRow)
        renewed = {name: statement.excluded[name] for name in rows[0]}
        with self.transaction(write=True) as connection:
            connection.execute(
                statement.on_conflict_do_update(index_elements=["run_id", "job_id"], set_=renewed), rows
            )

    def runs(self) -> tuple[RunEntry, ...]:
        """The runs, the newest first."""
        table = RunRow.__table__
        with self.transaction() as connection:
            found = connection.execute(sa.select(table).order_by(RunRow.started_at.desc())).mappings()
            return entries(self.path, RunEntry, found)

    def history(self, *, run_id: str | None = None, last: int | None = None) -> tuple[FinishedJob, ...]:
        """The finished jobs (of one run) in order of their end; only the newest `last` ones."""
        table = HistoryRow.__table__
        newest_first = HistoryRow.end_at.desc(), HistoryRow.run_id, HistoryRow.job_id.desc()
        query = sa.select(table).order_by(*newest_first)
        if run_id is not None:
            query = query.where(HistoryRow.run_id == run_id)
        if last is not None:
            query = query.limit(last)
        with self.transaction() as connection:
            found = connection.execute(query).mappings().all()
        return entries(self.path, FinishedJob, reversed(found))

    def record_trials(self, run_id: str, trials: Iterable[TrialEntry]) -> None:
        """Store the trials of a recorded run's search, in place of its earlier ones."""
        rows = [asdict(trial) for trial in trials]
        with self.transaction(write=True) as connection:
            connection.execute(sa.delete(TrialRow).where(TrialRow.run_id == run_id))
            if rows:
                connection.execute(insert(TrialRow), rows)

    def trials(self, *, run_id: str | None = None) -> tuple[TrialEntry, ...]:
        """The trials of all searches (of one run), in order of run and trial."""
        query = sa.select(TrialRow.__table__).order_by(TrialRow.run_id, TrialRow.trial)
        if run_id is not None:
            query = query.where(TrialRow.run_id == run_id)
        with self.transaction() as connection:
            return entries(self.path, TrialEntry, connection.execute(query).mappings())

    # The schema

    def _revision(self) -> str | None:
        """The schema's revision, None for an empty file; by plain SQL, because alembic is slow to import."""
        with self._engine.connect() as connection:
            tables = set(connection.execute(sa.text("SELECT name FROM sqlite_master")).scalars())
            if not tables:
                return None
            if "alembic_version" not in tables:
                raise StoreError(
                    f"{self.path}: is a database of something else; name another with --database"
                )
            revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        if revision is not None and revision not in REVISIONS:
            raise StoreError(
                f"{self.path}: was written by a newer hpcsched (schema {revision}, known up to {HEAD});"
                " upgrade hpcsched or name another file with --database"
            )
        return revision

    def _upgrade(self) -> None:
        """Bring the schema to HEAD in one transaction; several processes may try at once."""
        from alembic import command
        from alembic.config import Config

        config = Config()
        scripts = str(Path(__file__).with_name("migrations"))
        config.set_main_option("script_location", scripts.replace("%", "%%"))
        with self.transaction(write=True) as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[sa.Connection]:
        """A connection in a transaction of its own; `write` takes the lock at once. Raises StoreError."""
        with (
            self._told(),
            self._engine.connect().execution_options(hpcsched_write=write) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise errors of the database file as StoreError, in one line."""
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path}: {_why(error)}") from error
        except (ValueError, RecursionError) as error:  # of a column of JSON
            raise StoreError(f"{self.path}: what is in it is no JSON; {_ADVICE['malformed']}") from error


def iso(at: datetime) -> str:
    """An aware time as ISO text in UTC, to the millisecond, so that text order is time order."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _key(profile: Profile) -> dict[str, str | int]:
    return {
        "model": profile.model,
        "device": profile.device,
        "nodes": profile.nodes,
        "global_batch": profile.global_batch or 0,
        "software": profile.software,
    }


def _put(connection: sa.Connection, profile: Profile, samples: Iterable[RateSample], at: datetime) -> None:
    key = _key(profile)
    rest = {"source": profile.source, "document": to_json(profile), "created_at": iso(at)}
    statement = insert(ProfileRow).values(**key, **rest)
    profile_id = connection.execute(
        statement.on_conflict_do_update(index_elements=list(key), set_=rest).returning(ProfileRow.id)
    ).scalar_one()
    connection.execute(sa.delete(SampleRow).where(SampleRow.profile_id == profile_id))
    if rows := [{"profile_id": profile_id, **asdict(sample)} for sample in samples]:
        connection.execute(sa.insert(SampleRow), rows)


def _create(path: Path) -> None:
    """An empty file that only its owner can read, unless there is one."""
    if not path.exists():
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _engine(path: Path, busy_s: float) -> sa.Engine:
    def connect() -> sqlite3.Connection:
        # No transactions of the driver's own making: `begin` below says which kind it is.
        connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")  # others of a group may have made it
        # WAL needs memory shared by all readers, which a network filesystem does not give.
        connection.execute("PRAGMA journal_mode = DELETE")
        return connection

    # No pool: between transactions nothing is open, so nothing is locked or inherited by a fork.
    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer takes its lock at once: two that read first and write later would deadlock.
        write = connection.get_execution_options().get("hpcsched_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


_ADVICE = {
    "locked": "another process is writing to it; try again",
    "disk is full": "make room or name another file with --database",
    "readonly": "make it writable or name another file with --database",
    "not a database": "move it away or name another file with --database",
    "malformed": "it is damaged; move it away or name another file with --database",
}


def _why(error: Exception) -> str:
    """The driver's own words on one line, and what to do about them."""
    if isinstance(error, OSError):
        what = error.strerror or str(error)
    else:
        what = " ".join(str(getattr(error, "orig", None) or error).split())
    advice = (text for mark, text in _ADVICE.items() if mark in what)
    return f"{what}; {next(advice, 'name another file with --database')}"
