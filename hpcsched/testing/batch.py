"""Stand-ins for the commands of batch systems and for the pyslurm package."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hpcsched.batch.command import CommandOutput
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import BatchError

SLURM_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_JOB_GPUS": "0,1,2,3,4,5",
    "SLURM_GPUS_ON_NODE": "6",
    "SLURM_GPUS_PER_NODE": "6",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "node1",
    CUDA.variable: "0,1,2,3,4,5",
}
"""The variables that matter, as Slurm 22.05 sets them in a batch script on two hosts of six GPUs."""

LSF_JOB = {
    "LSB_JOBID": "806290",
    "LSB_JOBINDEX": "0",
    "LSB_MCPU_HOSTS": "h1 16 h2 16",
    "LSB_HOSTS": "h1 " * 16 + "h2 " * 16,
    "LSB_EXIT_REQUEUE": "99",
    CUDA.variable: "0,1",
}
"""The variables that matter, as LSF 10.1 documents them, on two hosts of two GPUs; `hostname` is h1."""

SGE_JOB = {
    "JOB_ID": "11",
    "SGE_TASK_ID": "undefined",
    "SGE_ROOT": "/opt/sge",
    "QUEUE": "main",
    "NSLOTS": "8",
    "RESTARTED": "0",
    "HOSTNAME": "node1",
    "LOGNAME": "me",
    CUDA.variable: "0,1",
}
"""The variables that matter, as SGE 8.1.9 sets them; PE_HOSTFILE names a file with `SGE_HOSTS`."""
SGE_HOSTS = "node1 4 main@node1 UNDEFINED\nnode2 4 main@node2 UNDEFINED\n"


@dataclass
class FakeJob:
    """A job as its batch system knows it. `end` is Unix time, None: no limit. `state` is Slurm's word."""

    id: str
    state: str = "RUNNING"
    end: float | None = None
    requeueable: bool = True
    comment: str = ""
    restarts: int = 0
    why: str = ""
    """Slurm's `Reason`."""
    preempted: float | None = None
    """Since when it is, as Unix time."""
    hosts: tuple[str, ...] = ("node1", "node2")
    """The first one runs the batch script."""


@dataclass
class FakeCluster:
    """The state of a controller: jobs by id. Without `answers`, it cannot be reached."""

    jobs: dict[str, FakeJob] = field(default_factory=dict)
    answers: bool = True
    calls: list[tuple[str, ...]] = field(default_factory=list)
    environs: list[Mapping[str, str]] = field(default_factory=list)
    release: str = "22.05.8"
    config: str = "ClusterName             = marble\nKillWait                = 45 sec\n"
    partition: str = "PartitionName=main GraceTime=0 PreemptMode=OFF\n"

    def submit(self) -> str:
        job = str(1 + max((int(name) for name in self.jobs), default=0))
        self.jobs[job] = FakeJob(job, "PENDING")
        return job


