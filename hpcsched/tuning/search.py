"""Search files: TOML in, a checked search out. Whatever is wrong is refused before anything starts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched import jobfile
from hpcsched.contract import schema
from hpcsched.core.model import JobSpec
from hpcsched.errors import ConfigError
from hpcsched.patience import patiently
from hpcsched.planning.packing.problem import MAX_KNN_DISTANCE
from hpcsched.tuning import command
from hpcsched.tuning.asha import ladder
from hpcsched.tuning.hyperband import Bracket, brackets, halving
from hpcsched.tuning.space import Space, parse_space

METHODS = ("hyperband", "asha", "halving", "random", "grid")
PACKINGS = ("off", "auto", "knn", "batch", "random")
AS_THEY_COME = ("off", "auto")
"""Those of them that need not know all trainings of a rung beforehand."""

DEFAULTS = ("env", "retries", "checkpoint_every", *jobfile.ENVIRONMENTS, *jobfile.NEEDS)
"""Keys of a job that [defaults] may give to all jobs of a search; to programs also those of `command`."""

MOST_TRIALS = 100_000

KEYS = {
    "schema": schema.whole("1", 1, 1),
    "trainer": schema.text('"package.module:Name"'),
    "command": schema.many(schema.text(""), "a list of a program and its arguments, each a text", least=1),
    "metric": schema.text(
        "the name of a number in what the trainer's evaluate returns, or the program tells"
    ),
    "mode": schema.one_of("max", "min"),
    "result": schema.text("a pattern with parentheses where the metric stands, such as 'accuracy: (.+)'"),
    "result_file": schema.text('the name of a JSON file with the metric, such as "{dir}/result.json"'),
    "R": schema.number("the largest budget of one trial, at least 1", minimum=1, maximum=schema.LARGEST),
    "eta": schema.number(
        "a number above 1, such as 3: one trial in so many goes on",
        exclusiveMinimum=1,
        maximum=schema.LARGEST,
    ),
    "unit": schema.one_of("epochs", "steps"),
    "method": schema.one_of(*METHODS),
    "trials": schema.whole(f"1 to {MOST_TRIALS}", 1, MOST_TRIALS),
    "budget": schema.number(
        "the budget of all trials together, in epochs or steps, at least R",
        minimum=1,
        maximum=schema.LARGEST,
    ),
    "parallel": schema.whole(f"1 to {MOST_TRIALS}", 1, MOST_TRIALS),
    "seed": schema.whole("a whole number of 64 bits", -(2**63), 2**63 - 1),
    "packing": schema.one_of(*PACKINGS),
    "against": schema.one_of(*PACKINGS),
    "knn_threshold": schema.number("the largest distance of neighbours, 0 or more", minimum=0),
    "exact": schema.flag(),
    "architecture": schema.many(
        schema.text("the name of an argument"),
        "a list of arguments in space that make another model",
        least=1,
    ),
    "checkpoints": schema.one_of("best", "all"),
    "args": schema.table("a table of arguments that all trials share"),
    "defaults": schema.table(f"a table of {', '.join(DEFAULTS)}"),
    "space": schema.table("a table of what may be chosen"),
}

NEEDED = ("schema", "metric", "mode", "R", "space")


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to search, and how: a search file's content.

    It has a `trainer` or a `command`, whose metric is what `result` finds in its output, or in the file
    `result_file` (neither: what it tells by the contract). `R` is the largest budget of one trial, in `unit`.
    `args` are the arguments that all trials share, `defaults` keys of a job, as written, for all jobs.
    `trials`: how many to try (None: as many as the method makes). `budget`: how much all trials together may
    train, in `unit` (None: no bound), and `parallel`: how many of their jobs may be unfinished at once (None:
    as many as there is room for), both with method asha. `against`: with which packing to search once more,
    to compare. `knn_threshold`: how far from the first of its pack a trial may be, with packing knn. `exact`:
    each training gives to the last bit what it gives alone, in whatever pack it is. `architecture`: the
    arguments in the space that make another model; trials in which all others differ only may be computed as
    one (empty: not known). `checkpoints`: whose are kept. `where`: the file, for errors.
    """

    metric: str
    mode: str
    R: float
    space: Space
    trainer: str = ""
    command: tuple[str, ...] = ()
    result: str | None = None
    result_file: str | None = None
    method: str = "hyperband"
    eta: float = 3
    unit: str = "epochs"
    seed: int = 0
    packing: str = "auto"
    trials: int | None = None
    budget: float | None = None
    parallel: int | None = None
    against: str | None = None
    knn_threshold: float = MAX_KNN_DISTANCE
    exact: bool = True
    architecture: tuple[str, ...] = ()
    checkpoints: str = "best"
    args: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    where: str = "search"

    def brackets(self) -> tuple[Bracket, ...]:
        """The rungs that the method plans, whether or not the space has as many configurations.

        Raises ConfigError where they cannot be, or are too many.
        """
        whole = self.unit == "steps" or bool(self.command)
        match self.method:
            case "hyperband":
                plan = brackets(self.R, self.eta, whole=whole, where=self.where)
            case "halving":
                trials = self.trials or self.space.size
                plan = (halving(self.R, self.eta, trials, whole=whole, where=self.where),)
            case "asha":
                trials, budget = self.trials or (None if self.budget else self.space.size), self.budget
                plan = (ladder(self.R, self.eta, trials, budget=budget, whole=whole, where=self.where),)
            case "grid":
                plan = (Bracket(0, ((self.space.size or 0, self.R),)),)
            case _:
                plan = (Bracket(0, ((self.trials or 0, self.R),)),)
        if (trials := sum(bracket.trials for bracket in plan)) > MOST_TRIALS:
            asha = "budget" if self.budget else "trials"
            keys = {"hyperband": "R", "halving": "trials", "asha": asha}
            schema.refuse(
                self.where,
                keys.get(self.method, "space"),
                f"{trials} trials",
                f"what makes at most {MOST_TRIALS}",
            )
        return plan

    def shortage(self) -> str | None:
        """What to tell the user where the space has fewer configurations than the method would try."""
        wanted, there = sum(bracket.trials for bracket in self.brackets()), self.space.size
        if there is None or there >= wanted:
            return None
        return f"the space has {there} configurations for {wanted} trials: each is tried once"


