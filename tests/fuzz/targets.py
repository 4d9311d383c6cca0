"""What is fuzzed: for each target the form of its inputs, what to begin with, and what is done with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from . import arguments, corpus, inner, variables, wire
from .forms import FORMS, Form
from .sandbox import CODES, command

Act = Callable[[Path, bytes], "str | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of input. `act` plays one in an empty folder: it raises what must not come out."""

    name: str
    about: str
    form: Form
    seeds: Callable[[], Sequence[bytes]]
    act: Act
    guided: bool = False
    """Whether lines newly reached guide the choice of what is changed next: see `python -m tests.fuzz`."""


def _commands(
    file: str, *choices: str, codes: Sequence[int] = CODES, beside: Callable[[Path], None] | None = None
) -> Act:
    """The input as `file`; one of these command lines, by its checksum. `beside` makes what else is there."""

    def act(folder: Path, data: bytes) -> str:
        if beside:
            beside(folder)
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        words = choices[crc32(data) % len(choices)].split()
        return f"{' '.join(words)}: {command(folder, *words, codes=codes)}"

    return act


_SIMULATE = "simulate jobs.toml --gpus-per-node 4 --profiles marble-summit"


def _few_documents(*patterns: str, having: str, key: str, most: int) -> list[bytes]:
    """Documents cut to a size that is planned in a moment."""
    return [
        corpus.a_piece(data, key, most) for data in corpus.documents(*patterns, having=having, most=10**6)
    ]


def _json(table: Any) -> bytes:
    return json.dumps(table).encode()


def _of_runs(name: str) -> list[bytes]:
    return [(path / name).read_bytes() for path in corpus.run_folders() if (path / name).exists()]


_TRACE = b"""submit_s,duration_s,gpus,name,model
0,600,1,a,ResNet-50
5.5,60,2,b,
1e3,3600,4,c,VGG-16
"""
_TRACE_OF_MODELS = b"""time,application,num_replicas,batch_size
0,bert,2,12
100,cifar10,1,128
"""


def _layer(number: int, *prev: int, most: int = 8) -> dict[str, Any]:
    times = {str(gpus): 900.0 / gpus + 20 for gpus in (1, 2, 3, 4, 8) if gpus <= most}
    sync = dict.fromkeys(times, 30)
    return {"id": number, "name": f"conv{number}", "prev": [*prev], "time_us": times, "sync_us": sync}


def _table(*layers: dict[str, Any], gpus: int) -> bytes:
    """A table for `plan burst`, with transfers for its first pair of layers."""
    counts = [*layers[0]["time_us"]]
    lags = {here: dict.fromkeys(counts, 12.5) for here in counts}
    transfers = [{"from": 0, "to": 1, "time_us": lags}]
    more = {"global_batch": 32, "amplification_limit": 2.0, "layers": layers, "transfers": transfers}
    return _json({"schema": 1, "model": "m", "gpus": gpus, **more})


_BURST = _table(_layer(0), _layer(1, 0), _layer(2, 1, most=4), gpus=8)
_BRANCHES = _table(*(_layer(i, 0) if 0 < i < 4 else _layer(i, *range(1, i)) for i in range(5)), gpus=4)