def slurm_time(at: float) -> str:
    """A Unix time as Slurm prints it where TZ is UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class FakeSlurmCommands:
    """squeue, scontrol and sbatch over a `FakeCluster`, in the words of Slurm 22.05."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def __call__(self, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        self.cluster.calls.append(tuple(argv))
        self.cluster.environs.append(dict(environ))
        if argv[-1] == "--version":
            return CommandOutput(0, f"slurm-wlm {self.cluster.release}\n")
        if not self.cluster.answers:
            return CommandOutput(
                1, "", f"{argv[0]}: error: Unable to contact slurm controller (connect failure)\n"
            )
        acts: dict[str, Callable[[Sequence[str]], CommandOutput]] = {
            "squeue": self._squeue,
            "scontrol": self._scontrol,
            "sbatch": self._sbatch,
        }
        if argv[0] not in acts:
            raise BatchError(f"{argv[0]}: command not found; is the batch system on the PATH?")
        return acts[argv[0]](argv)

    def _squeue(self, argv: Sequence[str]) -> CommandOutput:
        wanted = next(word.partition("=")[2] for word in argv if word.startswith("--jobs="))
        job = self.cluster.jobs.get(wanted)
        if job is None:
            return CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified\n")
        end = "N/A" if job.end is None else slurm_time(job.end)
        return CommandOutput(0, f"{job.id}|{job.state}|{end}|{job.why or 'None'}\n")

    def _scontrol(self, argv: Sequence[str]) -> CommandOutput:
        if "config" in argv or "partition" in argv:
            return CommandOutput(0, self.cluster.config if "config" in argv else self.cluster.partition)
        name = next((word for word in reversed(argv) if re.fullmatch(r"(JobId=)?\d+", word)), "")
        job = self.cluster.jobs.get(name.removeprefix("JobId="))
        if job is None:
            return CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified\n")
        if "show" in argv:
            stamp = "None" if job.preempted is None else slurm_time(job.preempted)
            end = "Unknown" if job.end is None else slurm_time(job.end)
            shown = f"JobId={job.id} JobName=x Account=(null) Partition=main TimeLimit=00:10:00 NumNodes=2"
            shown += f" JobState={job.state} Reason={job.why or 'None'} Restarts={job.restarts}"
            shown += f" Requeue={int(job.requeueable)}"
            shown += f" PreemptTime={stamp} EndTime={end} NodeList={','.join(job.hosts)}"
            detail = "   Nodes=node[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:6(IDX:0-5)" if "--details" in argv else ""
            return CommandOutput(0, f"{shown}{detail} WorkDir=/tmp TresPerNode=gres:gpu:6 \n")
        if "requeue" in argv:
            if not job.requeueable:
                return CommandOutput(1, "", f"Requested operation is presently disabled for job {job.id}\n")
            job.state, job.restarts = "PENDING", job.restarts + 1
        elif argv[-1].startswith("NodeList="):
            return self._shrink(job, tuple(argv[-1].removeprefix("NodeList=").split(",")))
        elif "update" in argv:
            job.comment = argv[-1].removeprefix("Comment=")
        elif "write" in argv:
            from pathlib import Path

            Path(argv[-1]).write_text("#!/bin/sh\n#SBATCH --nodes=2\ntrue\n")
        return CommandOutput(0, "")

    def _shrink(self, job: FakeJob, hosts: tuple[str, ...]) -> CommandOutput:
        if job.hosts[0] not in hosts or not set(hosts) <= set(job.hosts):
            return CommandOutput(1, "", f"Invalid node name specified for job {job.id}\n")
        job.hosts = hosts
        return CommandOutput(0, "To reset Slurm environment variables, execute\n")

    def _sbatch(self, argv: Sequence[str]) -> CommandOutput:
        return CommandOutput(0, self.cluster.submit() + "\n")


