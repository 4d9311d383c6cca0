"""Job files: TOML in, checked job specs out. Whatever is wrong is refused before anything starts."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from hpcsched import strategies
from hpcsched.contract import schema
from hpcsched.contract.codec import said
from hpcsched.contract.strategies import Strategy, table_of
from hpcsched.core.model import Array, JobSpec, Kind, PythonEnvironment, Training
from hpcsched.core.processes import KnownLauncher, launcher_of
from hpcsched.decoding import is_utf8, not_json
from hpcsched.durations import parse_duration
from hpcsched.errors import ConfigError
from hpcsched.jobfile.check import check_names
from hpcsched.jobfile.container import container_of
from hpcsched.jobfile.keys import ENVIRONMENTS, KINDS, NAME, SHARE, TIME, Job
from hpcsched.jobfile.matrix import after_arrays, expanded
from hpcsched.jobfile.needs import needs_of
from hpcsched.jobfile.outputs import LETTERS, not_here
from hpcsched.jobfile.restart import progress_pattern_of, restart_of
from hpcsched.patience import patiently

_ACCEPTED = schema.options_of(Job)
NO_ARRAYS: Mapping[str, Sequence[str]] = {}
_Refuse = Callable[[str, object, str], NoReturn]


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job file's content: the jobs in order, and what its [policy] table says (empty: nothing)."""

    jobs: tuple[JobSpec, ...]
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)


