"""A global batch that changes, in words: for `status` and `explain`."""

from __future__ import annotations

from hpcsched.contract.progress import Batching
from hpcsched.errors import HpcschedError
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import JobStatus, read_status


def batch(job: JobStatus) -> str:
    return str(job.batching.global_batch) if job.batching else "-"


def workers(job: JobStatus) -> str:
    """The workers of each rank, times the samples of each of them: 9+7x32."""
    if job.batching is None:
        return "-"
    return f"{'+'.join(map(str, job.batching.workers))}x{job.batching.local_batch}"


def similarity(job: JobStatus) -> str:
    return (
        "-" if job.batching is None or job.batching.similarity is None else f"{job.batching.similarity:.3f}"
    )


def noise_scale(job: JobStatus) -> str:
    known = job.batching is not None and job.batching.noise_scale is not None
    return f"{job.batching.noise_scale:.4g}" if job.batching and known else "-"


def as_it_is(rundir: RunDir, job_id: int) -> list[str]:
    """The batch of a job as it is computed now, by the newest snapshot; nothing for a job without."""
    try:
        jobs = read_status(rundir, only=()).jobs
    except HpcschedError:
        return []
    found = next((job.batching for job in jobs if job.id == job_id and job.state.active), None)
    return [_words(found)] if found else []


def _words(batching: Batching) -> str:
    count = sum(batching.workers)
    shares = " + ".join(map(str, batching.workers))
    each = f" ({shares} on its GPUs)" if len(batching.workers) > 1 else ""
    line = f"a global batch of {batching.global_batch}: "
    line += f"{count} workers with {batching.local_batch} samples{each}"
    if batching.similarity is not None:
        line += f", gradient similarity {batching.similarity:.3f}"
    if batching.noise_scale is not None:
        line += f", gradient noise scale {batching.noise_scale:.4g}"
    return f"{line}, epoch {batching.epoch:.2f}"
