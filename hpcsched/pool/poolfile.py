"""Pool files: TOML in, a checked pool out. Whatever is wrong is refused before anything is asked for."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched import config
from hpcsched.batch.queue import Shape
from hpcsched.contract.schema import (
    Accepted,
    check,
    either,
    flag,
    many,
    number,
    one_of,
    printed,
    refuse,
    table,
    text,
    whole,
)
from hpcsched.decoding import read_file
from hpcsched.durations import parse_duration
from hpcsched.errors import BadInput, ConfigError

MOST_TEMPLATES = 20
MOST_ALLOCATIONS = 1000
LEAST_PERIOD_S = 10.0
"""A controller has other users: one pool asks it no more often (chosen)."""
MOST_FILE_BYTES = 2**20


def _is_time(value: Any) -> bool:
    try:
        return 0 < parse_duration(value) < 10**9
    except (ValueError, OverflowError):
        return False


def _time(words: str) -> Accepted:
    return Accepted(words, text("").schema, _is_time)


_NAME = text("letters, digits and . _ + -, at most 40", r"^[A-Za-z0-9._+-]{1,40}$")
_SCRIPT = config.SCRIPT_KEYS

KEYS = {
    "schema": whole("1", 1, 1),
    "dir": printed("the run directory; a relative one is below the pool file's folder"),
    "pool": table("a table [pool]"),
    "template": many(table("a table"), "one or more tables [[template]]", least=1),
    "run": table("a table [run]"),
}
POOL = {
    "max_allocations": whole(f"allocations at a time: 1 to {MOST_ALLOCATIONS}", 1, MOST_ALLOCATIONS),
    "max_gpus": whole("GPUs of all allocations together: 1 or more", 1),
    "gpu_hours": number("GPU-hours of all allocations together: more than 0", exclusiveMinimum=0),
    "idle": _time('a time such as "10m", after which hosts that nothing uses are given back'),
    "period": _time(f'a time such as "1m", at least {LEAST_PERIOD_S:.0f} s'),
    "failures": whole("failures in a row after which a template is set aside: 1 to 100", 1, 100),
}
TEMPLATE = {
    "name": _NAME,
    "partition": text("a partition", r"^[A-Za-z0-9._+,-]+$"),
    "nodes": whole("nodes: 1 or more", 1),
    "gpus_per_node": whole("GPUs on each node: 1 or more", 1),
    "gpu_type": text('a type of GPU as Slurm names it, such as "a100"', r"^[A-Za-z0-9._-]+$"),
    "time": _time('the time limit, such as "90m", "2h", "1-12:00:00"'),
    "max": whole("allocations of this template at a time: 1 or more", 1),
    "account": printed("an account"),
    "constraint": printed("a constraint, as sbatch has it"),
    **{key: _SCRIPT[key] for key in ("cpus", "cpus_per_gpu", "mem", "modules", "setup", "directives")},
    "gpu_option": one_of("gres", "gpus-per-node", "none"),
}
RUN = {
    "margin": number("seconds: 0 or more", minimum=0),
    "grace": number("seconds: 0 or more", minimum=0),
    "policy": printed("a policy"),
    "policy_option": table("a table of the policy's options"),
    "profiles": many(printed("a profile file, or a shipped one's name"), "a list of profile files or names"),
    "device_type": printed("a device type"),
    "devices": printed("devices, as `run --devices` has them"),
    "checkpoints": printed("a directory"),
    "interface": printed("a network interface, or an address"),
    "cpus_per_gpu": whole("CPU cores: 0 or more", 0),
}
"""Options of `hpcsched run` for the allocation that leads."""
_OPTION = either("a text, a number, true or false", printed(""), number(""), flag())


@dataclass(frozen=True, kw_only=True)
class Template:
    """What one allocation is asked for with: `gpus_per_node` on each of `nodes`, for `limit_s` seconds.

    `most`: allocations of it at a time. `more` are the other keys, for the batch script.
    """

    name: str
    partition: str = ""
    nodes: int = 1
    gpus_per_node: int = 1
    limit_s: float = 3600.0
    most: int = MOST_ALLOCATIONS
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    @property
    def shape(self) -> Shape:
        """What the batch system is asked about."""
        return Shape(
            partition=self.partition, nodes=self.nodes, gpus=self.gpus_per_node, limit_s=self.limit_s
        )

    @property
    def most_gpu_s(self) -> float:
        """GPU-seconds that an allocation of it can be charged at most."""
        return self.gpus * self.limit_s


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool file's content. `idle_s`: after so long hosts that nothing uses are given back. `period_s`:
    seconds from round to round. `failures`: after so many in a row a template is set aside. `run` are options
    of `hpcsched run`, by key; `where` is the file."""

    dir: Path
    templates: tuple[Template, ...]
    max_allocations: int
    max_gpus: int
    gpu_hours: float
    idle_s: float = 600.0
    period_s: float = 60.0
    failures: int = 5
    run: Mapping[str, Any] = field(default_factory=dict)
    where: str = "pool"

    def template(self, name: str) -> Template | None:
        """The template of a name."""
        return next((one for one in self.templates if one.name == name), None)


