"""The tables of the database: profiles with the samples behind them, layer profiles, runs, finished jobs.

Changing a table here needs a revision in `migrations/versions`; a test compares the two.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, Double, ForeignKey, MetaData, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base of the tables; constraints get names, which SQLite needs to change them later."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        float: Double(),
        dict[str, Any]: JSON(),
        list[Any]: JSON(),
    }


class ProfileRow(Base):
    """One profile; `document` is the profile as the JSON interchange has it, the truth of the row.

    The other columns are what rows are found by. `global_batch` 0 stands for "not known": NULLs
    would never collide in the unique key.
    """

    __tablename__ = "profile"
    __table_args__ = (UniqueConstraint("model", "device", "nodes", "global_batch", "software"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model: Mapped[str]
    device: Mapped[str]
    nodes: Mapped[int]
    global_batch: Mapped[int]
    software: Mapped[str]
    source: Mapped[str]
    document: Mapped[dict[str, Any]]
    created_at: Mapped[str]


class SampleRow(Base):
    """One measured window: `rate` units per second on `gpus` GPUs over `seconds`, ended `at` (ISO, UTC)."""

    __tablename__ = "profile_sample"

    id: Mapped[int] = mapped_column(primary_key=True)
    profile_id: Mapped[int] = mapped_column(ForeignKey("profile.id", ondelete="CASCADE"), index=True)
    gpus: Mapped[int]
    rate: Mapped[float]
    seconds: Mapped[float]
    at: Mapped[str]


class LayerProfileRow(Base):
    """The layer profile of a model on a type of device; `document` is its JSON form."""

    __tablename__ = "layer_profile"
    __table_args__ = (UniqueConstraint("model", "device"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model: Mapped[str]
    device: Mapped[str]
    document: Mapped[dict[str, Any]]
    created_at: Mapped[str]


class RunRow(Base):
    """One run of the scheduler; times are ISO, UTC."""

    __tablename__ = "run"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    directory: Mapped[str]
    host: Mapped[str]
    policy: Mapped[str]
    gpus: Mapped[int]
    allocation: Mapped[str]
    started_at: Mapped[str]
    ended_at: Mapped[str | None]


class HistoryRow(Base):
    """One finished job of a run. `_s` are seconds of the run's clock, `_at` the wall time (ISO, UTC)."""

    __tablename__ = "history"

    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id", ondelete="CASCADE"), primary_key=True)
    job_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str]
    model: Mapped[str]
    state: Mapped[str]
    exit: Mapped[int | None]
    submit_s: Mapped[float]
    start_s: Mapped[float | None]
    end_s: Mapped[float]
    submit_at: Mapped[str]
    start_at: Mapped[str | None]
    end_at: Mapped[str] = mapped_column(index=True)
    gpu_hours: Mapped[float]
    steps: Mapped[int | None]
    steps_repeated: Mapped[int | None]
    suspensions: Mapped[int]
    gpus_max: Mapped[int]
    max_rss_bytes: Mapped[int | None]
    attempts: Mapped[list[Any]]


class ParallelProgramRow(Base):
    """A program that has reported, last at `said_at` (ISO, UTC), that it can be one of several ranks."""

    __tablename__ = "parallel_program"

    model: Mapped[str] = mapped_column(primary_key=True)
    program: Mapped[str] = mapped_column(primary_key=True)
    said_at: Mapped[str]


class SharedUseRow(Base):
    """What was last seen, at `seen_at` (ISO, UTC), of models that share a type of device.

    `models` are their names, one a line, as names have no line breaks; the rest is as in `SharedUse`.
    """

    __tablename__ = "shared_use"

    device: Mapped[str] = mapped_column(primary_key=True)
    models: Mapped[str] = mapped_column(primary_key=True)
    memory_mib: Mapped[float | None]
    busy: Mapped[float | None]
    together: Mapped[float | None]
    seen_at: Mapped[str]


class TrialRow(Base):
    """The result of one configuration of a search: `value` is the metric's after `budget` of training."""

    __tablename__ = "trial"

    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id", ondelete="CASCADE"), primary_key=True)
    trial: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    bracket: Mapped[int]
    args: Mapped[dict[str, Any]]
    unit: Mapped[str]
    budget: Mapped[float]
    metric: Mapped[str]
    value: Mapped[float | None]
    state: Mapped[str]
    best: Mapped[bool]
    job: Mapped[str]
    checkpoint: Mapped[str | None]


class AllocationRow(Base):
    """The allocation of one life of a run, and how long it waited; times are ISO, UTC. See
    `AllocationEntry`."""

    __tablename__ = "allocation"

    kind: Mapped[str] = mapped_column(primary_key=True)
    cluster: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(primary_key=True)
    started_at: Mapped[str] = mapped_column(primary_key=True)
    submitted_at: Mapped[str]
    eligible_at: Mapped[str]
    partition: Mapped[str]
    nodes: Mapped[int]
    gpus: Mapped[int]
    limit_s: Mapped[float]
