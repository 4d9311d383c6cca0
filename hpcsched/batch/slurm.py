"""Slurm, by its own commands."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcsched.batch import slurm_text
from hpcsched.batch.base import AllocatedHost, Allocation, BatchJobState, EndReason, Preemption
from hpcsched.batch.command import RunCommand, command_output, run_command
from hpcsched.batch.hostlist import expand
from hpcsched.batch.local import ssh
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.errors import BatchError

MAX_COMMENT_CHARS = 200
"""The longest comment of a job (chosen: it is for one line of a listing)."""

LAUNCHERS = ("srun", "ssh", "local")


class Slurm:
    """Slurm 20.11 or later; tried on 22.05.

    Args:
        environ: the environment of this process: the job's, or a login node's for `job_state` and `version`.
        run: runs a command.
        launcher: how node agents are started: "srun", "ssh", or "local" (all on this machine).
        hostname: this machine's name; None: what the system says.
        cluster: the cluster whose jobs `job_state` is asked about; None: this one.
    """

    kind = "slurm"
    says_none = True
    takes_back = True

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        run: RunCommand = run_command,
        launcher: str = "srun",
        hostname: str | None = None,
        cluster: str | None = None,
    ) -> None:
        self._environ = environ
        self._cluster = cluster
        self._run = run
        self._launcher = launcher
        self._hostname = hostname
        self._gpu_counts: dict[str, int] = {}
        """The number of GPUs of this job by host, set by `allocation`; `on_hosts` must name it."""
        self._configuration = ""
        self._most_restarts = sys.maxsize
        self._grace_s: float | None = None
        """The time of grace before a preemption, set by `allocation`; 0 without one."""

    def allocation(self) -> Allocation:
        """See `BatchSystem`. With several hosts and GPUs it asks a second question: how many are where.

        An answer missing there is made up for by what the job was submitted with.
        """
        job_id = self._job_id()
        if self._environ.get("SLURM_PROCID", "0") != "0":
            times = self._environ.get("SLURM_STEP_NUM_TASKS", "several")
            raise BatchError(
                f"srun started this {times} times over, once for each task: start it in the batch "
                "script, with no srun before it"
            )
        hosts = slurm_text.hosts_of(self._environ)
        here = self._here(hosts)
        cpus = slurm_text.cpu_counts(self._environ.get("SLURM_JOB_CPUS_PER_NODE", ""), len(hosts))
        # The batch script's variables speak of the host it runs on, whatever a container renamed that to.
        gpus = slurm_text.host_gpus(self._environ) if here else None
        try:
            deadline = self.end_time()
        except BatchError:
            deadline = self._promised_end()
        self._gpu_counts = self._count_gpus(job_id, hosts)
        self._check_restarts(job_id)
        return Allocation(
            kind=self.kind,
            id=job_id,
            hosts=tuple(
                AllocatedHost(name=name, cpus=count, gpus=gpus if name == here else None)
                for name, count in zip(hosts, cpus, strict=True)
            ),
            deadline=deadline,
            restart_count=self._restarts(),
            here=here,
            cluster=self._environ.get("SLURM_CLUSTER_NAME") or None,
            preemption=self._preemption(),
        )

    def end_time(self) -> float | None:
        job_id = self._job_id()
        rows = slurm_text.queue_rows(
            self._asked(slurm_text.queue_argv(job_id), slurm_text.queue_environ(self._environ))
        )
        # The array job whose id is the array's own is listed with all its brothers.
        for found, _, end in rows:
            if found != job_id:
                continue
            if isinstance(end, str):  # not "no limit": the end known last is better than none
                raise BatchError(f"squeue gives {end[:40]!r} as the end of job {job_id}, which is no time")
            return end
        raise BatchError(f"squeue does not list job {job_id}")

    def reason(self) -> EndReason:
        try:
            job_id = self._job_id()
            argv = ("scontrol", "--oneliner", "show", "job", job_id)
            answer = self._run(argv, environ=slurm_text.queue_environ(self._environ))
        except BatchError:
            return EndReason.UNKNOWN
        return slurm_text.reason_in(answer, job_id, self._restarts(), self._grace_s)

    def kill_wait(self) -> float | None:
        return slurm_text.kill_wait_in(self._config()) if self._environ.get("SLURM_JOB_ID") else None

    def job_state(self, job_id: str) -> BatchJobState:
        """See `BatchSystem`. Another cluster is asked by `squeue --clusters`: that takes Slurm's database."""
        if not job_id[:1].isdigit():
            return BatchJobState.UNKNOWN  # squeue would take an empty id for "all jobs"
        argv = slurm_text.queue_argv(job_id)
        if self._cluster and self._cluster != slurm_text.cluster_in(self._config()):
            argv = (*argv, f"--clusters={self._cluster}")
        try:
            answer = self._run(argv, environ=slurm_text.queue_environ(self._environ))
        except BatchError:
            return BatchJobState.UNKNOWN
        return slurm_text.state_in(answer, job_id)

    def requeue(self) -> int:
        """See `BatchSystem`; Slurm sends the whole job SIGTERM the moment it agrees.

        The job waits about two minutes before it may start again.
        """
        job_id = self._job_id()
        answer = self._run(("scontrol", "requeue", job_id), environ=self._environ)
        # Where Slurm tracks processes by cgroup it ends even a scontrol that is in a session of its own:
        # what ended it is the very thing it asked for.
        if answer.code not in (0, -15, 143):
            raise requeue_error(job_id, answer.complaint())
        return WORK_LEFT  # Slurm itself does not mind

    def submit_next(self, script: Path | None) -> str:
        """See `BatchSystem`.

        Of another script the options in its #SBATCH lines count. Where it gives none, and always for this
        job's own script (what was said beside it counted more), the follow-up job gets this one's: partition,
        account, QOS, time limit (as it is now), working directory, name, and numbers of nodes, tasks, CPUs a
        task, GPUs and memory. Not carried over, because Slurm does not tell them reliably: output files,
        constraints, reservations, licences, mail, signals, `--no-kill`, the script's arguments. They belong
        into #SBATCH lines.
        """
        job_id = self._job_id()
        if script is not None:
            return self._submit(job_id, script)
        import tempfile

        with tempfile.TemporaryDirectory(prefix="hpcsched-") as folder:
            copy = Path(folder) / "job.sh"
            self._asked(("scontrol", "write", "batch_script", job_id, str(copy)))
            return self._submit(job_id, copy, own=True)

    def release(self, names: Sequence[str]) -> None:
        """See `BatchSystem`: the job shrinks to its other hosts, as Slurm itself lists them now.

        Slurm ends what runs on the hosts by SIGKILL, and leaves `slurm_job_<id>_resize.sh` in the working
        directory, for scripts that go on after us. A requeued job gets its first size again.
        """
        job_id = self._job_id()
        fields = slurm_text.job_fields(self._asked(("scontrol", "--oneliner", "show", "job", job_id)))
        try:
            there = expand(fields.get("NodeList", ""))
        except ValueError as error:
            raise BatchError(f"the hosts of job {job_id} cannot be understood: {error}") from None
        rest = [name for name in there if name not in names]
        if not rest or len(rest) + len(names) != len(there):
            raise BatchError(f"Slurm lists {len(there)} hosts of job {job_id}, not all of those to give back")
        self._asked(("scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(rest)}"))

    def comment(self, text: str) -> None:
        line = one_line(text)
        self._asked(("scontrol", "update", f"JobId={self._job_id()}", f"Comment={line}"))

    def on_hosts(self, hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        """See `BatchSystem`: one srun a host, each with `--name HOST` added.

        On a job with GPUs call `allocation` first: it learns how many are where, and steps must say so.

        Ending srun (SIGTERM or SIGKILL) ends the processes of the step at once, by SIGKILL and without a
        SIGTERM before it. SIGUSR1 and SIGUSR2 srun passes on, to every process of the step: not only to
        what it started. Where Slurm tracks processes by their parents (`ProctrackType=proctrack/linuxproc`)
        and not by cgroup, a process whose parent has ended has left the step and lives on; should what was
        started be killed on its host, that goes for all it has started. Then srun ends at once if they
        write into files of their own; if they hold the step's stdout or stderr, only after the last of them.
        """
        if self._launcher != "srun":
            there = [(host.name, (*argv, "--name", host.name)) for host in hosts]
            return [ssh(name, each) if self._launcher == "ssh" else each for name, each in there]
        job_id = self._job_id()
        names = slurm_text.hosts_of(self._environ)
        counts = self._gpu_counts or dict(slurm_text.gpus_by_request(self._environ, names))
        return [
            slurm_text.step_argv(
                job_id, host.name, counts.get(host.name), self._environ, (*argv, "--name", host.name)
            )
            for host in hosts
        ]

    def version(self) -> str:
        words = self._asked(("scontrol", "--version")).split()
        if len(words) < 2 or not words[0].startswith("slurm"):
            raise BatchError(f"scontrol --version says {' '.join(words)[:60]!r}, which names no Slurm")
        return f"Slurm {words[1]}"

    # --- within ----------------------------------------------------------------

    def _job_id(self) -> str:
        job_id = self._environ.get("SLURM_JOB_ID") or self._environ.get("SLURM_JOBID") or ""
        if not job_id:
            raise BatchError("SLURM_JOB_ID is not set: this is not inside a Slurm job")
        if not job_id.isdigit():
            raise BatchError(f"SLURM_JOB_ID is {job_id[:40]!r}, which is no job id")
        return job_id

    def _restarts(self) -> int:
        """The number of requeues of the job when this start of it began."""
        count = self._environ.get("SLURM_RESTART_COUNT", "")
        return min(int(count), self._most_restarts) if count.isdigit() else 0

    def _check_restarts(self, job_id: str) -> None:
        """Slurm sets the variable for jobs that were restarted only: others may have inherited it."""
        if self._restarts():
            argv = ("scontrol", "--oneliner", "show", "job", job_id)
            with contextlib.suppress(BatchError):
                shown = slurm_text.restarts_in(self._run(argv, environ=self._environ), job_id)
                self._most_restarts = self._most_restarts if shown is None else shown

    def _config(self) -> str:
        """The output of `scontrol show config`, asked for once; empty when that fails."""
        if not self._configuration:
            with contextlib.suppress(BatchError):
                self._configuration = self._asked(("scontrol", "show", "config"))
        return self._configuration

    def _preemption(self) -> Preemption | None:
        partition = self._environ.get("SLURM_JOB_PARTITION")
        if not partition:
            return None
        try:
            shown = self._asked(("scontrol", "--oneliner", "show", "partition", partition))
        except BatchError:
            return None
        preemption = slurm_text.preemption_in(shown, self._config())
        self._grace_s = preemption.grace_s if preemption else 0.0
        return preemption

    def _asked(self, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
        return command_output(self._run, argv, environ=self._environ if environ is None else environ)

    def _here(self, hosts: Sequence[str]) -> str | None:
        named = self._environ.get("SLURMD_NODENAME")
        if named in hosts:
            return named
        short = (self._hostname or socket.gethostname()).partition(".")[0]
        return next((name for name in hosts if name.partition(".")[0] == short), None)

    def _promised_end(self) -> float | None:
        """The end as it was when the job started, from a variable of newer releases; None without it."""
        end = self._environ.get("SLURM_JOB_END_TIME", "")
        return float(end) if end.isdigit() and int(end) > 0 else None

    def _count_gpus(self, job_id: str, hosts: Sequence[str]) -> dict[str, int]:
        guess = dict(slurm_text.gpus_by_request(self._environ, hosts))
        if not any(key.startswith(("SLURM_GPUS", "SLURM_JOB_GPUS")) for key in self._environ):
            return guess
        if len(hosts) == 1 and guess:
            return guess
        try:
            answer = self._asked(("scontrol", "--details", "--oneliner", "show", "job", job_id))
            return slurm_text.gpu_counts(answer) or guess
        except (BatchError, ValueError):
            return guess

    def _submit(self, job_id: str, script: Path, *, own: bool = False) -> str:
        try:
            words = script.read_text(errors="replace")
        except OSError as error:
            raise BatchError(f"{script} cannot be submitted: {error.strerror}") from None
        if self._environ.get("SLURM_ARRAY_TASK_ID") and (
            own or "--array" in slurm_text.script_options(words)
        ):
            raise BatchError(
                "the job that follows one task of an array would be the whole array: use --requeue"
            )
        fields = slurm_text.job_fields(self._asked(("scontrol", "--oneliner", "show", "job", job_id)))
        options = slurm_text.inherited_options(words, fields, self._environ, own=own)
        said = self._asked(
            ("sbatch", "--parsable", f"--dependency=afterany:{job_id}", *options, str(script)),
            slurm_text.submit_environ(self._environ),
        )
        # The last line: a site's submit plugin may have printed greetings. "12;cluster" in a federation.
        submitted = (said.split() or [""])[-1].partition(";")[0]
        if not submitted.isdigit():
            raise BatchError(f"sbatch did not answer with a job id but {said.strip()[:60]!r}")
        return submitted


def one_line(text: str) -> str:
    """A comment in the form that Slurm can show: printable, and at most `MAX_COMMENT_CHARS` long."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:MAX_COMMENT_CHARS]


def requeue_error(job_id: str, complaint: str) -> BatchError:
    """The error for a requeue that Slurm refused, with a remedy."""
    hint = "; submit it with #SBATCH --requeue" if "disabled" in complaint.lower() else ""
    return BatchError(f"Slurm does not requeue job {job_id}: {complaint}{hint}")