def read_pool(path: Path) -> Pool:
    """The pool of a TOML file; ConfigError naming file, key, what was found and what is accepted."""
    try:
        content = read_file(path, most_bytes=MOST_FILE_BYTES).decode()
    except (OSError, BadInput, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(where=str(path), got=str(why), accepted="a readable TOML pool file") from error
    return parse_pool(content, where=str(path), folder=path.absolute().parent)


def parse_pool(content: str, *, where: str, folder: Path) -> Pool:
    """The pool in a TOML text from the file `where` in `folder`; raises ConfigError as `read_pool` does."""
    try:
        found = tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=where, got=f"not valid TOML: {error}", accepted="TOML") from error
    check(found, KEYS, where=where, needed=("schema", "dir", "pool", "template"))
    caps, run = found["pool"], found.get("run", {})
    needed = ("max_allocations", "max_gpus", "gpu_hours")
    check(caps, POOL, where=where, prefix="pool.", needed=needed)
    check(run, RUN, where=where, prefix="run.")
    for key, value in run.get("policy_option", {}).items():
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", key) or not _OPTION.admits(value):
            refuse(where, f"run.policy_option.{key}", repr(value), _OPTION.words)
    if len(found["template"]) > MOST_TEMPLATES:
        refuse(where, "template", f"{len(found['template'])} of them", f"at most {MOST_TEMPLATES}")
    margin_s = run.get("margin", 60.0)
    templates = tuple(_template(one, i, margin_s, where) for i, one in enumerate(found["template"]))
    names = [one.name for one in templates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        refuse(where, "template.name", f"{twice!r} twice", "templates with different names")
    numbers: dict[str, Any] = {key: caps[key] for key in (*needed, "failures") if key in caps}
    numbers |= {f"{key}_s": parse_duration(caps[key]) for key in ("idle", "period") if key in caps}
    pool = Pool(
        dir=(folder / Path(found["dir"]).expanduser()).absolute(),
        templates=templates,
        run=run,
        where=where,
        **numbers,
    )
    if pool.period_s < LEAST_PERIOD_S:
        refuse(where, "pool.period", repr(caps["period"]), POOL["period"].words)
    for i, one in enumerate(templates):
        if one.gpus > pool.max_gpus:
            got = f"{one.gpus} GPUs ({one.name})"
            refuse(where, f"template[{i}]", got, f"at most pool.max_gpus = {pool.max_gpus}")
        if one.most_gpu_s > pool.gpu_hours * 3600:
            got = f"up to {one.most_gpu_s / 3600:g} GPU-hours ({one.name})"
            refuse(where, f"template[{i}]", got, f"at most pool.gpu_hours = {pool.gpu_hours:g}")
    return pool


def _template(given: Mapping[str, Any], number: int, margin_s: float, where: str) -> Template:
    prefix = f"template[{number}]."
    check(given, TEMPLATE, where=where, prefix=prefix, needed=("name", "gpus_per_node", "time"))
    limit_s = 60.0 * math.ceil(parse_duration(given["time"]) / 60)  # batch systems count minutes
    if limit_s <= margin_s:
        got = f"{given['time']!r}, but saving starts {margin_s:g} s before the end"
        refuse(where, prefix + "time", got, "more than that, or a smaller run.margin")
    own = ("name", "partition", "nodes", "gpus_per_node")
    return Template(
        limit_s=limit_s,
        most=given.get("max", MOST_ALLOCATIONS),
        more={key: value for key, value in given.items() if key not in (*own, "time", "max")},
        **{key: given[key] for key in own if key in given},
    )
