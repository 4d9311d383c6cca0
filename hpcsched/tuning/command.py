"""Searches that try a program: its command, with a trial's values in their places.

`{key}` stands for a value as in sweeps (`jobfile.matrix`): of `[space]` and `args`, and what only the search
knows, `{budget}`, `{trial}` and `{dir}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.contract import schema
from hpcsched.dialects import number_pattern
from hpcsched.errors import BadInput
from hpcsched.jobfile import matrix, restart
from hpcsched.tuning.space import Config

if TYPE_CHECKING:
    from hpcsched.tuning.search import Search

BUDGET, TRIAL, FOLDER = "budget", "trial", "dir"
GIVEN = (BUDGET, TRIAL, FOLDER)
"""Places for what only the search knows: what a trial has to have trained in all, its number, its folder."""

DEFAULTS = (
    "container",
    "gpus",
    "nodes",
    "processes",
    "strategy",
    "background",
    "max_foreground_slowdown",
    "priority",
    "workdir",
    "progress_pattern",
    "restartable",
    *restart.KEYS,
)
"""Keys of a job that [defaults] may give to programs only."""

RESULTS = ("result", "result_file")
"""Keys for programs only: where the metric stands."""

TRAINERS_ONLY = ("packing", "against", "knn_threshold", "exact")
"""Keys for trainers only."""

OUTPUT = "hpcsched-%j.out"
"""Where the output of a job goes, in its folder."""


def output_of(job_id: int) -> str:
    """The name of a job's output."""
    return OUTPUT.replace("%j", str(job_id))


def values_of(*, trial: int, args: Mapping[str, Any], budget: float, folder: str) -> dict[str, Any]:
    """The values of all places for one rung of a trial. Budgets of programs are whole numbers."""
    return {**args, BUDGET: int(budget), TRIAL: trial, FOLDER: folder}


def uses_folder(search: Search) -> bool:
    """Whether its trials are told a folder."""
    return matrix.mentions(_texts(search), FOLDER)


def job_table(search: Search, values: Mapping[str, Any]) -> dict[str, Any]:
    """A job as a job file would have it, but for its name and what it waits for."""
    table: dict[str, Any] = {**_texts(search), "output": OUTPUT}
    del table["result_file"]
    if "strategy" not in table:
        table.setdefault("gpus", 1)
    if (image := table.get("container")) is not None and uses_folder(search):
        image = image if isinstance(image, dict) else {"image": image}
        if isinstance(mounts := image.get("mounts", []), list):
            table["container"] = {**image, "mounts": [*mounts, f"{{{FOLDER}}}"]}
    args = {key: value for key, value in values.items() if key not in GIVEN}
    return {**matrix.filled(table, values), "args": args}


def result_file(search: Search, values: Mapping[str, Any], workdir: str | Path) -> Path:
    """The file with the metric of one rung of a trial that runs in `workdir`."""
    return Path(workdir) / matrix.filled_text(search.result_file or "", values)


def check(search: Search) -> None:
    """Refuse values that go nowhere, or that nothing gives, and results that are not found so. Raises
    ConfigError."""
    where, texts = search.where, _texts(search)
    for axis in search.space.axes():
        _check_name(axis.name, f"space.{axis.name}", texts, where)
    for key, value in search.args.items():
        _check_name(key, f"args.{key}", texts, where)
        if not isinstance(value, str | int | float):
            schema.refuse(where, f"args.{key}", repr(value), "a text, a number, true or false")
    if search.R % 1:
        schema.refuse(where, "R", repr(search.R), "a whole number, for a command")
    rungs = any(len(bracket.rungs) > 1 for bracket in search.brackets())
    if rungs and not matrix.mentions(texts, BUDGET):
        accepted = f'{{{BUDGET}}} in a text, such as "--{search.unit}", "{{{BUDGET}}}"'
        schema.refuse(where, "command", f"no {{{BUDGET}}}, which is not the same in all rungs", accepted)
    _check_results(search)


def examples(search: Search) -> Iterator[dict[str, Any]]:
    """Tables of jobs like those of the search: of one trial, and of it with each other text of the space."""
    (first,) = search.space.sample(1, search.seed)
    yield example(search, first)
    for axis in search.space.axes():
        others = (value for value in axis.values if isinstance(value, str) and value != first[axis.name])
        yield from (example(search, {**first, axis.name: value}) for value in others)


def example(search: Search, config: Config, *, trial: int = 0) -> dict[str, Any]:
    """The table of a job like those of the search."""
    return {"name": "trial", **job_table(search, _values(search, config, trial))}


def _values(search: Search, config: Config, trial: int) -> dict[str, Any]:
    args = {**search.args, **config}
    return values_of(trial=trial, args=args, budget=search.R, folder=f"/trials/{trial}")


def _texts(search: Search) -> dict[str, Any]:
    """All that may have places for values."""
    return {**search.defaults, "command": list(search.command), "result_file": search.result_file or ""}


def _check_name(key: str, place: str, texts: Mapping[str, Any], where: str) -> None:
    reserved = (*GIVEN, *matrix.RESERVED)
    if key in reserved:
        schema.refuse(where, place, repr(key), f"another name than {', '.join(reserved)}")
    if not matrix.mentions(texts, key):
        schema.refuse(where, place, "used nowhere", f"{{{key}}} in a text such as the command")


def _check_results(search: Search) -> None:
    if search.result is not None and search.result_file is not None:
        schema.refuse(search.where, "result_file", "result too", "one of result and result_file")
    if search.result is not None:
        try:
            number_pattern(search.result)
        except BadInput as error:
            schema.refuse(search.where, "result", repr(search.result), str(error))
    if search.result_file is not None:
        files = [
            result_file(
                search,
                _values(search, config, trial),
                example(search, config, trial=trial).get("workdir", ""),
            )
            for trial in (0, 1)
            for config in search.space.sample(1, search.seed)
        ]
        if files[0] == files[1] or "\0" in search.result_file:
            accepted = f"another file for each trial, such as {{{FOLDER}}}/result.json"
            schema.refuse(search.where, "result_file", repr(search.result_file), accepted)