def read_search(path: Path) -> Search:
    """The search of a TOML file; ConfigError naming file, key, what was found and what is accepted."""
    try:
        text = patiently(lambda: path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(where=str(path), got=str(why), accepted="a readable TOML search file") from error
    return parse_search(text, where=str(path))


def parse_search(text: str, *, where: str) -> Search:
    """The search in a TOML text from the file `where`; raises ConfigError as `read_search` does."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=where, got=f"not valid TOML: {error}", accepted="TOML") from error
    schema.check(table, KEYS, where=where, needed=NEEDED)
    _check_kind(table, where)
    defaults = (*DEFAULTS, *command.DEFAULTS) if "command" in table else DEFAULTS
    for key in table.get("defaults", {}):
        if key not in defaults:
            schema.refuse(where, f"defaults.{key}", "unknown key", ", ".join(defaults))
    space = parse_space(table["space"], where=where)
    for name in table.get("args", {}).keys() & table["space"].keys():
        schema.refuse(
            where, f"space.{name}", "in args too", "an argument is either fixed in args, or searched"
        )
    table["space"] = space
    if "architecture" in table:
        table["architecture"] = _architecture(table["architecture"], space, where)
    if "command" in table:
        table |= {"command": tuple(table["command"]), "packing": "off"}
    del table["schema"]
    search = Search(where=where, **table)
    for job in _examples(search):
        _check_job(job, search)
    _check_method(search, where)
    for key in ("packing", "against"):
        check_packing(search, getattr(search, key), where=where, key=key)
    if "knn_threshold" in table and "knn" not in (search.packing, search.against):
        schema.refuse(
            where, "knn_threshold", repr(search.knn_threshold), 'only with packing or against "knn"'
        )
    search.brackets()
    if search.command:
        command.check(search)
    return search


def check_packing(search: Search, packing: str | None, *, where: str, key: str = "") -> None:
    """Refuse packs that are chosen for a whole rung where a method does not know one beforehand, and packs of
    programs."""
    if search.method == "asha" and packing not in (None, *AS_THEY_COME):
        accepted = f"{' or '.join(AS_THEY_COME)} with method asha: a rung's trainings are not known before"
        schema.refuse(where, key, repr(packing), accepted)
    if search.command and packing not in (None, "off"):
        schema.refuse(where, key, repr(packing), _NOT_PACKED)


def example_of(search: Search) -> JobSpec:
    """A job like those of the search, such that what is wrong for all of them is found before any starts."""
    table = next(_examples(search))
    return jobfile.spec_of(table, where=search.where, place="", workdir=Path.cwd(), user="")


def _examples(search: Search) -> Iterator[dict[str, Any]]:
    """Tables of jobs that are right if those of all trials are."""
    if search.command:
        return command.examples(search)
    return iter([{"name": "trial", "trainer": search.trainer, "args": search.args, **search.defaults}])


_NOT_PACKED = (
    'only with a trainer: programs share a GPU with gpus = "share", or a part such as 0.25, in [defaults]'
)


def _check_kind(table: Mapping[str, Any], where: str) -> None:
    """Refuse what has no trainer and no command, or both, or keys of the other."""
    if "command" not in table and "trainer" not in table:
        schema.refuse(where, "trainer", "missing", f"{KEYS['trainer'].words}; or `command`, a program")
    if "command" in table and "trainer" in table:
        schema.refuse(where, "command", "a trainer too", "exactly one of trainer and command")
    for key in command.TRAINERS_ONLY if "command" in table else ():
        if key in table:
            schema.refuse(where, key, repr(table[key]), _NOT_PACKED)
    for key in command.RESULTS if "trainer" in table else ():
        if key in table:
            accepted = "only with a command: what a trainer's evaluate returns is known"
            schema.refuse(where, key, repr(table[key]), accepted)


def _check_method(search: Search, where: str) -> None:
    if search.unit == "steps" and search.R % 1:
        schema.refuse(where, "R", repr(search.R), "a whole number of steps")
    if search.method == "random" and search.trials is None:
        schema.refuse(where, "trials", "missing", "how many configurations method random tries")
    if search.method in ("hyperband", "grid") and search.trials is not None:
        schema.refuse(where, "trials", repr(search.trials), "only with the methods asha, halving and random")
    for key in ("budget", "parallel"):
        if search.method != "asha" and getattr(search, key) is not None:
            schema.refuse(where, key, repr(getattr(search, key)), "only with method asha")
    if search.method == "grid":
        for axis in search.space.axes():
            if axis.size is None:
                schema.refuse(where, f"space.{axis.name}", axis.written, "int or choice, with method grid")


def _architecture(names: list[str], space: Space, where: str) -> tuple[str, ...]:
    """The arguments that make another model, in the order of the space."""
    finite = [axis.name for axis in space.axes() if axis.size is not None]
    for number, name in enumerate(names):
        if name not in finite or name in names[:number]:
            accepted = f"each once of space's choices and whole numbers: {', '.join(finite) or 'none'}"
            schema.refuse(where, "architecture", repr(name), accepted)
    return tuple(name for name in finite if name in names)


def _check_job(job: Mapping[str, Any], search: Search) -> None:
    """Refuse what no job may have, in the words of job files: each trial will be such a job."""
    try:
        jobfile.parse({"schema": 1, "job": [job]}, where=search.where, workdir=Path())
    except ConfigError as error:
        key = error.key.removeprefix("job trial.")
        inside = "defaults." if re.split(r"[.\[]", key)[0] in search.defaults else ""
        schema.refuse(search.where, inside + key, error.got, error.accepted)