def load(
    path: Path,
    *,
    workdir: Path,
    user: str = "",
    known: Collection[str] = (),
    arrays: Mapping[str, Sequence[str]] = NO_ARRAYS,
    again: bool = False,
) -> JobFile:
    """The jobs of a TOML file; relative paths and programs run in `workdir`.

    `known` are names that may stand in `after` besides the file's own, `arrays` those of the jobs of arrays;
    `again`: and that its jobs may have.

    Raises ConfigError naming file, key, what was found and what is accepted.
    """
    try:
        text = patiently(lambda: path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(where=str(path), got=str(why), accepted="a readable TOML job file") from error
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise ConfigError(where=str(path), got=f"not valid TOML: {said(error)}", accepted="TOML") from error
    return parse(table, where=str(path), workdir=workdir, user=user, known=known, arrays=arrays, again=again)


def parse(
    table: Mapping[str, Any],
    *,
    where: str,
    workdir: Path,
    user: str = "",
    known: Collection[str] = (),
    arrays: Mapping[str, Sequence[str]] = NO_ARRAYS,
    again: bool = False,
) -> JobFile:
    """The jobs in a job file's top-level table; raises ConfigError.

    `known` are names that may stand in `after` besides the file's own: those of the run so far;
    `arrays`: by array those of its jobs. `again`: and that its jobs may have.
    """
    keys = {"schema", "policy", "defaults", "job"}
    for key in table:
        if key not in keys:
            schema.refuse(where, key, "unknown key", ", ".join(sorted(keys)))
    version = table.get("schema")
    if version != 1 or isinstance(version, bool):
        schema.refuse(where, "schema", "missing" if version is None else repr(version), "1")
    defaults, jobs = table.get("defaults", {}), table.get("job", [])
    if not isinstance(defaults, dict):
        schema.refuse(where, "defaults", repr(defaults), "a table of job keys")
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        schema.refuse(where, "job", repr(jobs), "[[job]] tables")
    if not jobs:
        schema.refuse(where, "job", "no jobs", "at least one [[job]] table")
    if "name" in defaults:
        schema.refuse(where, "defaults.name", "a name for all jobs", "a unique name in each [[job]]")
    # A job's own way to run replaces the default one, and so does where it runs: one of each counts.
    tables: list[tuple[str, dict[str, Any]]] = []
    for at, job in enumerate(jobs):
        replaced = {
            key for ways in (KINDS, (*ENVIRONMENTS, "container")) if job.keys() & ways for key in ways
        }
        base = {k: v for k, v in defaults.items() if k not in replaced}
        place = f"job[{at}]"
        tables += [(place, one) for one in expanded({**base, **job}, where=where, place=place)]
    after_arrays([one for _, one in tables], arrays)
    specs = [spec_of(one, where=where, place=place, workdir=workdir, user=user) for place, one in tables]
    check_names(specs, where=where, known=known, again=again)
    policy, options = _policy(table.get("policy", {}), where)
    return JobFile(jobs=tuple(specs), policy=policy, policy_options=options)


def _policy(table: Any, where: str) -> tuple[str | None, dict[str, Any]]:
    if not isinstance(table, dict):
        schema.refuse(where, "policy", repr(table), "a table with a name and options")
    name = table.get("name")
    if name is not None and not isinstance(name, str):
        schema.refuse(where, "policy.name", repr(name), "the name of a policy")
    return name, {k: v for k, v in table.items() if k != "name"}


def spec_of(table: Mapping[str, Any], *, where: str, place: str, workdir: Path, user: str) -> JobSpec:
    """The job of one [[job]] table, every key of it checked; raises ConfigError.

    `place` is what the table is called until it has a name.
    """
    name = table.get("name")
    place = f"job {name}" if isinstance(name, str) and NAME.fullmatch(name) else place
    given = {key: value for key, value in table.items() if value is not None}
    job = schema.read(Job, given, where=where, prefix=f"{place}.", unknown="unknown key")

    def refuse(key: str, got: object, accepted: str = "") -> NoReturn:
        schema.refuse(where, f"{place}.{key}", repr(got), accepted or _ACCEPTED[key].words)

    runs_in = workdir / (job.workdir or "")
    for key in ("matrix", "at_once"):
        if getattr(job, key) is not None:
            refuse(key, getattr(job, key), "a job file's [[job]], or --each: it is many jobs")
    kinds = [k for k, there in _kinds(job).items() if there]
    if len(kinds) != 1:
        schema.refuse(
            where,
            place,
            " and ".join(kinds) or "none of them",
            "exactly one of trainer, command, replay = true",
        )
    if job.epochs is not None and (job.steps is not None or job.trainer is None):
        refuse("epochs", job.epochs, "steps or epochs, and epochs for a trainer only")
    if job.continues is not None and job.trainer is None:
        refuse("continues", job.continues, "a job with a trainer")
    for key, words in (
        ("output", job.output),
        ("workdir", str(runs_in)),
        ("command", "".join(job.command or ())),
        ("env", "".join((*job.env, *job.env.values()))),
        ("model", job.model or ""),
        ("after", "".join(job.after)),
    ):
        if "\0" in words:
            refuse(key, words, f"{_ACCEPTED[key].words}, without NUL characters")
        if not is_utf8(words):
            refuse(key, words, f"{_ACCEPTED[key].words}, in UTF-8")
    if word := not_here(job.output):
        words = ", ".join(f"%{letter} ({means})" for letter, means in LETTERS.items())
        schema.refuse(where, f"{place}.output", f"{word} in {job.output!r}", words)
    for variable in job.env:
        if not variable or "=" in variable or "\0" in variable:
            refuse("env", variable, "names of variables, without = and NUL")
    for key, tree in (("args", job.args), ("strategy", job.strategy)):
        if (odd := not_json(tree)) is not None:
            refuse(key, odd, _ACCEPTED["args"].words)
    submit_at = _seconds(job.submit_at, "submit_at", refuse)
    every = _seconds(job.checkpoint_every, "checkpoint_every", refuse)
    if not every:
        refuse("checkpoint_every", job.checkpoint_every, 'a time above 0, such as "10m"')
    described, trainer = table_of(job.strategy), job.trainer is not None or job.replay
    strategy = strategies.read(described, where=where, key=f"{place}.strategy", trainer=trainer)
    least, most = _gpus(job, strategy, described["kind"], refuse)
    multiple = job.gpus.get("multiple_of", 1) if isinstance(job.gpus, dict) else 1
    processes = _processes(job, refuse)
    named = {key: word for key in ENVIRONMENTS if (word := getattr(job, key)) is not None}
    if len(named) > 1:
        schema.refuse(where, place, " and ".join(named), f"at most one of {', '.join(ENVIRONMENTS)}")
    environment = None
    for key, word in named.items():
        environment = _environment(key, word, workdir)
        if not word.strip() or "\0" in environment.name or not is_utf8(environment.name):
            refuse(key, word)
    container = None
    if job.container is not None:
        container = container_of(job.container, where=where, key=f"{place}.container", workdir=workdir)
        if named:
            refuse("container", job.container, f"no {next(iter(named))} beside it: its own Python is used")
        if job.replay or job.background or described["kind"] in ("packed", "burst"):
            refuse("container", job.container, "a job with processes of its own, in the foreground")
    training = None
    if job.epochs is not None or job.continues is not None:
        training = Training(epochs=job.epochs and float(job.epochs), continues=job.continues)
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
        gpus_multiple=multiple,
        nodes=job.nodes,
        strategy=described,
        submit_at=submit_at,
        priority=job.priority,
        retries=job.retries,
        env=job.env,
        output=job.output,
        checkpoint_every_s=every,
        keep_checkpoints=job.keep_checkpoints,
        workdir=str(runs_in),
        processes=processes,
        user=user,
        background=job.background,
        max_foreground_slowdown=float(job.max_foreground_slowdown),
        environment=environment,
        container=container,
        needs=needs_of(job, strategy, refuse, share=_share(job)),
        restart=restart_of(job, runs_in, refuse),
        progress_pattern=progress_pattern_of(job, refuse),
        array=_array(job, refuse),
    )


