"""Variables as a target: those of users and batch systems, and what programs are told and say."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from hpcsched.batch import kinds, open_batch
from hpcsched.batch.base import AllocatedHost
from hpcsched.batch.lsf import Lsf
from hpcsched.batch.sge import Sge
from hpcsched.batch.slurm import Slurm
from hpcsched.contract import codec, metrics, orders, progress, ranks, state, words, zygote
from hpcsched.contract import variables as names
from hpcsched.contract.environment import Environment
from hpcsched.errors import BadInput, ConfigError, HpcschedError
from hpcsched.testing.batch import (
    LSF_JOB,
    SGE_HOSTS,
    SGE_JOB,
    SLURM_JOB,
    FakeCluster,
    FakeJob,
    FakeLsfCommands,
    FakeSgeCommands,
    FakeSlurmCommands,
)

from . import corpus
from .sandbox import NotPlayed, check_line, command, refused


def environments() -> list[bytes]:
    """Variables of jobs of each batch system, and those of users."""
    own = {
        "HPCSCHED_DEVICES": "cpu:2",
        "HPCSCHED_POLICY": "planner",
        "HPCSCHED_MONITOR": "5",
        "HPCSCHED_WARM": "2",
        "HPCSCHED_HOSTS": "a,b",
        "HPCSCHED_MARGIN": "60",
        "HPCSCHED_GRACE": "30",
        "HPCSCHED_BATCH": "none",
        "HPCSCHED_PROFILES": "marble-summit",
        "HPCSCHED_CPUS_PER_GPU": "4",
        "HPCSCHED_GPUS_PER_NODE": "4",
    }
    places = {"HPCSCHED_DIR": "run", "HPCSCHED_CONFIG": "site.toml", "HPCSCHED_DATABASE": "x.db", "HOME": "."}
    more = {
        "XDG_STATE_HOME": "s",
        "COLUMNS": "80",
        "LANG": "C",
        "HPCSCHED_MAX_RESTARTS": "3",
        "HPCSCHED_REQUEUE": "1",
    }
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_RESTART_COUNT": "1"}
    slurm = {
        "SLURM_JOB_NODELIST": "n[01-03,7],gpu-[1-2]-[3-4]",
        "SLURM_JOB_CPUS_PER_NODE": "72(x2),36",
        **het,
    }
    found: list[dict[str, str]] = [
        SLURM_JOB,
        {**SLURM_JOB, **slurm},
        LSF_JOB,
        SGE_JOB,
        own,
        {**places, **more},
    ]
    return [json.dumps(each).encode() for each in found]


_ASKS = (
    "config show --origin",
    "status",
    "top -n 1",
    "simulate jobs.toml --profiles marble-summit --gpus-per-node 2",
    "explain",
)


def environment(folder: Path, data: bytes) -> str:
    """Variables as commands read them, and those of a batch system's job as its adapter does."""
    told = json.loads(data)
    if not isinstance(told, dict):
        raise NotPlayed("no table")
    told = {key: value for key, value in told.items() if key and "=" not in key}
    (folder / "jobs.toml").write_text(
        'schema = 1\n[[job]]\nname = "a"\nmodel = "ResNet-50"\ncommand = ["a"]\nsteps = 9\n'
    )
    corpus.with_run(folder)
    (folder / "site.toml").write_text('policy = "marble"\n')
    (folder / "hosts").write_text(SGE_HOSTS)
    _adapters({**told, "PE_HOSTFILE": str(folder / "hosts")} if "JOB_ID" in told else told)
    os.environ.update({key: value for key, value in told.items() if key not in ("PATH", "PYTHONPATH")})
    return "; ".join(command(folder, *ask.split()) for ask in _ASKS)


def _adapters(environ: dict[str, str]) -> None:
    """All that an agent asks its batch system for."""
    refused(lambda: kinds.detected(environ))
    refused(lambda: kinds.restarted(environ))
    refused(lambda: open_batch("auto", environ=environ, pyslurm="off"))
    jobs = {name: FakeJob(name) for name in ("7", "11", "806290", environ.get("SLURM_JOB_ID", "1"))}
    cluster = FakeCluster(jobs=jobs)
    for batch in (
        Slurm(environ, run=FakeSlurmCommands(cluster), hostname="node1"),
        Lsf(environ, run=FakeLsfCommands(cluster), hostname="h1"),
        Sge(environ, run=FakeSgeCommands(cluster), hostname="node1"),
    ):
        hosts: list[AllocatedHost] = []
        with contextlib.suppress(HpcschedError):
            hosts = [*batch.allocation().hosts]
        for ask in (
            batch.allocation,
            batch.end_time,
            batch.reason,
            batch.kill_wait,
            batch.requeueable,
            batch.script_pid,
        ):
            refused(ask)
        refused(partial(batch.on_hosts, hosts[:100], ("agent",)))
        refused(partial(batch.comment, "a line"))


def examples() -> list[bytes]:
    """What processes of jobs are told, and say."""
    known = Environment(
        run_id="r",
        job_id=1,
        attempt=2,
        devices=("0", "1"),
        checkpoint_every_s=60.0,
        resume=True,
        args={"lr": 0.1},
        strategy={"kind": "ddp"},
        rank=0,
        world_size=2,
        local_rank=0,
        control_fd=5,
        epochs=3.0,
    ).to_environ()
    seats = {names.SEATS: '[{"server": true, "share": 0.5, "cores": [0]}, {"server": false, "share": 1.0}]'}
    said = {
        "STATE": '{"step": 3, "samples": 96, "checkpoint": "c", "attempt": 1, "metrics": {"loss": 0.5}}',
        "LINE": '{"step": 3, "samples": 96, "epoch": 1.5, "rate": 2.5}',
        "READY": '{"pid": 1, "contract": "1.0", "start_s": 3.5}',
        "ORDERS": '{"order": "resize", "attempt": 3, "world_size": 3, "keep": [0, 1], "one_host": false}',
        "POINT": '{"t": 1795362268.107, "attempt": 2, "step": 270, "samples": 96, "loss": 0.5}',
        "REQUEST": '{"argv": ["a"], "env": {"A": "1"}, "cwd": "/", "module": "", "output": "o"}',
    }
    launched = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "SLURM_PROCID": "1",
    }
    return [
        json.dumps(each).encode()
        for each in ({**known, **launched}, {**known, **seats}, said, {**said, **launched})
    ]


_DECODERS = {
    "STATE": (state.State.decode, words.Held.decode, codec.document),
    "LINE": (progress.Line.decode,),
    "READY": (
        words.Ready.decode,
        words.Versions.decode,
        words.Unusable.decode,
        words.Stop.decode,
        words.refusal,
    ),
    "ORDERS": (orders.decode, lambda data: orders.Pace.decode(data.decode("utf-8", "replace"))),
    "POINT": (metrics.Point.decode,),
    "REQUEST": (zygote.Request.decode, zygote.decode_answer),
}


def contract(folder: Path, data: bytes) -> str:
    """What a process is told by its environment, and what programs say in return."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise NotPlayed("no table")
    errors = [
        _only(lambda: Environment.from_environ(found), ConfigError),
        _only(lambda: ranks.own_rank(found), ConfigError),
    ]
    for name, decoders in _DECODERS.items():
        said = str(found.get(name, "")).encode("utf-8", "surrogateescape")
        errors += [_only(partial(decode, said), BadInput) for decode in decoders]
    return "; ".join(filter(None, errors))[:500]


def _only(what: Any, kind: type[HpcschedError]) -> str:
    try:
        what()
    except kind as error:
        check_line(str(error))
        return str(error)
    return ""
