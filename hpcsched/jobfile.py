"""Job files: TOML in, checked job specs out. Whatever is wrong is refused before anything starts."""

from __future__ import annotations

import graphlib
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from hpcsched.contract.codec import said
from hpcsched.core.model import JobSpec, Kind, PythonEnvironment, Training
from hpcsched.core.processes import Launcher, launcher_of
from hpcsched.decoding import is_utf8, not_json
from hpcsched.durations import parse_duration
from hpcsched.errors import ConfigError
from hpcsched.strategies import DEFAULT_SHARDS, checked, most_ranks

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRAINER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

MOST_STEPS = 2**53
"""Steps are counted exactly up to here, in floating-point arithmetic too."""

KINDS = ("trainer", "command", "replay")
ENVIRONMENTS = ("python", "venv", "conda")
"""Keys of which a job has one; and at most one."""

MOST_PROCESSES = 256
"""On a host, of one job."""

_MOST_SHOWN = 200
_TIME = 'seconds, or a time such as "90s", "10m", "2h", "1-12:00:00"'
_GPUS = '"auto", a positive number, or { min = 1, max = 4 }'
_ACCEPTED = {
    "name": "1 to 64 of A-Z a-z 0-9 . _ -",
    "model": "text: the key of a profile",
    "steps": "a positive number of steps",
    "epochs": "a positive number of passes over the data",
    "continues": "the name of a job",
    "trainer": '"package.module:Name"',
    "command": "a list of a program and its arguments, each a text that is not empty",
    "replay": "true or false",
    "args": "a table of texts, finite numbers, true, false, lists and tables",
    "after": "a list of job names",
    "gpus": _GPUS,
    "nodes": "1 or more",
    "strategy": "the name of a strategy, or a table with its kind and options",
    "background": "true or false",
    "max_foreground_slowdown": "a share of the job's speed, 0 to 1",
    "submit_at": _TIME,
    "retries": "0 or more",
    "env": "a table of texts by variable name",
    "output": "a file name",
    "checkpoint_every": _TIME,
    "keep_checkpoints": "1 or more",
    "workdir": "a folder",
    "processes": '"auto", "per-gpu", "one" or a number, 1 to 256',
    "python": "a Python interpreter: its path, or its name in PATH",
    "venv": "the folder of a virtual environment",
    "conda": "the name or the folder of a conda environment",
}
"""What is right for each key of a job."""


class _Gpus(msgspec.Struct, forbid_unknown_fields=True):
    min: int = 1
    max: int | None = None


class _Job(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A [[job]] table as written."""

    name: str
    model: str | None = None
    steps: int | None = None
    epochs: float | None = None
    continues: str | None = None
    trainer: str | None = None
    command: list[str] | None = None
    replay: bool = False
    args: dict[str, Any] = {}
    after: list[str] = []
    gpus: Literal["auto"] | int | _Gpus = "auto"
    nodes: int = 1
    strategy: str | dict[str, Any] = "ddp"
    background: bool = False
    max_foreground_slowdown: float = 0.05
    submit_at: float | str = 0.0
    retries: int = 2
    env: dict[str, str] = {}
    output: str = "hpcsched-%j.out"
    checkpoint_every: float | str = "10m"
    keep_checkpoints: int = 2
    workdir: str | None = None
    processes: Literal["auto", "per-gpu", "one"] | int = "auto"
    python: str | None = None
    venv: str | None = None
    conda: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job file's content: the jobs in order, and what its [policy] table says (empty: nothing)."""

    jobs: tuple[JobSpec, ...]
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)


