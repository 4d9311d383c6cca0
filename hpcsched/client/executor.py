"""`hpcsched.Executor`: a `concurrent.futures.Executor` whose calls are jobs of a run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack

from hpcsched.client import waiting
from hpcsched.client.job import Job
from hpcsched.client.keys import Keys
from hpcsched.client.run import Run, check_keys
from hpcsched.errors import HpcschedError, NoSuchRun
from hpcsched.store.rundir import agent_works
from hpcsched.store.status import JobStatus

P = ParamSpec("P")
T = TypeVar("T")

LOOKS_EVERY_S = 0.2
"""Time between two looks at the run's status (chosen)."""

GONE_AFTER_S = 30.0
"""Time without any status after which the run counts as gone (chosen)."""

OWN_IDLE = "10m"
"""The agent of an executor of its own leaves when nothing has come for so long (chosen)."""


class JobFuture(futures.Future[T]):
    """The future of a call; `job` is its job, with its log, metrics and checkpoint."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self._ending = threading.Lock()

    def running(self) -> bool:
        """Whether the job has processes now: it may be suspended, and go on."""
        return not self.done() and self.job.run._status_of(self.job.name).state.active

    def cancel(self) -> bool:
        """End the job, also one that runs; False if it is over already."""
        if not self.done():
            with contextlib.suppress(HpcschedError):  # it is over, or nobody is there any more to end it
                if self.job.cancel():
                    self._cancelled()
        return self.cancelled()

    def _cancelled(self) -> None:
        with self._ending:
            if not self.done():
                super().cancel()  # as none of this class has been said to run
                self.set_running_or_notify_cancel()


class Executor(futures.Executor):
    """Calls of functions as jobs of a run: results and exceptions come back, GPUs are given by the scheduler.

    Args:
        run: the run, or its directory; None: one of its own, with an agent that is started here and drained
            by `shutdown`.
        keys: keys of a job file that all calls get, such as gpus=1, memory="16G", env={...}.

    Functions and arguments are pickled by cloudpickle, so those of a notebook will do. See `Run.submit` for
    what a call may rely on. Leaving the `with` block waits for all of them.

    >>> with hpcsched.Executor(gpus=1) as executor:
    ...     losses = list(executor.map(train, [1e-3, 1e-2, 1e-1]))
    """

    def __init__(self, run: Run | str | os.PathLike[str] | None = None, /, **keys: Unpack[Keys]) -> None:
        check_keys(keys)
        self._own = run is None
        # A process that ends without `shutdown` must not leave an agent on its GPUs for ever.
        started = Run.start(idle_timeout=OWN_IDLE) if run is None else None
        self.run = started or (run if isinstance(run, Run) else Run(run))
        self._keys = keys
        self._lock = threading.Lock()
        self._open: dict[str, JobFuture[Any]] = {}
        self._watching: threading.Thread | None = None
        self._shut = False
        self._there = time.monotonic()
        """When there was a status last."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> JobFuture[T]:
        """Put one call into the run. Raises HpcschedError where it is not taken."""
        with self._lock:
            self._refuse_more()
            job = self.run.submit(partial(fn, *args, **kwargs), **self._keys)
            return self._future(job)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """The results in order; all calls are submitted at once, as one array. `chunksize` has no effect."""
        with self._lock:
            self._refuse_more()
            found = [self._future(job) for job in self.run.map(fn, *iterables, **self._keys)]
        return self._results(found, timeout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; `wait` for those that are there. A run of its own is then drained.

        Without `wait` the calls go on, and a run of its own stays until it is drained (`hpcsched drain`).
        """
        with self._lock:
            self._shut = True
            left = list(self._open.values())
        if cancel_futures:
            for future in left:
                future.cancel()
        if wait:
            futures.wait(left)
            if self._own:
                self.run.stop()

    def __repr__(self) -> str:
        return f"Executor({self.run!r})"

    @staticmethod
    def _results(found: Sequence[JobFuture[T]], timeout: float | None) -> Iterator[T]:
        end = None if timeout is None else time.monotonic() + timeout
        try:
            for future in found:
                yield future.result(None if end is None else end - time.monotonic())
        finally:
            for future in found:  # of a loop that was left; nothing to those that are over
                future.cancel()

    def _refuse_more(self) -> None:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _future(self, job: Job) -> JobFuture[Any]:
        future: JobFuture[Any] = JobFuture(job)
        self._open[job.name] = future
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="hpcsched-executor", daemon=True)
            self._watching.start()
        return future

    def _watch(self) -> None:
        """Tell the futures what becomes of their jobs, until there are none."""
        pause = threading.Event()
        while True:
            with self._lock:
                if not self._open:
                    self._watching = None
                    return
                mine = dict(self._open)
            with contextlib.suppress(Exception):  # what cannot be read now may be readable later
                self._look(mine)
            pause.wait(LOOKS_EVERY_S)

    def _look(self, mine: dict[str, JobFuture[Any]]) -> None:
        try:
            status = self.run._status_now()
        except NoSuchRun as error:
            # Nothing waits, and nothing has been written: an agent may have taken it a moment ago.
            patience_s = GONE_AFTER_S if agent_works(self.run._rundir) else GONE_AFTER_S / 30
            if time.monotonic() > self._there + patience_s:
                for future in mine.values():
                    self._tell(future, error)
            return
        self._there = time.monotonic()
        jobs = {job.name: job for job in status.jobs}
        for name, future in mine.items():
            job = jobs.get(name)
            if job is None:
                self._tell(future, futures.CancelledError(f"job {name} was taken back"))
            elif job.state.final:
                self._tell(future, job)
            elif not status.run.alive and not waiting.waits(job):
                self._tell(future, NoSuchRun(f"no agent runs in {self.run.dir} any more"))

    def _tell(self, future: JobFuture[Any], what: JobStatus | BaseException) -> None:
        """Give a future what its job has come to."""
        with self._lock:
            self._open.pop(future.job.name, None)
        try:
            if isinstance(what, BaseException):
                raise what
            result = future.job._result_of(what)
        except futures.CancelledError:
            told: Callable[[], None] = future._cancelled
        except BaseException as error:  # of the function: whatever it is
            told = partial(future.set_exception, error)
        else:
            told = partial(future.set_result, result)
        with contextlib.suppress(futures.InvalidStateError):  # somebody has cancelled it meanwhile
            told()
