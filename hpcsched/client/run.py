"""`hpcsched.Run`: a run from Python, for scripts and notebooks on any host that sees its directory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack, overload

import msgspec

from hpcsched import config, jobfile
from hpcsched.accounts import user_name
from hpcsched.agent.inbox import Command
from hpcsched.client import display, functions, names, waiting
from hpcsched.client.job import Job
from hpcsched.client.keys import Keys
from hpcsched.client.requests import LOOKS_EVERY_S, StillThere, ask, ask_or_leave, leave, names_in, wait_for
from hpcsched.dialects.command import program_name
from hpcsched.errors import ConfigError, HpcschedError, NoSuchRun, UnknownJob
from hpcsched.printing import suggestion
from hpcsched.store import run_folders
from hpcsched.store.rundir import SNAPSHOT_PERIOD_S, RunDir, agent_alive
from hpcsched.store.status import JobStatus, Status

STARTS_WITHIN_S = 180.0
"""Longest wait for an agent to begin, or to end (chosen): hosts may have to join, jobs have to save."""

SEEN_WITHIN_S = 1.5 * SNAPSHOT_PERIOD_S
"""Longest wait for a status with what the agent has taken: it writes one a little later."""


class Run:
    """A run, by its directory.

    Without one it is the run that commands mean here: $HPCSCHED_DIR, else the live or the newest one of
    `./hpcsched-run`, `./hpcsched-run-2` and so on. Nothing need run there yet: what is submitted waits for an
    agent, such as that of the batch job that `hpcsched script` writes. `Run.start` starts one here.

    Everything goes through files in the directory, so it works on login nodes, with no port open. All methods
    raise HpcschedError with one line that says what is wrong.
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None) -> None:
        self._rundir = RunDir(_folder(dir, begins=False))
        self._rundir.refuse_newer()
        self._submitting = threading.Lock()
        self._unseen: dict[str, str] = {}  # by name, with their arrays
        self._seen: tuple[tuple[int, int, int], Status] | None = None

    @classmethod
    def start(
        cls,
        dir: str | os.PathLike[str] | None = None,
        *,
        idle_timeout: str | None = None,
        **options: str | int | float | bool | Sequence[str],
    ) -> Self:
        """Start an agent in the background that stays for what is submitted (`hpcsched run --stay --detach`).

        It goes on when this process ends; `stop` ends it, and so does `idle_timeout` (such as "30m") without
        anything to run. `options` are those of `hpcsched run`, such as devices="cpu:2", policy="marble",
        resume=True. Raises ConfigError for one that is not accepted.
        """
        folder = _folder(dir, begins=not options.get("resume"))
        words = [sys.executable, "-P", "-m", "hpcsched", "--dir", str(folder), "run", "--stay", "--detach"]
        if idle_timeout is not None:
            words += ["--idle-timeout", idle_timeout]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words += [flag] if value else []
            elif isinstance(value, str | int | float):
                words += [flag, str(value)]
            else:
                words += [word for one in value for word in (flag, str(one))]
        try:
            told = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STARTS_WITHIN_S
            )
        except subprocess.TimeoutExpired:
            raise NoSuchRun(f"no agent has begun in {folder} within {STARTS_WITHIN_S:.0f} s") from None
        if told.returncode:
            raise _as_error(told)
        return cls(folder)

    def stop(self, *, timeout: float | None = None) -> None:
        """Have the agent save all jobs and end (`hpcsched drain`), and wait for it; nothing if none runs.

        A later `Run.start(run.dir, resume=True)` goes on.
        """
        if not self.alive:
            return
        ask(self._rundir, Command(command="drain"))
        deadline = time.monotonic() + (STARTS_WITHIN_S if timeout is None else timeout)
        while self.alive:
            if time.monotonic() > deadline:
                raise HpcschedError(f"the agent in {self.dir} has not ended yet")
            time.sleep(0.1)

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self._rundir.root

    @property
    def alive(self) -> bool:
        """Whether its agent lives."""
        try:
            return self._status_now().run.alive
        except NoSuchRun:
            return False

    # -- jobs --------------------------------------------------------------------------------

    @property
    def jobs(self) -> list[Job]:
        """All jobs of the run, and those that wait for an agent, in the order they came."""
        try:
            return [Job(self, job.name) for job in self._status_now().jobs]
        except NoSuchRun:
            return []

    def job(self, key: str | int) -> Job:
        """The job of this name or id. Raises UnknownJob."""
        jobs = self._status_now().jobs
        for job in jobs:
            if key in (job.name, job.id):
                return Job(self, job.name)
        near = suggestion(str(key), [job.name for job in jobs])
        raise UnknownJob(f"no job {key!r} in {self.dir}{near}")

    def table(self) -> list[dict[str, Any]]:
        """The jobs as records, one dict a job, with the keys of `hpcsched status --json`."""
        try:
            return [msgspec.to_builtins(job) for job in self._status_now().jobs]
        except NoSuchRun:
            return []

    def frame(self) -> Any:
        """`table` as a pandas DataFrame, one row a job, with its id as index. Raises HpcschedError without
        pandas."""
        try:
            import pandas
        except ImportError as error:
            raise HpcschedError("Run.frame needs pandas: pip install pandas") from error

        return pandas.DataFrame(self.table()).set_index("id") if self.jobs else pandas.DataFrame()

    @overload
    def submit(self, what: Callable[..., Any], /, *given: Any, **keys: Unpack[Keys]) -> Job: ...
    @overload
    def submit(self, what: Sequence[str], /, **keys: Unpack[Keys]) -> Job: ...
    @overload
    def submit(self, /, **keys: Unpack[Keys]) -> Job: ...
    def submit(self, what: Any = None, /, *given: Any, **keys: Unpack[Keys]) -> Job:
        """Put a job into the run: a function with its arguments, a command, or with `trainer=` a trainer.

        A function runs in a process of its own, by this Python, in the current directory; its arguments and
        its result are pickled. Keyword arguments are keys of a job file, such as name, gpus, steps, env,
        after (jobs or names), retries (of a function 0); a function gets its own by `functools.partial`. An
        object with a method `checkpoint` can be suspended, see the guide. Raises ConfigError.

        >>> job = run.submit(train, 1e-3, name="small", gpus=1)
        >>> job = run.submit(["python", "train.py", "--lr", "1e-3"], steps=10_000)
        """
        if given and not callable(what):
            raise ConfigError(where="submit", got=f"arguments for {what!r}", accepted="those of a function")
        (job,) = self._submit([partial(what, *given) if given else what], keys, where="submit")
        return job

    def map(
        self,
        function: Callable[..., Any],
        /,
        *iterables: Iterable[Any],
        labels: Sequence[str] | None = None,
        **keys: Unpack[Keys],
    ) -> list[Job]:
        """Put the function into the run once for each element of the iterables, as `map` calls it: one array,
        of which `at_once` may be under way at a time.

        Each job has the array's name and a number from 1, or its label: one for each, all different, of which
        what a name may not have becomes "-", and what makes it too long is left out.

        >>> jobs = run.map(train, [1e-3, 1e-2, 1e-1], at_once=2)
        >>> losses = [job.result() for job in jobs]
        """
        calls = [partial(function, *args) for args in zip(*iterables, strict=False)]
        if labels is not None and len(labels) != len(calls):
            raise ConfigError(
                where="map", key="labels", got=str(len(labels)), accepted=f"{len(calls)} labels"
            )
        behind = [str(label) for label in labels or range(1, len(calls) + 1)]
        return self._submit(calls, keys, where="map", labels=behind) if calls else []

    def cancel(self, jobs: Job | str | Iterable[Job | str] | None = None) -> int:
        """End these jobs (None: all) for good, in one request; how many there were to end."""
        these = _names(jobs)
        found = [job for job in self._status_now().jobs if these is None or job.name in these]
        left = [job for job in found if not job.state.final]
        waiting_ = [job for job in left if waiting.waits(job)]
        ended = len(waiting.take_back(self._rundir, waiting_)[0]) if waiting_ else 0
        if others := [job for job in left if not waiting.waits(job)]:
            ended += ask_or_leave(self._rundir, Command(command="cancel"), others)
        return ended

    def wait(
        self, jobs: Job | str | Iterable[Job | str] | None = None, *, timeout: float | None = None
    ) -> bool:
        """Wait until these jobs (None: all) have ended; whether all have completed.

        Raises NoSuchRun where no agent is there to run them, TimeoutError after `timeout` seconds.
        """
        these = _names(jobs)
        try:
            return all(job.state == "COMPLETED" for job in self._wait(these, timeout))
        except StillThere as error:
            raise TimeoutError(str(error)) from None

    # -- for Job and Executor ----------------------------------------------------------------

    def _submit(
        self, what: Sequence[Any], keys: Mapping[str, Any], *, where: str, labels: Sequence[str] = ()
    ) -> list[Job]:
        """Put jobs into the run in one request: all of them, or none. With labels they are an array."""
        table: dict[str, Any] = dict(keys)
        at_once = table.pop("at_once", None)
        if not labels and at_once is not None:
            raise ConfigError(where=where, got="at_once", accepted="at_once with `map`")
        if "after" in table:
            after = [table["after"]] if isinstance(table["after"], str | Job) else table["after"]
            table["after"] = [job if isinstance(job, str) else job.name for job in after]
        with self._submitting:
            bare = [{**self._of(one, where), **table} for one in what]
            living, taken, arrays = names_in(self._rundir)
            while True:
                for job, array in list(self._unseen.items()) if living else ():
                    taken.append(job)
                    if array:
                        arrays.setdefault(array, []).append(job)
                name = table.get("name") or self._free(_stem(what[0], table), taken, arrays, labels)
                tables = [{**one, "name": name} for one in bare]
                each = names.of_array(str(name), labels, where=where)
                for number, (one, its_name) in enumerate(zip(tables, each, strict=False), 1):
                    place = {"name": name, "index": number} | ({"at_once": at_once} if at_once else {})
                    one |= {"name": its_name, "array": place}
                    one.setdefault("model", name)
                specs = jobfile.parse(
                    {"schema": 1, "job": tables},
                    where=where,
                    workdir=Path.cwd(),
                    user=user_name(),
                    known=taken,
                    arrays=arrays,
                ).jobs
                command = Command(command="submit", jobs=list(specs), workdir=str(Path.cwd()))
                if not living:
                    leave(self._rundir, command, taken)
                    break
                answer = ask(self._rundir, command)
                if not any(answer.outcomes):
                    break
                # Somebody else has given these names away meanwhile.
                if new := [id for id, had in zip(answer.ids, answer.outcomes, strict=True) if not had]:
                    ask(self._rundir, Command(command="cancel", targets=new))
                if "name" in table:
                    raise ConfigError(
                        where=where, key="name", got=name, accepted="one that the run does not have"
                    )
                taken += [spec.name for spec in specs]
            self._unseen.update((spec.name, name if labels else "") for spec in specs)
        return [Job(self, spec.name) for spec in specs]

    @staticmethod
    def _free(stem: str, taken: Collection[str], arrays: Collection[str], labels: Sequence[str]) -> str:
        """The stem, with a number if there is a job or an array of its name, or of the name with a label."""
        both = {*taken, *arrays}
        fits = (name for name in names.numbered(stem, both) if name not in both)
        return next(n for n in fits if both.isdisjoint(names.labelled(n, label) for label in labels))

    def _of(self, what: Any, where: str) -> dict[str, Any]:
        """The keys of a job that does this."""
        if what is None:
            return {}
        if callable(what):
            file = functions.store(self._rundir, what, where=where)
            return {"command": functions.command(file), "retries": 0}
        words = [] if isinstance(what, str) else list(what)
        if not words or not all(isinstance(word, str) for word in words):
            accepted = 'a function, or a list of words such as ["python", "train.py"]'
            raise ConfigError(where=where, got=repr(what)[:80], accepted=accepted)
        return {"command": words}

    def _wait(self, these: set[str] | None, timeout: float | None) -> Sequence[JobStatus]:
        found = self._status_now().jobs
        mine = [job for job in found if these is None or job.name in these]
        if unknown := sorted((these or set()) - {job.name for job in mine}):
            raise UnknownJob(f"no job {unknown[0]!r} in {self.dir}")
        if all(job.state.final for job in mine):
            return mine
        return wait_for(
            self._rundir,
            lambda status: [job for job in status.jobs if these is None or job.name in these],
            timeout_s=timeout,
        )

    def _status_now(self) -> Status:
        """The newest status that has all that was submitted here. Raises NoSuchRun."""
        deadline = time.monotonic() + SEEN_WITHIN_S
        while True:
            status = self._newest()
            for job in status.jobs if self._unseen else ():
                self._unseen.pop(job.name, None)
            if not self._unseen or time.monotonic() > deadline:
                return status
            time.sleep(LOOKS_EVERY_S)

    def _newest(self) -> Status:
        """The newest status, decoded once."""
        try:
            about = self._rundir.status.stat()
            key = (about.st_mtime_ns, about.st_size, about.st_ino)
        except OSError:
            key = (0, 0, 0)
        if (
            self._seen is None
            or self._seen[0] != key
            or not (self._seen[1].run.alive and agent_alive(self._rundir, self._rundir.read_record()))
        ):
            self._seen = key, waiting.read_all(self._rundir)
        return self._seen[1]

    def _status_of(self, name: str) -> JobStatus:
        for job in self._status_now().jobs:
            if job.name == name:
                return job
        raise UnknownJob(f"no job {name!r} in {self.dir}")

    # -- how it is shown ---------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    def _repr_html_(self) -> str:
        """How a notebook shows it: a line about the run, and a table of its jobs."""
        try:
            return display.run(self._status_now())
        except HpcschedError as error:
            return display.line(str(error))


