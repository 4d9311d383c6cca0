"""How long the allocation of this life waited, asked when it begins and put into the user's database at its
end."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.batch import queue_of

if TYPE_CHECKING:
    from hpcsched.batch.queue import JobTimes
    from hpcsched.store.allocations import AllocationEntry


def begun(kind: str) -> AllocationEntry | None:
    """The batch job that this process is in; None where there is none, or nobody tells."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    try:
        queue = queue_of(kind, environ=os.environ) if job_id else None
        times = queue.times(job_id) if queue else None
        return _entry(kind, job_id, times) if times else None
    except Exception:  # whatever is answered: a run is worth more than its line in a table of waits
        return None


def _entry(kind: str, job_id: str, times: JobTimes) -> AllocationEntry:
    from hpcsched.store.allocations import AllocationEntry
    from hpcsched.store.database import iso

    def at(seconds: float) -> str:
        return iso(datetime.fromtimestamp(seconds, UTC))

    return AllocationEntry(
        kind=kind,
        cluster=os.environ.get("SLURM_CLUSTER_NAME", ""),
        job_id=job_id,
        started_at=at(times.started),
        submitted_at=at(times.submitted),
        eligible_at=at(times.eligible),
        **asdict(times.shape),
    )


def keep(entry: AllocationEntry, store: Path) -> None:
    """Put it into the database. Raises StoreError."""
    from hpcsched.store.allocations import record_allocation
    from hpcsched.store.database import Database

    with Database(store) as opened:
        record_allocation(opened, entry)