_LISTED = (
    Target(
        name="jobs",
        about="job files",
        form=FORMS["toml"],
        seeds=lambda: (corpus.JOBS.encode(), *corpus.tables("jobs")),
        act=_commands(
            "jobs.toml",
            _SIMULATE,
            f"{_SIMULATE} --policy planner --json",
            "script slurm jobs.toml --time 60 --gpus-per-node 2",
            "submit jobs.toml --dir run",
            "advise jobs.toml --gpus 1-2 --time 1h --profiles marble-summit --batch none",
            "simulate jobs.toml --gpus-per-node 2 --cpus 8 --profiles gavel-v100 --policy exclusive",
        ),
    ),
    Target(
        name="search",
        about="search files",
        form=FORMS["toml"],
        seeds=lambda: corpus.tables("search"),
        act=inner.search,
    ),
    Target(
        name="site",
        about="settings files of a site, a user and a project",
        form=FORMS["toml"],
        seeds=lambda: corpus.tables("settings"),
        act=_commands(
            "site.toml",
            "--config site.toml config show --origin",
            "--config site.toml config show --json",
            f"--config site.toml {_SIMULATE}",
            "--config site.toml script slurm jobs.toml",
            "--config site.toml script lsf jobs.toml",
            "--config site.toml script sge jobs.toml",
            "--config site.toml status",
            beside=corpus.with_jobs,
        ),
    ),
    Target(
        name="pool",
        about="pool files",
        form=FORMS["toml"],
        seeds=lambda: corpus.tables("pool"),
        act=inner.pool,
    ),
    Target(
        name="profiles",
        about="profiles of models",
        form=FORMS["json"],
        seeds=lambda: _few_documents("profiles/*.json", having="profiles", key="profiles", most=3),
        act=_commands(
            "p.json",
            "profile import p.json",
            "profile list --from p.json",
            "profile show ResNet-50 --from p.json",
            "simulate jobs.toml --gpus-per-node 4 --profiles p.json",
            "simulate jobs.toml --gpus-per-node 4 --profiles p.json --policy planner",
            "advise jobs.toml --gpus 1-4 --time 1h --profiles p.json --batch none",
            beside=corpus.with_jobs,
        ),
    ),
    Target(
        name="burst",
        about="tables of times for plan burst",
        form=FORMS["json"],
        seeds=lambda: (_BURST, _BRANCHES, *corpus.documents(having="layers")),
        act=_commands(
            "t.json", "plan burst t.json", "plan burst t.json --json", "plan burst t.json --gpus 6"
        ),
    ),
    Target(
        name="layers",
        about="layer profiles, for plan burst",
        form=FORMS["json"],
        seeds=lambda: _few_documents("profiles/layers/*.json", having="device", key="layers", most=12),
        act=_commands(
            "t.json",
            "plan burst t.json --gpus 8 --global-batch 32 --bandwidth 10 --latency 5",
            "plan burst t.json --gpus 4 --global-batch 12 --bandwidth 10 --latency 5 --amplification 1.5",
            "plan burst t.json --gpus 16 --global-batch 48 --bandwidth 1 --latency 9 --overlap --json",
        ),
    ),
    Target(
        name="vsw",
        about="tables and costs for plan vsw",
        form=FORMS["json"],
        seeds=lambda: (
            corpus.documents("profiles/vsw/*.json", having="global_batch") + corpus.documents(having="groups")
        ),
        act=_commands(
            "t.json",
            "plan vsw t.json",
            "plan vsw t.json --json",
            "plan vsw t.json --global-batch 512 --gpus n1=2:V100",
            "plan vsw t.json --scale",
        ),
    ),
    Target(
        name="ps",
        about="models of trainings for plan ps",
        form=FORMS["json"],
        seeds=lambda: corpus.documents("profiles/ps/*.json", having="models"),
        act=_commands(
            "t.json",
            "plan ps t.json --cpus 8",
            "plan ps t.json --cpus 20 --model ranker --json",
            "plan ps t.json --cpus 3 --model ranker --rule optimus",
            "plan ps t.json --cpus 8",
        ),
    ),
    Target(
        name="pack",
        about="tables for plan pack",
        form=FORMS["json"],
        seeds=lambda: corpus.documents(having="members"),
        act=_commands(
            "t.json",
            "plan pack t.json",
            "plan pack t.json --json --strategy auto",
            "plan pack t.json --devices 3",
        ),
    ),
    Target(
        name="trace",
        about="CSV traces for simulate",
        form=FORMS["csv"],
        seeds=lambda: (_TRACE, _TRACE_OF_MODELS),
        act=_commands(
            "t.csv",
            "simulate --trace t.csv --gpus-per-node 4",
            "simulate --trace t.csv --gpus-per-node 4 --policy exclusive,planner --profiles pollux-t4",
        ),
    ),
    Target(
        name="node",
        about="simulated nodes",
        form=FORMS["toml"],
        seeds=lambda: (
            b'schema = 1\ngpus = 8\nmig = [7, 0]\n[[happens]]\nat_s = 30\ngpu = 1\nwhat = "xid"\nxid = 79\n',
            b'schema = 1\ngpus = 2\nname = "H"\nmemory_mib = 81559\nvisible = "1,0"\n[[happens]]\nat_s = 1\n'
            b'gpu = 0\nwhat = "hang"\nfor_s = 3\n',
        ),
        act=inner.node,
    ),
    Target(
        name="status",
        about="status.json of a run",
        form=FORMS["json"],
        seeds=lambda: _of_runs("status.json"),
        act=_commands("run/status.json", *arguments.LOOKS, beside=corpus.with_run),
    ),
    Target(
        name="record",
        about="run.json of a run",
        form=FORMS["json"],
        seeds=lambda: _of_runs("run.json"),
        act=_commands("run/run.json", *arguments.LOOKS, beside=corpus.with_run),
    ),
    Target(
        name="journal",
        about="journals with right checksums",
        form=FORMS["journal"],
        seeds=corpus.recorded_journals,
        act=_commands("run/journal.jsonl", *arguments.LOOKS, beside=corpus.with_run),
    ),
    Target(
        name="to-head",
        about="messages of node agents, and what the head makes of them",
        form=FORMS["msgpack"],
        seeds=wire.messages_to_head,
        act=wire.to_head,
    ),
    Target(
        name="to-node",
        about="messages of the head, and what a node agent makes of them",
        form=FORMS["msgpack"],
        seeds=wire.messages_to_node,
        act=wire.to_node,
    ),
    Target(
        name="join-file",
        about="the file with the head's address and keys",
        form=FORMS["json"],
        seeds=wire.join_files,
        act=wire.join_file,
    ),
    Target(
        name="inbox",
        about="files in the inbox, and what the machine makes of them",
        form=FORMS["json"],
        seeds=inner.commands,
        act=inner.inbox,
    ),
    Target(
        name="arguments",
        about="command lines",
        form=FORMS["words"],
        seeds=arguments.lines_of_examples,
        act=arguments.play,
    ),
    Target(
        name="environment",
        about="variables of users, of Slurm, LSF and SGE",
        form=FORMS["words"],
        seeds=variables.environments,
        act=variables.environment,
    ),
    Target(
        name="contract",
        about="variables of a job's processes, and what programs say",
        form=FORMS["words"],
        seeds=variables.examples,
        act=variables.contract,
    ),
)
TARGETS = {target.name: target for target in _LISTED}
