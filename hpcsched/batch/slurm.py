"""Slurm, by its own commands."""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hpcsched.batch import slurm_notes, slurm_steps, slurm_submit, slurm_text
from hpcsched.batch.base import AllocatedHost, Allocation, BatchJobState, BatchSystem, EndReason, Preemption
from hpcsched.batch.command import CommandOutput, RunCommand, command_output, run_command
from hpcsched.batch.hostlist import expand
from hpcsched.batch.local import ssh
from hpcsched.batch.numbers import whole
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.errors import BatchError
from hpcsched.patience import patiently

MAX_COMMENT_CHARS = 200
"""The longest comment of a job (chosen: it is for one line of a listing)."""


class Slurm(BatchSystem):
    """Slurm; tried on 22.05, and 25.11 once.

    Args:
        environ: the environment of this process: the job's, or a login node's for `job_state` and `version`.
        run: runs a command.
        launcher: how node agents are started: "srun", "ssh", or "local" (all on this machine).
        hostname: this machine's name; None: what the system says.
        cluster: the cluster whose jobs `job_state` is asked about; None: this one.
        there: whether a command is there; None: looked for in the PATH of `environ`, if `run` runs it.
    """

    kind = "slurm"
    launchers = ("srun", "ssh", "local")
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
        there: Callable[[str], object] | None = None,
    ) -> None:
        if environ.get("SLURM_JOB_ID"):
            # Which clusters the user's commands ask elsewhere: from inside a job its own is meant.
            environ = {key: value for key, value in environ.items() if key != "SLURM_CLUSTERS"}
        self._environ = environ
        path, real = environ.get("PATH"), run is run_command
        self._there = there or (lambda command: not real or shutil.which(command, path=path))
        self._cluster = cluster
        self._run = run
        self._launcher = launcher
        self._hostname = hostname
        self._gpu_counts: dict[str, int] = {}
        """The number of GPUs of this job by host, set by `allocation`; `on_hosts` must name it."""
        self._configuration = ""
        self._most_restarts = sys.maxsize
        self._overlap = True
        """Whether srun knows --overlap, set by `allocation`."""
        self._grace_s: float | None = None
        """The time of grace before a preemption, set by `allocation`; 0 without one."""

    @classmethod
    def inside(cls, environ: Mapping[str, str]) -> bool:
        return bool(environ.get("SLURM_JOB_ID"))

    @classmethod
    def restarted(cls, environ: Mapping[str, str]) -> bool:
        return environ.get("SLURM_RESTART_COUNT", "0") != "0"

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
        cpus = self._cpus_of_hosts()
        hosts = tuple(cpus)
        here = self._here(hosts)
        # The batch script's variables speak of the host it runs on, whatever a container renamed that to.
        gpus = slurm_steps.host_gpus(self._environ) if here else None
        try:
            deadline = self.end_time()
        except BatchError:
            deadline = self._promised_end()
        shown = self._shown(job_id)
        self._gpu_counts = self._count_gpus(shown, hosts)
        fields = slurm_text.shown_in(shown, job_id) or {}
        restarts = whole(fields.get("Restarts", ""))
        if self._restarts() and restarts is not None:
            # Slurm sets the variable for jobs that were restarted only: others may have inherited it.
            self._most_restarts = restarts
        missing = {command for command in slurm_notes.COMMANDS if not self._there(command)}
        if len(hosts) > 1 and self._launcher == "srun" and "srun" not in missing:
            with contextlib.suppress(BatchError):
                self._overlap = slurm_steps.has_overlap(self._asked(("srun", "--version")))
        return Allocation(
            kind=self.kind,
            id=job_id,
            hosts=tuple(
                AllocatedHost(name=name, cpus=count, gpus=gpus if name == here else None)
                for name, count in cpus.items()
            ),
            deadline=deadline,
            restart_count=self._restarts(),
            here=here,
            cluster=self._environ.get("SLURM_CLUSTER_NAME") or None,
            account=self._environ.get("SLURM_JOB_ACCOUNT") or None,
            partition=self._environ.get("SLURM_JOB_PARTITION") or None,
            preemption=self._preemption(),
            refused=slurm_notes.refused(fields, missing, het=self._is_heterogeneous()),
            notes=tuple(slurm_notes.notes(fields, missing, self._environ, end_known=deadline is not None)),
        )

    def end_time(self) -> float | None:
        job_id = self._job_id()
        rows = slurm_text.queue_rows(
            self._asked(slurm_text.queue_argv(job_id), slurm_text.queue_environ(self._environ))
        )
        # The array job whose id is the array's own is listed with all its brothers.
        parts = {part.get("SLURM_JOB_ID") for part in self._components()} | {job_id}
        ends = {found: end for found, _, end in reversed(rows) if found in parts}
        if job_id not in ends:
            raise BatchError(f"squeue does not list job {job_id}")
        for end in ends.values():
            if isinstance(end, str):  # not "no limit": the end known last is better than none
                raise BatchError(f"squeue gives {end[:40]!r} as the end of job {job_id}, which is no time")
        # Each component has a limit of its own, by which what runs there ends: the run's is the first.
        return min((end for end in ends.values() if isinstance(end, float)), default=None)

    def reason(self) -> EndReason:
        try:
            job_id = self._job_id()
            answer = self._run(slurm_text.show_argv(job_id), environ=slurm_text.queue_environ(self._environ))
        except BatchError:
            return EndReason.UNKNOWN
        return slurm_text.reason_in(answer, job_id, self._restarts(), self._grace_s)

    def kill_wait(self) -> float | None:
        return slurm_text.kill_wait_in(self._config()) if self._environ.get("SLURM_JOB_ID") else None

    def job_state(self, job_id: str) -> BatchJobState:
        """See `BatchSystem`. Another cluster is asked by `squeue --clusters`: that takes Slurm's database."""
        states = [slurm_text.state_in(answer, job_id) for answer in self._queued(job_id)]
        return slurm_text.liveliest(states)

    def why_waiting(self, job_id: str) -> str:
        said = (slurm_text.why_waiting(answer, job_id) for answer in self._queued(job_id))
        return next((why for why in said if why), "")

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

    def requeueable(self) -> str:
        try:
            said = self._run(("scontrol", "-o", "show", "job", self._job_id()), environ=self._environ).out
        except BatchError as error:
            return f"not known: {error}"
        if "Requeue=1" in said.split():
            return "possible"
        return "not possible: submit with #SBATCH --requeue" if "Requeue=0" in said else "not known"

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
        if self._is_heterogeneous():
            raise BatchError(slurm_notes.HET_CHAIN)
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
        fields = self._fields(job_id)
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
        if not self._there("srun"):
            raise BatchError("there is no srun here to start node agents on the other hosts: --launcher ssh")
        job_id = self._job_id()
        parts = self._components()
        part_of = {name: at for at in reversed(range(len(parts))) for name in slurm_steps.hosts_of(parts[at])}
        counts = self._gpu_counts or self._gpus_by_request()
        return [
            slurm_steps.step_argv(
                job_id,
                host.name,
                counts.get(host.name),
                self._environ,
                (*argv, "--name", host.name),
                component=part_of.get(host.name, 0) if len(parts) > 1 else None,
                overlap=self._overlap,
            )
            for host in hosts
        ]

    def script_pid(self) -> int | None:
        return None if "SLURM_STEP_ID" in self._environ else whole(self._environ.get("SLURM_TASK_PID", ""))

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
        if whole(job_id) is None:
            raise BatchError(f"SLURM_JOB_ID is {job_id[:40]!r}, which is no job id")
        return job_id

    def _restarts(self) -> int:
        """The number of requeues of the job when this start of it began."""
        return min(whole(self._environ.get("SLURM_RESTART_COUNT", "")) or 0, self._most_restarts)

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
        end = whole(self._environ.get("SLURM_JOB_END_TIME", ""))
        return float(end) if end else None

    def _components(self) -> tuple[Mapping[str, str], ...]:
        """The variables of this job, or of each component of a heterogeneous one."""
        return slurm_steps.components(self._environ)

    def _is_heterogeneous(self) -> bool:
        return len(self._components()) > 1

    def _cpus_of_hosts(self) -> dict[str, int | None]:
        """The hosts of all components, and the CPUs on each; of a host in two what the first has there."""
        found: dict[str, int | None] = {}
        for part in self._components():
            hosts = slurm_steps.hosts_of(part)
            counts = slurm_steps.cpu_counts(part.get("SLURM_JOB_CPUS_PER_NODE", ""), len(hosts))
            for name, count in zip(hosts, counts, strict=True):
                found.setdefault(name, count)
        return found

    def _gpus_by_request(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in reversed(self._components()):
            found |= dict(slurm_steps.gpus_by_request(part, slurm_steps.hosts_of(part)))
        return found

    def _shown(self, job_id: str) -> CommandOutput:
        argv = slurm_text.show_argv(job_id, "--details")
        try:
            return self._run(argv, environ=slurm_text.queue_environ(self._environ))
        except BatchError as error:
            return CommandOutput(1, "", str(error))

    def _fields(self, job_id: str) -> Mapping[str, str]:
        """What Slurm shows of this job. Raises BatchError."""
        answer = self._asked(slurm_text.show_argv(job_id))
        return slurm_text.shown_in(CommandOutput(0, answer), job_id) or {}

    def _queued(self, job_id: str) -> Iterator[CommandOutput]:
        """What squeue says of a job, on the cluster that it is of; of a federation's on all of them."""
        if not job_id[:1].isdigit():
            return  # squeue would take an empty id for "all jobs"
        environ = slurm_text.queue_environ(self._environ)
        elsewhere = self._cluster and self._cluster != slurm_text.cluster_in(self._config())
        federated = (whole(job_id) or 0) >= slurm_text.FEDERATED
        questions = ["--sibling"] if federated else [] if elsewhere else ["--local"]
        questions += [f"--clusters={self._cluster}"] if elsewhere else []
        for question in questions:
            with contextlib.suppress(BatchError):
                yield self._run(slurm_text.queue_argv(job_id, question), environ=environ)

    def _count_gpus(self, shown: CommandOutput, hosts: Sequence[str]) -> dict[str, int]:
        guess = self._gpus_by_request()
        if not any(key.startswith(("SLURM_GPUS", "SLURM_JOB_GPUS")) for key in self._environ):
            return guess
        if len(hosts) == 1 and guess:
            return guess
        try:
            return (slurm_text.gpu_counts(shown.out) if shown.code == 0 else {}) or guess
        except ValueError:
            return guess

    def _submit(self, job_id: str, script: Path, *, own: bool = False) -> str:
        try:
            words = patiently(lambda: script.read_text(errors="replace"))
        except OSError as error:
            raise BatchError(f"{script} cannot be submitted: {error.strerror}") from None
        fields = self._fields(job_id)
        options = (
            []
            if self._is_heterogeneous()  # they would be those of the first component
            else slurm_submit.inherited_options(words, fields, self._environ, own=own)
        )
        task = self._environ.get("SLURM_ARRAY_TASK_ID", "")
        if whole(task) is not None and (own or "--array" in slurm_submit.script_options(words)):
            options.append(f"--array={task}")  # this task alone, not the whole array once more
        if "FedOrigin" in fields and (cluster := self._environ.get("SLURM_CLUSTER_NAME")):
            options.append(f"--clusters={cluster}")  # where the run's files are
        said = self._asked(
            ("sbatch", "--parsable", f"--dependency=afterany:{job_id}", *options, str(script)),
            slurm_submit.submit_environ(self._environ),
        )
        # The last line: a site's submit plugin may have printed greetings. "12;cluster" in a federation.
        submitted = (said.split() or [""])[-1].partition(";")[0]
        if whole(submitted) is None:
            raise BatchError(f"sbatch did not answer with a job id but {said.strip()[:60]!r}")
        return submitted


def one_line(text: str) -> str:
    """A comment in the form that Slurm can show: printable, and at most `MAX_COMMENT_CHARS` long."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:MAX_COMMENT_CHARS]


def requeue_error(job_id: str, complaint: str) -> BatchError:
    """The error for a requeue that Slurm refused, with a remedy."""
    hint = "; submit it with #SBATCH --requeue" if "disabled" in complaint.lower() else ""
    return BatchError(f"Slurm does not requeue job {job_id}: {complaint}{hint}")