@lru_cache(maxsize=256)
def _environment(kind: Literal["python", "venv", "conda"], word: str, workdir: Path) -> PythonEnvironment:
    """One object for all jobs that name the same; paths are relative to where programs run by default."""
    word = os.path.expanduser(word) if word.startswith("~/") else word  # noqa: PTH111
    path = kind == "venv" or "/" in word
    return PythonEnvironment(kind=kind, name=str(workdir / word) if path else word)


def _kinds(job: Job) -> dict[str, bool]:
    return {"trainer": job.trainer is not None, "command": bool(job.command), "replay": job.replay}


def _gpus(job: Job, strategy: Strategy, kind: str, refuse: _Refuse) -> tuple[int, int | None]:
    """The fewest and the most GPUs on each host, both multiples as asked for. Refused is what does not go
    together with the strategy."""
    share, multiple = _share(job), 1
    if share is not None:
        if job.background or not strategy.in_background:
            whose = "a job in the background" if job.background else strategy.job
            refuse("gpus", job.gpus, f"whole GPUs for {whose}: it does not share one as others do")
        if job.nodes != 1:
            refuse("nodes", job.nodes, "1 for a job that shares a GPU")
        return 1, 1
    limits: Any = {} if job.gpus == "auto" else job.gpus
    if isinstance(limits, dict):
        least, most, multiple = limits.get("min", 1), limits.get("max"), limits.get("multiple_of", 1)
    else:
        least = most = limits
    least = -(-least // multiple) * multiple
    fixed, whose = (1, "a job in the background") if job.background else (strategy.gpus, strategy.job)
    if job.background and not strategy.in_background:
        if strategy.gpus is not None:
            refuse("background", True, f"false for {strategy.job}")
        refuse("strategy", kind, f"one that runs on 1 GPU, for {whose}")
    if fixed is not None:
        if job.gpus != "auto" and (fixed, least, most) != (1, 1, 1):
            cpus = ": `cpus` in its strategy is what it may have" if hasattr(strategy, "cpus") else ""
            none = f"no gpus for {whose}{cpus}"
            refuse("gpus", job.gpus, f'"auto" or 1 for {whose}' if fixed else none)
        if job.nodes != 1:
            refuse("nodes", job.nodes, f"1 for {whose}")
        if job.replay and not fixed:
            refuse("replay", True, f"a trainer or a command, for {whose}")
        return fixed, fixed
    shards = strategy.most_ranks()
    if shards is not None:
        if least > shards // job.nodes:
            refuse("gpus", least * job.nodes, f"at most as many ranks as shards ({shards})")
        most = min(shards // job.nodes, shards if most is None else most)
    most = None if most is None else most // multiple * multiple
    if most is not None and least > most:
        refuse("gpus", job.gpus, f"limits with a multiple of {multiple} between them")
    return least, most


def _array(job: Job, refuse: _Refuse) -> Array | None:
    if job.array is None:
        return None
    name, index, at_once = (job.array.get(key) for key in ("name", "index", "at_once"))
    if name is None or index is None:
        refuse("array", job.array, _ACCEPTED["array"].words)
    if not NAME.fullmatch(name):
        refuse("array", name, _ACCEPTED["name"].words)
    return Array(name=name, index=index, at_once=at_once)


def _share(job: Job) -> float | None:
    """The share of one GPU that a job asks for (0: as little as is left); None: it asks for whole ones."""
    if job.gpus == SHARE:
        return 0.0
    return job.gpus if isinstance(job.gpus, float) and job.gpus < 1 else None


def _processes(job: Job, refuse: _Refuse) -> int | str:
    """On each host; a launcher in the command is refused where it would start ranks in the wrong place."""
    launcher = launcher_of(tuple(job.command or ()))
    if launcher is KnownLauncher.SRUN:
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


def _seconds(value: float | str, key: str, refuse: _Refuse) -> float:
    try:
        return parse_duration(value)
    except (ValueError, OverflowError):
        refuse(key, value, TIME.words)
