"""IBM Spectrum LSF, by its own commands.

Tested against recorded and documented text and under a stand-in, never on a real LSF.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcsched.batch import lsf_text
from hpcsched.batch.base import AllocatedHost, Allocation, BatchJobState, BatchSystem, EndReason
from hpcsched.batch.command import RunCommand, command_output, run_command
from hpcsched.batch.local import ssh
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import MOST_SHOWN, BatchError
from hpcsched.patience import patiently
from hpcsched.printing import shortened

SIGNALS_ALL = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR2})
"""The signals of LSF: it ends jobs with the first two and warns with the last. Each goes to every process
group of the job."""

DEFAULT_KILL_WAIT_S = 20.0
"""Time from SIGINT to SIGKILL by default: twice LSF's default JOB_TERMINATE_INTERVAL."""

CLOCK_SKEW_S = 10.0
"""An end that is nearer than this has come (chosen): clocks differ."""


class Lsf(BatchSystem):
    """LSF 10.1; see the module: never tried on a real one.

    Args:
        environ: the environment of this process: the job's, or a login node's for `job_state` and `version`.
        run: runs a command.
        launcher: how node agents are started: "blaunch", "jsrun" (sites where the batch script runs on a
            launch node), "ssh", "local" (all on this machine); "auto": jsrun where it is on the PATH.
        hostname: this machine's name; None: what the system says.
        jsrun_gpus, jsrun_cpus: what jsrun is to give each host's resource set.
        now: the time, as Unix time; bjobs may print a date without its year.
    """

    kind = "lsf"
    launchers = ("auto", "blaunch", "jsrun", "ssh", "local")
    takes_back = True

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        run: RunCommand = run_command,
        launcher: str = "auto",
        hostname: str | None = None,
        jsrun_gpus: str = "ALL_GPUS",
        jsrun_cpus: str = "ALL_CPUS",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._environ = environ
        self._run = run
        self._given_launcher = launcher
        self._hostname = hostname
        self._jsrun_gpus, self._jsrun_cpus = jsrun_gpus, jsrun_cpus
        self._now = now
        self._form: str | None = None
        """The one of `lsf_text.FORMS` that this bjobs is known to print; None: not known yet."""
        self._end: float | None = None

    @classmethod
    def inside(cls, environ: Mapping[str, str]) -> bool:
        return bool(environ.get("LSB_JOBID"))

    @classmethod
    def restarted(cls, environ: Mapping[str, str]) -> bool:
        return environ.get("LSB_RESTART", "").upper() == "Y"

    def allocation(self) -> Allocation:
        """See `BatchSystem`; with jsrun, a first host named unlike the others is the launch node."""
        job_id = self._job_id()
        slots = lsf_text.slots_of(self._environ)
        first, *others = slots
        # By the sites' habit, not by how agents are started: ssh from a launch node is the same launch node.
        if self._has_jsrun() and lsf_text.is_launch_node(first, others):
            del slots[first]
        record = self._known(job_id)
        self._end = lsf_text.finish_time(record.get("FINISH_TIME", ""), now=self._now())
        # Ctrl-C in an interactive job is its user's.
        interactive = self._environ.get("LSB_INTERACTIVE", "").upper() == "Y"
        granted = lsf_text.gpu_alloc(record.get("GPU_ALLOC", ""))
        here = self._here(list(slots))
        visible = self._environ.get(CUDA.variable)
        hosts: list[AllocatedHost] = []
        for name, count in slots.items():
            gpus = granted.get(name)
            if name == here and visible is not None:
                gpus = tuple(word.strip() for word in visible.split(",") if word.strip())
            hosts.append(AllocatedHost(name=name, gpus=gpus, cpus=count))
        return Allocation(
            kind=self.kind,
            id=job_id,
            hosts=tuple(hosts),
            deadline=self._end,
            restart_count=1 if self.restarted(self._environ) else 0,
            account=self._environ.get("LSB_PROJECT_NAME") or None,
            partition=self._environ.get("LSB_QUEUE") or None,
            here=here,
            ends_by=frozenset({signal.SIGTERM} if interactive else {signal.SIGINT, signal.SIGTERM}),
            signals_all=SIGNALS_ALL,
        )

    def end_time(self) -> float | None:
        record = self._record(self._job_id(), "stat", "finish_time")
        if "ERROR" in record:
            raise BatchError(f"LSF does not tell of the job: {shortened(record['ERROR'], MOST_SHOWN)}")
        self._end = lsf_text.finish_time(record.get("FINISH_TIME", ""), now=self._now())
        return self._end

    def reason(self) -> EndReason:
        """See `BatchSystem`: a person's wish is in the job's history; else it is the run limit's, if that has
        come. NONE is never said: of what LSF ends by itself there is no word before it is over.
        """
        with contextlib.suppress(BatchError):
            history = self._run(("bhist", "-l", self._job_id()), environ=self._in_english())
            reason = lsf_text.end_reason(history.out)
            if reason is not EndReason.UNKNOWN:
                return reason
        at_limit = self._end is not None and self._now() >= self._end - CLOCK_SKEW_S
        return EndReason.LIMIT if at_limit else EndReason.UNKNOWN

    def kill_wait(self) -> float | None:
        with contextlib.suppress(BatchError):
            wait_s = lsf_text.kill_wait(self._run(("bparams", "-l"), environ=self._in_english()).out)
            return DEFAULT_KILL_WAIT_S if wait_s is None else wait_s
        return DEFAULT_KILL_WAIT_S

    def job_state(self, job_id: str) -> BatchJobState:
        if not job_id[:1].isdigit():
            return BatchJobState.UNKNOWN  # bjobs would take an empty id for "all jobs"
        try:
            return lsf_text.state_of(self._record(job_id, "stat"))
        except BatchError:
            return BatchJobState.UNKNOWN

    def requeue(self) -> int:
        """See `BatchSystem`: LSF puts a job back that leaves with a code agreed on when it was submitted."""
        code = lsf_text.requeue_code(self._environ.get("LSB_EXIT_REQUEUE", ""))
        if code is None:
            raise BatchError(
                "LSF puts this job back into its queue on no exit code (LSB_EXIT_REQUEUE): "
                'submit it with bsub -Q "99", or use a queue with REQUEUE_EXIT_VALUES'
            )
        return code

    def requeueable(self) -> str:
        codes = self._environ.get("LSB_EXIT_REQUEUE")
        return f"possible, by exit code {codes}" if codes else 'not possible: submit with #BSUB -Q "99"'

    def submit_next(self, script: Path | None) -> str:
        """See `BatchSystem`; bsub takes its options from the script's #BSUB lines."""
        job_id = self._job_id()
        if script is None:
            raise BatchError("LSF does not give out a job's script: name the one to submit")
        try:
            text = patiently(script.read_text)
        except OSError as error:
            raise BatchError(f"{script} cannot be submitted: {error.strerror}") from None
        argv = ("bsub", "-w", f"ended({job_id})")
        said = command_output(self._run, argv, environ=self._submit_environ(), stdin=text)
        submitted = re.search(r"Job <(\d+)>", said)
        if submitted is None:
            raise BatchError(f"bsub did not answer with a job id but {said.strip()[:60]!r}")
        return submitted[1]

    def release(self, names: Sequence[str]) -> None:
        """See `BatchSystem`: LSF takes slots of resizable jobs back (`bsub -ar`, or RESIZABLE_JOBS of the
        application profile), here all of a host. A requeued job gets its first size again.
        """
        if self._launcher() == "jsrun":
            raise BatchError("one jsrun runs the node agents of all hosts: none of them can be given back")
        argv = ("bresize", "release", "-rncn", " ".join(names), self._job_id())
        command_output(self._run, argv, environ=self._in_english())

    def comment(self, text: str) -> None:
        """Does nothing: LSF has no comment of a job."""

    def on_hosts(self, hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        """See `BatchSystem`: one blaunch a host, with `--name HOST` added, or one jsrun for all of them.

        jsrun places its resource sets itself, one a host: `hosts` must be the whole allocation, and what it
        starts has to tell its host's name by itself.
        """
        launcher = self._launcher()
        if launcher == "jsrun":
            shape = f"-n {len(hosts)} -r 1 -a 1 -g {self._jsrun_gpus} -c {self._jsrun_cpus} -b none"
            return [("jsrun", *shape.split(), *argv)]
        there = [(host.name, (*argv, "--name", host.name)) for host in hosts]
        if launcher == "ssh":
            return [ssh(name, each) for name, each in there]
        if launcher == "local":
            return [each for _, each in there]
        # -n: not our stdin; -no-shell: no shell over there that would take the arguments apart once more.
        return [("blaunch", "-n", name, "-no-shell", *each) for name, each in there]

    def version(self) -> str:
        answer = self._run(("lsid", "-V"), environ=self._environ)  # it answers on stderr
        for line in (answer.out + "\n" + answer.err).splitlines():
            if "LSF" in line:
                return line.strip()
        raise BatchError(f"lsid -V names no LSF: {answer.complaint()}")

    # --- within ----------------------------------------------------------------

    def _job_id(self) -> str:
        job_id = self._environ.get("LSB_JOBID", "")
        if not job_id:
            raise BatchError("LSB_JOBID is not set: this is not inside an LSF job")
        if not job_id.isdigit():
            raise BatchError(f"LSB_JOBID is {job_id[:40]!r}, which is no job id")
        index = self._environ.get("LSB_JOBINDEX", "0")
        return f"{job_id}[{index}]" if index.isdigit() and index != "0" else job_id

    def _record(self, job_id: str, *fields: str) -> dict[str, str]:
        """The record of a job, from bjobs in the newest form that it knows. Raises BatchError."""
        error = BatchError("bjobs was not asked")
        for form in (self._form,) if self._form else lsf_text.FORMS:
            answer = self._run(lsf_text.jobs_argv(job_id, *fields, form=form), environ=self._in_english())
            # An unknown job is told of on stderr, but in JSON.
            text = answer.out if answer.out.strip() else answer.err
            try:
                record = lsf_text.job_record(text, job_id, *fields, form=form, now=self._now())
            except BatchError as misread:
                error = misread if answer.code == 0 else BatchError(f"bjobs failed: {answer.complaint()}")
                continue
            if "ERROR" not in record:
                self._form = form
            return record
        raise error

    def _known(self, job_id: str) -> dict[str, str]:
        """End and GPUs of our job; without the GPUs where bjobs has no such field; empty if it fails."""
        record: dict[str, str] = {}
        with contextlib.suppress(BatchError):
            record = self._record(job_id, "stat", "finish_time")
            if self._form != "long":
                record |= self._record(job_id, "stat", "finish_time", "gpu_alloc")
        return record

    def _in_english(self) -> dict[str, str]:
        return {**self._environ, "LC_ALL": "C"}

    def _has_jsrun(self) -> bool:
        if self._given_launcher != "auto":
            return self._given_launcher != "blaunch" and (
                self._given_launcher == "jsrun" or self._jsrun_on_path()
            )
        return self._jsrun_on_path()

    def _jsrun_on_path(self) -> bool:
        import shutil

        return shutil.which("jsrun", path=self._environ.get("PATH", "")) is not None

    def _launcher(self) -> str:
        if self._given_launcher == "auto":
            return "jsrun" if self._jsrun_on_path() else "blaunch"
        return self._given_launcher

    def _here(self, hosts: Sequence[str]) -> str | None:
        short = (self._hostname or socket.gethostname()).partition(".")[0]
        return next((name for name in hosts if name.partition(".")[0] == short), None)

    def _submit_environ(self) -> dict[str, str]:
        """The environment for bsub, which hands it on: without the variables that describe this job."""
        return {
            key: value
            for key, value in self._environ.items()
            if not key.startswith(("LSB_", "JSM_", "PMIX_", CUDA.variable))
        }
