"""The jobs that a command line gives: those of a job file, or of a command, once or for many values."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import click

from hpcsched import jobfile
from hpcsched.accounts import user_name
from hpcsched.client import names
from hpcsched.core.model import JobSpec
from hpcsched.dialects.command import program_name
from hpcsched.errors import ConfigError
from hpcsched.jobfile import matrix
from hpcsched.patience import patiently, settle

F = TypeVar("F", bound=Callable[..., Any])

_EACH = "One job for each value: lr=1e-3,1e-2 or seed=1..5, with {lr} in the command; more make combinations."
_ARRAY = "As sbatch's: one job for each number, with {index} in the command; %4: four at once."
_AT_ONCE = "With --each or --array: so many of the jobs under way at a time."

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


def sweep_options(command: F) -> F:
    """Adds --each, --array and --at-once."""
    command = click.option("--at-once", type=click.IntRange(min=1), metavar="N", help=_AT_ONCE)(command)
    command = click.option("--array", metavar="1-20%4", help=_ARRAY)(command)
    return click.option("--each", metavar="KEY=V,...", multiple=True, help=_EACH)(command)


def is_job_file(words: Sequence[str], *, elsewhere: bool = False) -> bool:
    """Whether these are the name of a job file; else they are a command, looked for on this PATH unless it
    starts `elsewhere`. Raises ConfigError for what is neither."""
    if not words or words[0].endswith(".toml"):
        if len(words) > 1:
            raise click.UsageError(f"one job file, not {' and '.join(words[:2])}; a command comes after --")
        return bool(words)
    if len(words) > 1:
        return False
    try:
        about = patiently(Path(words[0]).stat)
    except (OSError, ValueError):
        if elsewhere or _surely(partial(shutil.which, words[0]), *os.get_exec_path()):
            return False
        accepted = "a job file (JOBS.toml), or a command that can be found"
        raise ConfigError(where=repr(words[0]), got="no file, and no command", accepted=accepted) from None
    if stat.S_ISREG(about.st_mode) and os.access(words[0], os.X_OK):
        return False
    if words[0].endswith((".py", ".sh")):
        raise _not_executable(words[0])
    return True


def _not_executable(program: str) -> ConfigError:
    reader = {".py": "python", ".sh": "sh"}.get(Path(program).suffix)
    accepted = f"chmod +x {program}" + (f", or `{reader} {program}`" if reader else "")
    return ConfigError(where=repr(program), got="a program that is not executable", accepted=accepted)


def check_programs(specs: Iterable[JobSpec], *, same_path: bool = True) -> list[ConfigError]:
    """Refuse commands whose program or folder is not on this host. Raises ConfigError.

    `same_path`: jobs have this PATH; without that, programs that it does not have are returned.
    Not asked are jobs with an environment or a container, which have programs of their own, and those that
    wait for others, which may make them.
    """
    asked = {
        (spec.command[0], spec.workdir or "", spec.env.get("PATH"))
        for spec in specs
        if spec.command and not (spec.environment or spec.container or spec.after)
    }
    doubts = []
    for program, workdir, path in sorted(asked, key=str):
        if not _surely(partial(os.path.isdir, workdir), workdir):  # whatever the name is
            raise ConfigError(where=repr(workdir), got="no such folder", accepted="the folder to run in")
        here = os.path.join(workdir, program)  # noqa: PTH118
        ask = partial(shutil.which, here if "/" in program else program, path=path)
        folders = os.get_exec_path(None if path is None else {"PATH": path})
        if not _surely(ask, *([here] if "/" in program else folders)):
            error = _not_found(program, there=os.path.isfile(here))  # noqa: PTH113
            if same_path or "/" in program:
                raise error
            doubts.append(error)
    return doubts


def _surely(ask: Callable[[], object], *paths: str) -> bool:
    """Whether it is so; asked again where not: of a file system that does not answer it is not so, too."""
    if ask():
        return True
    for path in paths:
        _settle_once(path)
    return bool(ask())


@cache
def _settle_once(path: str) -> None:
    settle(Path(path))  # of a folder that never answers this takes long


def _not_found(program: str, *, there: bool) -> ConfigError:
    if there and "/" in program:
        return _not_executable(program)
    got, accepted = "no such program", "a program in this PATH, or the path of one"
    if there:
        got, accepted = f"not in this PATH, but ./{program} is there", "one in this PATH, or the path of one"
    return ConfigError(where=repr(program), got=got, accepted=accepted)


def of_command(
    words: Sequence[str],
    keys: Mapping[str, Any],
    *,
    each: Sequence[str] = (),
    array: str | None = None,
    at_once: int | None = None,
    where: str,
    name: str | None = None,
    taken: Collection[str] = (),
    arrays: Collection[str] = (),
    numbered: bool = False,
    again: bool = False,
) -> tuple[JobSpec, ...]:
    """The jobs of a command with these keys of a job file; without words one of them is `trainer`.

    `taken` are the names of jobs that the run has, `arrays` those of its arrays. Without a `name` it is the
    program's; `numbered`: with the first number that makes it new. `again`: a job may have the name of one
    there is. Raises ConfigError.
    """
    trainer = str(keys.get("trainer", "")).rpartition(":")[2]
    # A program is given texts, as they were written, a trainer numbers.
    values = _values(each, texts=not trainer)
    if array is not None and values:
        raise click.UsageError("--each and --array are two ways to make many jobs: give one")
    if at_once is not None and not values and array is None:
        raise click.UsageError("--at-once goes with --each or --array")
    both = {*taken, *arrays}
    if name in arrays and not again:
        raise ConfigError(
            where="--name", got=f"{name}: the run has an array of this name", accepted="another"
        )
    base = names.fit(program_name(words) if words else trainer)
    stems = names.numbered(base, both) if numbered else [base]
    for stem in [name] if name else stems:
        job: dict[str, Any] = {"name": stem, **keys, **({"command": list(words)} if words else {})}
        if values:
            job |= {"matrix": values, **({"at_once": at_once} if at_once else {})}
        jobs = [job] if array is None else _array(job, array, at_once)
        table = {"schema": 1, "job": jobs}
        place = f"{where} -- {shlex.join(words)}" if words else where
        found = jobfile.parse(
            table, where=place, workdir=Path.cwd(), user=user_name(), known=taken, again=again or not name
        ).jobs
        if name or not numbered or not (stem in both or any(job.name in both for job in found)):
            return found
    raise AssertionError("there are more numbers than names")


def exported(given: Sequence[str]) -> dict[str, str]:
    """The variables of --export: by name with the caller's values, or as NAME=VALUE. Raises ConfigError."""
    found: dict[str, str] = {}
    for word in (word for text in given for word in text.split(",") if word):
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            accepted = "names of variables that are set, or NAME=VALUE, with commas"
            raise ConfigError(where="--export", got=f"{name}: not set here", accepted=accepted)
        found[name] = value if equals else os.environ[name]
    return found