class FakeLsfCommands:
    """bjobs, bsub and lsid over a `FakeCluster`, in the words that IBM documents for LSF 10.1.

    `form`: the newest of the forms of `lsf_text.FORMS` that this bjobs knows; `history` is what bhist prints.
    """

    WORDS: Mapping[str, str] = {
        "PENDING": "PEND",
        "RUNNING": "RUN",
        "SUSPENDED": "USUSP",
        "COMPLETED": "DONE",
        "FAILED": "EXIT",
    }

    def __init__(self, cluster: FakeCluster, *, form: str = "json", history: str = "") -> None:
        self.cluster, self.form, self.history = cluster, form, history

    def __call__(self, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        self.cluster.calls.append(tuple(argv))
        self.cluster.environs.append(dict(environ))
        if argv[0] == "lsid":
            return CommandOutput(0, "", "IBM Spectrum LSF 10.1.0.0 build 601088\nCopyright\n")
        if not self.cluster.answers:
            return CommandOutput(255, "", "Failed in an LSF library call: LIM is down; try later\n")
        if argv[0] == "bsub":
            return CommandOutput(
                0, f"Job <{self.cluster.submit()}> is submitted to default queue <normal>.\n"
            )
        if argv[0] == "bresize":
            job, gone = self.cluster.jobs[argv[-1]], argv[-2].split()
            if not set(gone) <= set(job.hosts[1:]):
                return CommandOutput(255, "", f"<{argv[-2]}>: Bad host specification. Request not sent\n")
            job.hosts = tuple(host for host in job.hosts if host not in gone)
            return CommandOutput(0, "Job resize request is submitted.\n")
        if argv[0] == "bhist":
            return CommandOutput(0, self.history)
        if argv[0] == "bparams":
            return CommandOutput(0, "The interval to terminate a job:\n    JOB_TERMINATE_INTERVAL = 15 \n")
        for option, forms in (("-json", ("json",)), ("-o", ("json", "delimiter"))):
            if option in argv and self.form not in forms:
                return CommandOutput(255, "", f"bjobs: illegal option -- {option[1]}\nUsage: bjobs [-h]\n")
        return self._bjobs(argv)

    def _bjobs(self, argv: Sequence[str]) -> CommandOutput:
        import json

        job = self.cluster.jobs.get(argv[-1])
        waiting = "Cannot connect to LSF. Please wait ...\n"
        if job is None:
            unknown = f"Job <{argv[-1]}> is not found"
            if "-json" not in argv:
                return CommandOutput(255, "", unknown + "\n")
            record = {"JOBID": argv[-1], "ERROR": unknown}
        else:
            end = "-"
            if job.end is not None:
                end = datetime.fromtimestamp(job.end).strftime("%b %d %H:%M:%S %Y L")
            word = self.WORDS.get(job.state, job.state)
            record = {"JOBID": job.id, "STAT": word, "FINISH_TIME": end, "GPU_ALLOC": "h1:0,1;h2:0,1"}
        if "-l" in argv and job is not None:
            limit = ""
            if job.end is not None:
                started = datetime.fromtimestamp(job.end - 7200).strftime("%a %b %d %H:%M:%S")
                limit = f"\n RUNLIMIT                \n 120.0 min of h1\n{started}: Started on <h1>;\n"
            return CommandOutput(
                0, f"{waiting}\nJob <{job.id}>, User <me>, Status <{record['STAT']}>, Queue <q>{limit}"
            )
        if "-json" not in argv:
            names = [word.upper() for word in argv[argv.index("-o") + 1].split()[:-1]]
            return CommandOutput(0, f"{'|'.join(names)}\n{'|'.join(record[name] for name in names)}\n")
        answer = {"COMMAND": "bjobs", "JOBS": "1", "RECORDS": [record]}
        return CommandOutput(0, waiting + json.dumps(answer, indent=2))


class FakeSgeCommands:
    """qstat, qconf, qsub and qalter over a `FakeCluster`, in the words of SGE 8.1.9."""

    WORDS: Mapping[str, str] = {"PENDING": "hqw", "RUNNING": "r", "SUSPENDED": "s", "BAFFLED": "?"}
    LASTS_S = 7200

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def __call__(self, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        self.cluster.calls.append(tuple(argv))
        self.cluster.environs.append(dict(environ))
        if argv[-1] == "-help":
            return CommandOutput(0, "SGE 8.1.9\nusage: qstat [options]\n")
        if not self.cluster.answers:
            return CommandOutput(1, "", "error: commlib error: got select error (Connection refused)\n")
        if argv[0] == "qconf":
            return CommandOutput(
                0, "qname                 main\nnotify                00:00:60\nh_rt INFINITY\n"
            )
        if argv[0] == "qsub":
            return CommandOutput(0, f"{self.cluster.submit()}\n")
        if argv[0] == "qalter":
            if (job := self.cluster.jobs.get(argv[-1])) is None:
                return CommandOutput(1, "", f'denied: job "{argv[-1]}" does not exist\n')
            job.comment = argv[-2]
            return CommandOutput(0, f"modified context of job {argv[-1]}\n")
        return CommandOutput(0, self._one(argv[-1]) if "-j" in argv else self._listing())

    def _one(self, name: str) -> str:
        job = self.cluster.jobs.get(name)
        if job is None or job.state in ("COMPLETED", "FAILED"):
            return f"<?xml version='1.0'?>\n<unknown_jobs >\n<ST_name>{name}</ST_name>\n</unknown_jobs>\n"
        start = int(job.end or 1795912490) - self.LASTS_S
        limit = f"<qstat_l_requests><CE_name>h_rt</CE_name><CE_stringval>{self.LASTS_S}</CE_stringval>"
        limit = f"{limit}</qstat_l_requests>" if job.end is not None else ""
        return (
            f"<detailed_job_info><djob_info><element><JB_job_number>{job.id}</JB_job_number>"
            f"<JB_owner>me</JB_owner><JB_hard_resource_list>{limit}</JB_hard_resource_list>"
            f"<JB_ja_tasks><ulong_sublist><JAT_status>128</JAT_status><JAT_task_number>1</JAT_task_number>"
            f"<JAT_start_time>{start}</JAT_start_time></ulong_sublist></JB_ja_tasks>"
            "</element></djob_info></detailed_job_info>\n"
        )

    def _listing(self) -> str:
        rows = "".join(
            f"<job_list><JB_job_number>{job.id}</JB_job_number><state>{self.WORDS[job.state]}</state></job_list>"
            for job in self.cluster.jobs.values()
            if job.state in self.WORDS
        )
        return f"<job_info><queue_info>{rows}</queue_info></job_info>\n"


def asked_directly(module: Any) -> Callable[..., Any]:
    """For `PySlurm`: a module with the parts of pyslurm, asked without a process between."""
    from hpcsched.batch.pyslurm import pyslurm_calls

    known = pyslurm_calls(module)

    def ask(name: str, *words: Any) -> Any:
        try:
            return known[name](*words)
        except module.RPCError as error:
            raise BatchError(str(error)) from None

    return ask


def fake_pyslurm(cluster: FakeCluster, *, release: str = "25.11.2") -> Any:
    """A module with the parts of pyslurm 25.11 that hpcsched uses, over a `FakeCluster`.

    `__version__`; `RPCError(errno, msg)` with `errno` and `msg`; `JobSubmitDescription(**fields)`, of which
    `comment`; `Job(id)` and `Job.load(id)`, an int, with `id`, `state` (Slurm's word), `end_time` (Unix time,
    or None), `requeue(hold=False)` and `modify(description)`. Names, types and errors as in its source.
    """
    from types import SimpleNamespace

    class RPCError(Exception):
        def __init__(self, errno: int = -1, msg: str | None = None) -> None:
            self.errno, self.msg = errno, msg
            super().__init__(msg)

    class JobSubmitDescription:
        def __init__(self, **fields: Any) -> None:
            self.comment: str | None = None
            for name, value in fields.items():
                setattr(self, name, value)

    def known(job_id: int) -> FakeJob:
        if type(job_id) is not int:
            raise TypeError("an integer is required")
        if not cluster.answers:
            raise RPCError(1800, "Unable to contact slurm controller (connect failure)")
        if str(job_id) not in cluster.jobs:
            raise RPCError(2017, "Invalid job id specified")
        return cluster.jobs[str(job_id)]

    class Job:
        def __init__(self, job_id: int) -> None:
            self.id = job_id
            self.state: str | None = None
            self.end_time: int | None = None

        @staticmethod
        def load(job_id: int) -> Job:
            found, job = known(job_id), Job(job_id)
            job.state, job.end_time = found.state, None if found.end is None else int(found.end)
            return job

        def requeue(self, hold: bool = False) -> None:
            job = known(self.id)
            if not job.requeueable:
                raise RPCError(2015, "Requested operation is presently disabled")
            job.state, job.restarts = "PENDING", job.restarts + 1

        def modify(self, changes: JobSubmitDescription) -> None:
            known(self.id).comment = changes.comment or ""

    return SimpleNamespace(
        __version__=release, RPCError=RPCError, JobSubmitDescription=JobSubmitDescription, Job=Job
    )