def check_keys(keys: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that no job can have."""
    table = {key: value for key, value in keys.items() if key not in ("after", "at_once")}
    jobfile.spec_of(
        {"name": "call", "command": ["true"], **table}, where="Executor", place="", workdir=Path(), user=""
    )


def _names(jobs: Job | str | Iterable[Job | str] | None) -> set[str] | None:
    if jobs is None:
        return None
    several = [jobs] if isinstance(jobs, str | Job) else jobs
    return {job if isinstance(job, str) else job.name for job in several}


def _folder(dir: str | os.PathLike[str] | None, *, begins: bool) -> Path:
    here = Path.cwd()
    given = dir or os.environ.get("HPCSCHED_DIR") or config.load(os.environ, here=here).values.get("dir")
    if given:
        return Path(given).absolute()
    return run_folders.of_next_run(here) if begins else run_folders.newest(here)


def _as_error(told: subprocess.CompletedProcess[str]) -> HpcschedError:
    """What a command has refused, in its own words."""
    lines = [line.removeprefix("hpcsched: ") for line in told.stderr.splitlines() if line.strip()]
    error = HpcschedError("; ".join(lines[-3:]) or f"`hpcsched run` has ended with {told.returncode}")
    error.exit_code = told.returncode
    return error


def _stem(what: Any, table: dict[str, Any]) -> str:
    """A name for jobs that were given none."""
    if what is None:
        return names.fit(str(table.get("trainer", "job")).rpartition(":")[2])
    if callable(what):
        return names.fit(names.function(what))
    return names.fit(program_name([str(word) for word in what]))