def load(
    path: Path, *, workdir: Path, user: str = "", known: Collection[str] = (), again: bool = False
) -> JobFile:
    """The jobs of a TOML file; relative paths and programs run in `workdir`.

    `known` are names that may stand in `after` besides the file's own; `again`: and that its jobs may have.

    Raises ConfigError naming file, key, what was found and what is accepted.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(where=str(path), got=str(why), accepted="a readable TOML job file") from error
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise ConfigError(where=str(path), got=f"not valid TOML: {said(error)}", accepted="TOML") from error
    return parse(table, where=str(path), workdir=workdir, user=user, known=known, again=again)


def parse(
    table: Mapping[str, Any],
    *,
    where: str,
    workdir: Path,
    user: str = "",
    known: Collection[str] = (),
    again: bool = False,
) -> JobFile:
    """The jobs in a job file's top-level table; raises ConfigError.

    `known` are names that may stand in `after` besides the file's own: those of the run so far. `again`: and
    that its jobs may have.
    """
    keys = {"schema", "policy", "defaults", "job"}
    for key in table:
        if key not in keys:
            _refuse(where, key, "unknown key", ", ".join(sorted(keys)))
    schema = table.get("schema")
    if schema != 1 or isinstance(schema, bool):
        _refuse(where, "schema", "missing" if schema is None else repr(schema), "1")
    defaults, jobs = table.get("defaults", {}), table.get("job", [])
    if not isinstance(defaults, dict):
        _refuse(where, "defaults", repr(defaults), "a table of job keys")
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        _refuse(where, "job", repr(jobs), "[[job]] tables")
    if not jobs:
        _refuse(where, "job", "no jobs", "at least one [[job]] table")
    if "name" in defaults:
        _refuse(where, "defaults.name", "a name for all jobs", "a unique name in each [[job]]")
    # A job's own way to run replaces the default one, and so does its environment: one of each counts.
    specs = []
    for number, job in enumerate(jobs):
        replaced = {key for ways in (KINDS, ENVIRONMENTS) if job.keys() & ways for key in ways}
        base = {k: v for k, v in defaults.items() if k not in replaced}
        place = f"job[{number}]"
        specs.append(spec_of({**base, **job}, where=where, place=place, workdir=workdir, user=user))
    check_names(specs, where=where, known=known, again=again)
    policy, options = _policy(table.get("policy", {}), where)
    return JobFile(jobs=tuple(specs), policy=policy, policy_options=options)


def _policy(table: Any, where: str) -> tuple[str | None, dict[str, Any]]:
    if not isinstance(table, dict):
        _refuse(where, "policy", repr(table), "a table with a name and options")
    name = table.get("name")
    if name is not None and not isinstance(name, str):
        _refuse(where, "policy.name", repr(name), "the name of a policy")
    return name, {k: v for k, v in table.items() if k != "name"}


def spec_of(table: Mapping[str, Any], *, where: str, place: str, workdir: Path, user: str) -> JobSpec:
    """The job of one [[job]] table, every key of it checked; raises ConfigError.

    `place` is what the table is called until it has a name.
    """
    name = table.get("name")
    if isinstance(name, str) and NAME.fullmatch(name):
        place = f"job {name}"
    elif name is not None:
        _refuse(where, f"{place}.name", repr(name), "1 to 64 of A-Z a-z 0-9 . _ -")
    try:
        job = msgspec.convert(dict(table), _Job)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        inner = at.rstrip("`").lstrip(".")
        key = f"{place}.{inner}" if inner else place
        if unknown := re.search(r"unknown field `(.*)`", message, re.DOTALL):
            accepted = ", ".join(_Gpus.__struct_fields__ if inner else _Job.__struct_fields__)
            _refuse(where, f"{key}.{unknown[1]}", "unknown key", accepted)
        if missing := re.search(r"missing required field `(.*)`", message):
            _refuse(where, f"{key}.{missing[1]}", "missing", _ACCEPTED[missing[1]])
        outer = re.split(r"[.\[]", inner)[0]
        _refuse(where, key, f"{table.get(outer)!r} ({message})", _ACCEPTED[outer])

    def refuse(key: str, got: object, accepted: str = "") -> NoReturn:
        _refuse(where, f"{place}.{key}", repr(got), accepted or _ACCEPTED[key])

    kinds = [k for k, there in _kinds(job).items() if there]
    if len(kinds) != 1:
        _refuse(
            where,
            place,
            " and ".join(kinds) or "none of them",
            "exactly one of trainer, command, replay = true",
        )
    if job.trainer is not None and not _TRAINER.fullmatch(job.trainer):
        refuse("trainer", job.trainer)
    if job.command is not None and not all(job.command):
        refuse("command", job.command)
    if job.steps is not None and not 1 <= job.steps <= MOST_STEPS:
        refuse("steps", job.steps)
    if job.epochs is not None:
        if not (math.isfinite(job.epochs) and job.epochs > 0):
            refuse("epochs", job.epochs)
        if job.steps is not None or job.trainer is None:
            refuse("epochs", job.epochs, "steps or epochs, and epochs for a trainer only")
    if job.continues is not None and job.trainer is None:
        refuse("continues", job.continues, "a job with a trainer")
    if job.retries < 0:
        refuse("retries", job.retries)
    if job.keep_checkpoints < 1:
        refuse("keep_checkpoints", job.keep_checkpoints)
    if job.nodes < 1:
        refuse("nodes", job.nodes)
    for key in ("retries", "keep_checkpoints", "nodes"):
        if getattr(job, key) > MOST_STEPS:
            refuse(key, getattr(job, key), f"{_ACCEPTED[key]}, at most {MOST_STEPS}")
    if not job.output:
        refuse("output", job.output)
    for key, text in (
        ("output", job.output),
        ("workdir", str(workdir / (job.workdir or ""))),
        ("command", "".join(job.command or ())),
        ("env", "".join((*job.env, *job.env.values()))),
        ("model", job.model or ""),
        ("after", "".join(job.after)),
    ):
        if "\0" in text:
            refuse(key, text, f"{_ACCEPTED[key]}, without NUL characters")
        if not is_utf8(text):
            refuse(key, text, f"{_ACCEPTED[key]}, in UTF-8")
    for variable in job.env:
        if not variable or "=" in variable or "\0" in variable:
            refuse("env", variable, "names of variables, without = and NUL")
    for key, tree in (("args", job.args), ("strategy", job.strategy)):
        if (odd := not_json(tree)) is not None:
            refuse(key, odd, _ACCEPTED["args"])
    if not 0 <= job.max_foreground_slowdown <= 1:
        refuse("max_foreground_slowdown", job.max_foreground_slowdown)
    least, most = _limits(job, refuse)
    submit_at = _seconds(job.submit_at, "submit_at", refuse)
    every = _seconds(job.checkpoint_every, "checkpoint_every", refuse)
    if not every:
        refuse("checkpoint_every", job.checkpoint_every, 'a time above 0, such as "10m"')
    trainer = job.trainer is not None or job.replay
    strategy = checked(job.strategy, where=where, key=f"{place}.strategy", trainer=trainer)
    if job.background:
        # It has the background lane of one GPU.
        if job.gpus != "auto" and (least, most) != (1, 1):
            got = {"min": least, "max": most} if isinstance(job.gpus, _Gpus) else job.gpus
            refuse("gpus", got, '"auto" or 1 for a job in the background')
        if job.nodes != 1:
            refuse("nodes", job.nodes, "1 for a job in the background")
        if strategy["kind"] == "burst":
            refuse("strategy", "burst", "one that runs on 1 GPU, for a job in the background")
        most = 1
    if strategy["kind"] == "packed":
        if job.gpus != "auto" and (least, most) != (1, 1):
            got = {"min": least, "max": most} if isinstance(job.gpus, _Gpus) else job.gpus
            refuse("gpus", got, '"auto" or 1 for a job that is packed')
        if job.nodes != 1:
            refuse("nodes", job.nodes, "1 for a job that is packed")
        if job.background:
            refuse("background", True, "false for a job that is packed")
        most = 1
    if strategy["kind"] in ("ps", "cpu"):
        if job.gpus != "auto":
            got = {"min": least, "max": most} if isinstance(job.gpus, _Gpus) else job.gpus
            refuse("gpus", got, "no gpus for a job on CPU cores: `cpus` in its strategy is what it may have")
        if job.nodes != 1:
            refuse("nodes", job.nodes, "1 for a job on CPU cores")
        if job.background:
            refuse("background", True, "false for a job on CPU cores")
        if job.replay:
            refuse("replay", True, "a trainer or a command, for a job on CPU cores")
        least = most = 0
    processes = _processes(job, refuse)
    ranks = most_ranks(strategy, job.nodes)
    if ranks is not None:
        if least > ranks:
            accepted = f"at most as many ranks as shards ({strategy.get('shards', DEFAULT_SHARDS)})"
            refuse("gpus", least * job.nodes, accepted)
        most = ranks if most is None else min(most, ranks)
    named = {key: word for key in ENVIRONMENTS if (word := getattr(job, key)) is not None}
    if len(named) > 1:
        _refuse(where, place, " and ".join(named), f"at most one of {', '.join(ENVIRONMENTS)}")
    environment = None
    for key, word in named.items():
        environment = _environment(key, word, workdir)
        if not word.strip() or "\0" in environment.name or not is_utf8(environment.name):
            refuse(key, word)
    training = None
    if job.epochs is not None or job.continues is not None:
        training = Training(epochs=job.epochs, continues=job.continues)
    return JobSpec(
        name=job.name,
        kind=Kind(kinds[0]),
        model=job.model or job.name,
        trainer=job.trainer,
        command=tuple(job.command or ()),
        args=job.args,
        steps=job.steps,
        training=training,
        after=tuple(dict.fromkeys([*job.after, *([job.continues] if job.continues else [])])),
        gpus_min=least,
        gpus_max=most,
        nodes=job.nodes,
        strategy=strategy,
        submit_at=submit_at,
        retries=job.retries,
        env=job.env,
        output=job.output,
        checkpoint_every_s=every,
        keep_checkpoints=job.keep_checkpoints,
        workdir=str(workdir / (job.workdir or "")),
        processes=processes,
        user=user,
        background=job.background,
        max_foreground_slowdown=job.max_foreground_slowdown,
        environment=environment,
    )


@lru_cache(maxsize=256)
def _environment(kind: Literal["python", "venv", "conda"], word: str, workdir: Path) -> PythonEnvironment:
    """One object for all jobs that name the same; paths are relative to where programs run by default."""
    word = os.path.expanduser(word) if word.startswith("~/") else word  # noqa: PTH111
    path = kind == "venv" or "/" in word
    return PythonEnvironment(kind=kind, name=str(workdir / word) if path else word)


def _kinds(job: _Job) -> dict[str, bool]:
    return {"trainer": job.trainer is not None, "command": bool(job.command), "replay": job.replay}


def _limits(job: _Job, refuse: Callable[[str, object, str], NoReturn]) -> tuple[int, int | None]:
    match job.gpus:
        case "auto":
            return 1, None
        case _Gpus(min=least, max=most):
            if least < 1 or (most is not None and not least <= most <= MOST_STEPS):
                refuse("gpus", {"min": least, "max": most}, "1 <= min <= max")
            return least, most
        case int(count):
            if count < 1:
                refuse("gpus", count, _GPUS)
            return count, count
    raise AssertionError(job.gpus)


def _processes(job: _Job, refuse: Callable[[str, object, str], NoReturn]) -> int | str:
    """On each host; a launcher in the command is refused where it would start ranks in the wrong place."""
    launcher = launcher_of(tuple(job.command or ()))
    if isinstance(job.processes, int) and not 1 <= job.processes <= MOST_PROCESSES:
        refuse("processes", job.processes, _ACCEPTED["processes"])
    if launcher is Launcher.SRUN:
        accepted = (
            'torchrun, or the program itself with processes = "per-gpu": srun places tasks by its own rules'
        )
        refuse("command", "srun", accepted)
    if launcher and job.processes not in ("auto", "one", 1):
        accepted = f"no `processes`: {launcher} starts the ranks itself"
        refuse("processes", job.processes, accepted)
    if launcher and launcher.once and job.nodes > 1:
        refuse("nodes", job.nodes, f'1 with {launcher}; on several hosts torchrun, or processes = "per-gpu"')
    return 1 if job.processes == "one" else job.processes


def _seconds(value: float | str, key: str, refuse: Callable[[str, object, str], NoReturn]) -> float:
    try:
        return parse_duration(value)
    except (ValueError, OverflowError):
        refuse(key, value, _TIME)


def check_names(
    specs: Sequence[JobSpec], *, where: str, known: Collection[str] = (), again: bool = False
) -> None:
    """Refuse duplicate names, unknown names in `after`, and cycles. `known` are the run's jobs so far;
    `again`: jobs may be among them."""
    names: set[str] = set() if again else set(known)
    for spec in specs:
        if spec.name in names:
            got = "in the run already" if spec.name in known else "given twice"
            _refuse(where, f"job {spec.name}.name", got, "a name that no other job has")
        names.add(spec.name)
    names.update(known)
    for spec in specs:
        for other in spec.after:
            if other not in names:
                accepted = ", ".join(sorted(names - {spec.name})[:8]) or "names of other jobs"
                _refuse(where, f"job {spec.name}.after", f"{other!r} is no job", accepted)
    try:
        graphlib.TopologicalSorter({s.name: s.after for s in specs}).prepare()
    except graphlib.CycleError as error:
        circle = " after ".join(reversed(error.args[1]))
        _refuse(where, "after", f"a cycle: {circle}", "jobs that do not wait for each other")


def check_fits(specs: Iterable[JobSpec], *, gpus: int, hosts: int, where: str) -> None:
    """Refuse jobs that ask for more GPUs or hosts than there are."""
    for spec in specs:
        if spec.gpus_min > gpus:
            _refuse(
                where, f"job {spec.name}.gpus", f"{spec.gpus_min} GPUs", f"at most {gpus}: so many are here"
            )
        if spec.nodes > hosts:
            _refuse(
                where, f"job {spec.name}.nodes", f"{spec.nodes} hosts", f"at most {hosts}: so many are here"
            )


def _refuse(where: str, key: str, got: str, accepted: str) -> NoReturn:
    key = key if key.isprintable() else repr(key)
    got = got if len(got) <= _MOST_SHOWN else f"{got[:_MOST_SHOWN]}..."
    raise ConfigError(where=where, key=key, got=got, accepted=accepted)
