"""How long a user's allocations waited in their queues, by shape: the history that `advise` looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from hpcsched.store.database import Database
from hpcsched.store.database_rows import entries
from hpcsched.store.models import AllocationRow

MOST_READ = 1000
"""Allocations that are looked at, the newest (chosen)."""


@dataclass(frozen=True, kw_only=True)
class AllocationEntry:
    """The allocation of one life: the batch job by system, cluster ("" where it is not told) and id, what it
    had asked for (GPUs on each node, seconds), and when it came, might have started, and did; times are ISO,
    UTC."""

    kind: str
    cluster: str
    job_id: str
    started_at: str
    submitted_at: str
    eligible_at: str
    partition: str
    nodes: int
    gpus: int
    limit_s: float

    @property
    def waited_s(self) -> float:
        """Seconds for which it waited when it might have started."""
        began, eligible = (datetime.fromisoformat(at) for at in (self.started_at, self.eligible_at))
        return max(0.0, (began - eligible).total_seconds())


def record_allocation(database: Database, entry: AllocationEntry) -> None:
    """Store an allocation; the same one twice leaves one."""
    values = asdict(entry)
    with database.transaction(write=True) as connection:
        keys = ["kind", "cluster", "job_id", "started_at"]
        connection.execute(
            insert(AllocationRow).values(**values).on_conflict_do_update(index_elements=keys, set_=values)
        )


def allocations(database: Database, kind: str) -> Sequence[AllocationEntry]:
    """The allocations of a batch system, the newest first."""
    query = sa.select(AllocationRow.__table__).where(AllocationRow.kind == kind)
    query = query.order_by(AllocationRow.started_at.desc()).limit(MOST_READ)
    with database.transaction() as connection:
        return entries(database.path, AllocationEntry, connection.execute(query).mappings())
