"""SGE (Sun, Open, Son of and Univa Grid Engine), by its own commands.

Tried on Son of Grid Engine 8.1.9, as Debian has it, on two virtual hosts.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpcsched.batch import sge_text
from hpcsched.batch.base import AllocatedHost, Allocation, BatchJobState, BatchSystem, EndReason
from hpcsched.batch.command import RunCommand, command_output, run_command
from hpcsched.batch.local import ssh
from hpcsched.contract.visibility import CUDA
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput, BatchError
from hpcsched.patience import patiently

REQUEUE_CODE = 99
"""The exit code that has SGE put a job back into its queue, unless its administrator forbids that."""

CLOCK_SKEW_S = 10.0
"""An end that is nearer than this has come (chosen): clocks differ, and SGE looks every few seconds."""

_MOST_BYTES = 2**20
_NO_TASK = ("", "undefined")


class Sge(BatchSystem):
    """SGE 8.1; see the module for what it was tried on.

    Args:
        environ: the environment of this process: the job's, or a login node's for `job_state` and `version`.
        run: runs a command.
        launcher: how node agents are started: "qrsh" (`qrsh -inherit`: the parallel environment must have
            `control_slaves TRUE`), "ssh", or "local" (all on this machine).
        hostname: this machine's name; None: what SGE and the system say.
        now: the time, as Unix time.
    """

    kind = "sge"
    launchers = ("qrsh", "ssh", "local")

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        run: RunCommand = run_command,
        launcher: str = "qrsh",
        hostname: str | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._environ = environ
        self._run = run
        self._launcher = launcher
        self._hostname = hostname
        self._now = now
        self._end: float | None = None
        self._knows_end = False

    @classmethod
    def inside(cls, environ: Mapping[str, str]) -> bool:
        """PBS has a JOB_ID of its own at some sites, but no such task id."""
        return bool(environ.get("JOB_ID")) and "SGE_TASK_ID" in environ

    @classmethod
    def restarted(cls, environ: Mapping[str, str]) -> bool:
        return environ.get("RESTARTED", "0") not in ("", "0")

    def allocation(self) -> Allocation:
        """See `BatchSystem`. SGE tells whether the job was started again, not how often."""
        job, task = self._job()
        slots = self._slots()
        with contextlib.suppress(BatchError):
            self.end_time()
        here = self._here(list(slots))
        notice = self._notice()
        return Allocation(
            kind=self.kind,
            id=job if task is None else f"{job}.{task}",
            hosts=tuple(
                AllocatedHost(name=name, cpus=count or None, gpus=self._gpus() if name == here else None)
                for name, count in slots.items()
            ),
            deadline=self._end,
            restart_count=1 if self.restarted(self._environ) else 0,
            here=here,
            # A site may have made SIGTERM its queue's terminate_method.
            ends_by=frozenset({signal.SIGTERM, notice[0]} if notice else {signal.SIGTERM}),
        )

    def end_time(self) -> float | None:
        """See `BatchSystem`. A job that runs keeps its limits: once known, it is not asked for again."""
        job, task = self._job()
        if self._knows_end:
            return self._end
        found = sge_text.detail(self._asked("qstat", "-xml", "-j", job))
        start = found.starts.get(task or "1") if found else None
        if found is None or start is None:
            raise BatchError(f"qstat does not tell since when job {job} runs")
        limits = dict(found.requests)
        if queue := self._environ.get("QUEUE", ""):
            with contextlib.suppress(BatchError):
                there = sge_text.queue_values(self._asked("qconf", "-sq", queue), self._name())
                limits = {key: there[key] for key in ("s_rt", "h_rt") if key in there} | limits
        try:
            lasts = [sge_text.seconds(limits[key]) for key in ("s_rt", "h_rt") if key in limits]
        except ValueError as error:
            raise BatchError(f"the limit of job {job}: {error}") from None
        least = min((each for each in lasts if each is not None), default=None)
        self._end, self._knows_end = None if least is None else start + least, True
        return self._end

    def reason(self) -> EndReason:
        """See `BatchSystem`: what qdel and qmod did is in the job's state; else its time may be up. Of other
        limits (memory, CPU time) there is no word, so NONE is never said.
        """
        try:
            job, task = self._job()
            rows = sge_text.listing(self._asked("qstat", "-xml", "-u", self._owner()))
        except BatchError:
            return EndReason.UNKNOWN
        for state in (row.state for row in rows if row.job == job and row.has(task)):
            if "d" in state:
                return EndReason.CANCELLED
            if "R" in state and "q" in state:
                return EndReason.REQUEUED
        at_limit = self._end is not None and self._now() >= self._end - CLOCK_SKEW_S
        return EndReason.LIMIT if at_limit else EndReason.UNKNOWN

    def kill_wait(self) -> float | None:
        notice = self._notice()
        return notice[1] if notice else None

    def job_state(self, job_id: str) -> BatchJobState:
        """See `BatchSystem`: "11" is a job, "11.2" a task of an array."""
        found = re.fullmatch(r"(\d{1,12})(?:\.(\d{1,9}))?", job_id, re.ASCII)
        if found is None:
            return BatchJobState.UNKNOWN
        try:
            # Its owner's jobs only: a listing of all may be long.
            known = sge_text.detail(self._asked("qstat", "-xml", "-j", found[1]))
            if known is None:
                return BatchJobState.ENDED
            rows = sge_text.listing(self._asked("qstat", "-xml", "-u", known.owner or "*"))
        except BatchError:
            return BatchJobState.UNKNOWN
        return sge_text.state_of(rows, found[1], found[2])

    def requeue(self) -> int:
        """See `BatchSystem`: SGE puts a job back that leaves with code 99, whatever `qsub -r` said."""
        self._job()
        if self._config().get("forbid_reschedule") == "1":
            raise BatchError("SGE does not put jobs back here: its administrator has set FORBID_RESCHEDULE")
        return REQUEUE_CODE

    def requeueable(self) -> str:
        try:
            return f"possible, by exit code {self.requeue()}"
        except BatchError as error:
            return f"not possible: {error}"

    def submit_next(self, script: Path | None) -> str:
        """See `BatchSystem`: what the script's #$ lines say counts."""
        job, task = self._job()
        if script is None:
            raise BatchError("SGE does not give out what a job was submitted with: name the script to submit")
        if task is not None:
            raise BatchError(
                "the job that follows one task of an array would wait for all of them: use --requeue"
            )
        if not patiently(script.is_file):
            raise BatchError(f"{script} cannot be submitted: there is no such file")
        said = self._asked("qsub", "-terse", "-hold_jid", job, str(script))
        # The last line: a site may have printed greetings. "17.1-2:1" for an array.
        submitted = (said.split() or [""])[-1].partition(".")[0]
        if not submitted.isdigit():
            raise BatchError(f"qsub did not answer with a job id but {said.strip()[:60]!r}")
        return submitted

    def comment(self, text: str) -> None:
        """A word of the job's context, which `qstat -j` shows; tasks of an array share it, and set none."""
        job, task = self._job()
        if task is None:
            line = re.sub(r"[^\x20-\x7e]|[,=]", " ", text)[:200]
            self._asked("qalter", "-ac", f"hpcsched={line}", job)

    def on_hosts(self, hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        """See `BatchSystem`: one `qrsh -inherit` a host, with `--name HOST` added.

        Ending qrsh (SIGTERM) ends what it runs. The shell over there takes its words apart once more. On this
        host no qrsh is needed, where a parallel environment may leave it no slot.
        """
        commands: list[tuple[str, ...]] = []
        for host in hosts:
            words = (*argv, "--name", host.name)
            if self._launcher == "ssh":
                commands.append(ssh(host.name, words))
            elif self._launcher == "local" or sge_text.same_host(host.name, self._name()):
                commands.append(words)
            else:
                commands.append(("qrsh", "-inherit", "-nostdin", host.name, shlex.join(words)))
        return commands

    def script_pid(self) -> int | None:
        said = self._spooled("job_pid").strip()
        return int(said) if re.fullmatch(r"[1-9][0-9]{0,9}", said) else None

    def version(self) -> str:
        answer = self._run(("qstat", "-help"), environ=self._environ)
        first = (answer.out or answer.err).strip().partition("\n")[0].strip()
        if not re.match(r"\S*(GE|AGE)\b", first):
            raise BatchError(f"qstat -help names no Grid Engine but {first[:60]!r}")
        return first

    # --- within ----------------------------------------------------------------

    def _job(self) -> tuple[str, str | None]:
        """The job's id, and of an array the task's."""
        job, task = self._environ.get("JOB_ID", ""), self._environ.get("SGE_TASK_ID", "")
        if not job or "SGE_TASK_ID" not in self._environ:
            raise BatchError("JOB_ID and SGE_TASK_ID are not set: this is not inside an SGE job")
        if not re.fullmatch(r"[0-9]{1,12}", job):
            raise BatchError(f"JOB_ID is {job[:40]!r}, which is no job id")
        if task in _NO_TASK:
            return job, None
        if not re.fullmatch(r"[0-9]{1,9}", task):
            raise BatchError(f"SGE_TASK_ID is {task[:40]!r}, which is no number")
        return job, task

    def _slots(self) -> dict[str, int]:
        file = self._environ.get("PE_HOSTFILE")
        if not file:  # a job without a parallel environment has one slot, here
            slots = self._environ.get("NSLOTS", "")
            return {self._name(): int(slots) if re.fullmatch(r"[0-9]{1,6}", slots) else 1}
        try:
            data = patiently(partial(read_file, Path(file), most_bytes=_MOST_BYTES))
            text = data.decode("utf-8", "replace")
        except (OSError, BadInput) as error:
            raise BatchError(f"PE_HOSTFILE cannot be read: {error}") from None
        return sge_text.host_slots(text)

    def _gpus(self) -> tuple[str, ...] | None:
        """Those of this host, where the site's prolog or a resource map names them."""
        visible = self._environ.get(CUDA.variable)
        if visible is not None:
            return tuple(word.strip() for word in visible.split(",") if word.strip())
        return sge_text.gpu_names(self._environ.get("SGE_HGR_gpu", "")) or None

    def _name(self) -> str:
        return self._hostname or self._environ.get("HOSTNAME") or socket.gethostname()

    def _here(self, hosts: Sequence[str]) -> str | None:
        return next((name for name in hosts if sge_text.same_host(name, self._name())), None)

    def _owner(self) -> str:
        return self._environ.get("LOGNAME") or self._environ.get("USER") or "*"

    def _config(self) -> dict[str, str]:
        return sge_text.job_config(self._spooled("config"))

    def _notice(self) -> tuple[signal.Signals, float] | None:
        return sge_text.kill_notice(self._config())

    def _spooled(self, name: str) -> str:
        """A file of this job's spool directory on this host; empty where it cannot be read."""
        folder = self._environ.get("SGE_JOB_SPOOL_DIR")
        if not folder:
            return ""
        try:
            return read_file(Path(folder, name), most_bytes=_MOST_BYTES).decode("utf-8", "replace")
        except (OSError, BadInput):
            return ""

    def _asked(self, *argv: str) -> str:
        return command_output(self._run, argv, environ={**self._environ, "LC_ALL": "C"})