def trainer_arguments(text: str) -> dict[str, Any]:
    """The arguments in {"a": 1} or a=1,b=x; values that are not JSON are text. Raises ConfigError."""
    if not text.lstrip().startswith("{"):
        pairs = [part.partition("=") for part in text.split(",")]
        if all(key.strip() and equals for key, equals, _ in pairs):
            return {key.strip(): _json_or_text(value.strip()) for key, _, value in pairs}
    else:
        found = _json_or_text(text)
        if isinstance(found, dict):
            return found
    raise ConfigError(
        where="--args", got=repr(text), accepted='such as {"width": 0.5} or width=0.5,classes=10'
    )


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _values(each: Sequence[str], *, texts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in each:
        key, equals, given = text.partition("=")
        if not key or not equals or not given:
            raise ConfigError(where="--each", got=repr(text), accepted="KEY=VALUE,VALUE,... or KEY=1..5")
        if key in found:
            raise ConfigError(where="--each", got=f"{key} twice", accepted="one --each for a key")
        values = given.split(",")
        if "" in values:
            raise ConfigError(
                where="--each", got=f"{text!r}: an empty value", accepted="a value between commas"
            )
        found[key] = [one for value in values for one in _range(value)]
        if not texts:
            found[key] = [_number(value) for value in found[key]]
    return found


def _number(value: Any) -> Any:
    """The number, true or false that a text is; else the text."""
    found = _json_or_text(value) if isinstance(value, str) else value
    return found if isinstance(found, (int, float)) else value


def _range(value: str) -> list[Any]:
    numbers = matrix.range_of(value)
    if numbers == []:
        accepted = f"a range that goes up, of at most {matrix.MOST} numbers"
        raise ConfigError(where="--each", got=repr(value), accepted=accepted)
    return [value] if numbers is None else numbers


def _array(job: dict[str, Any], text: str, at_once: int | None) -> list[dict[str, Any]]:
    numbers, percent, most = text.partition("%")
    if percent and at_once is not None:
        raise click.UsageError("--at-once and % in --array say the same: give one")
    accepted = 'numbers and ranges such as "1-20", "0-15:4" or "1,3,7", and "%4" behind them'
    if percent and not re.fullmatch("0*[1-9][0-9]{0,8}", most):
        raise ConfigError(where="--array", got=repr(text), accepted=accepted)
    indices: dict[int, None] = {}
    for part in numbers.split(","):
        found = _PART.fullmatch(part)
        first, last, step = (int(found[i] or 0) for i in (1, 2, 3)) if found else (0, -1, 0)
        if found is None or (found[2] and last < first) or (found[3] and not step):
            raise ConfigError(where="--array", got=repr(text), accepted=accepted)
        if (last - first) // (step or 1) > matrix.MOST:
            raise ConfigError(where="--array", got=repr(text), accepted=f"at most {matrix.MOST} jobs")
        indices |= dict.fromkeys(range(first, (last if found[2] else first) + 1, step or 1))
    if len(indices) > matrix.MOST:
        raise ConfigError(where="--array", got=f"{len(indices)} jobs", accepted=f"at most {matrix.MOST}")
    most_at_once = int(most) if percent else at_once
    return list(matrix.numbered(job, list(indices), most_at_once))
