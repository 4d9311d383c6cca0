"""What several commands share: options with their environment variables, finding runs and jobs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from hpcsched import config
from hpcsched.errors import ConfigError, HpcschedError, NoSuchRun, UnknownJob
from hpcsched.printing import printable
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import JobStatus, Status, is_abandoned

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A number within bounds; nan, which is within any, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """A click option that can be given as HPCSCHED_<NAME> too."""
    long = next(n for n in names if n.startswith("--")).partition("/")[0]
    settings.setdefault("envvar", config.environment_name(long.removeprefix("--")))
    return click.option(*names, **settings)


def dir_option(command: F) -> F:
    """--dir, also after the command's name."""
    return click.option("--dir", "dir_", metavar="D", help="Run directory (./hpcsched-run).")(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def find_run(ctx: click.Context, dir_: str | None) -> RunDir:
    """The run directory meant; raises NewerRun if a newer hpcsched has written there."""
    rundir = RunDir(run_folder(ctx, dir_))
    rundir.refuse_newer()
    return rundir


def run_folder(ctx: click.Context, dir_: str | None) -> Path:
    """Where that is: the command's --dir, the global one, $HPCSCHED_DIR, files, default."""
    settings: config.Settings = ctx.obj
    return config.run_dir(dir_ or settings.values.get("dir"))


@contextlib.contextmanager
def hint_at_runs(ctx: click.Context, dir_: str | None) -> Iterator[None]:
    """Names the user's living runs when there is none in the default directory, and none was named."""
    try:
        yield
    except NoSuchRun as error:
        settings: config.Settings = ctx.obj
        if dir_ is not None or settings.values.get("dir") is not None:
            raise
        from hpcsched.store.status import my_runs

        living = [run.dir for run in my_runs() if run.alive]
        if not living:
            raise
        shown = ", ".join(living[:3]) + (f" and {len(living) - 3} more" if len(living) > 3 else "")
        what = "your live run is" if len(living) == 1 else "your live runs are"
        raise NoSuchRun(
            f"{error}; {what} in {shown} (`hpcsched status --all` lists all, --dir chooses one)"
        ) from None


def code_of(rundir: RunDir) -> int:
    """The exit code of a command that has shown a run: 3 where its agent is gone though jobs are left."""
    return NoSuchRun.exit_code if is_abandoned(rundir) else 0


def warm_processes(text: str) -> int | None:
    """How many warm processes wait on a host, from auto, off or a number; None: none at all."""
    from hpcsched.launch.zygote import DEFAULT_STANDBYS

    if text in ("auto", "off"):
        return DEFAULT_STANDBYS if text == "auto" else None
    if not text.isdecimal():
        raise ConfigError(where="--warm", got=repr(text), accepted="auto, off or a whole number")
    return int(text)


def say(text: str, *, err: bool = False) -> None:
    """Print what may hold words of a program or of another user: a terminal does not obey it."""
    click.echo(printable(text, lines=True), err=err)


def plural(number: int, what: str) -> str:
    """Such as 1 GPU, 2 GPUs."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def select(status: Status, keys: Sequence[str]) -> list[JobStatus]:
    """The jobs of these ids, names, ranges ("3-7") or comma lists of them; raises UnknownJob."""
    by_id = {str(job.id): job for job in status.jobs}
    by_name = {job.name: job for job in status.jobs}
    chosen: dict[int, JobStatus] = {}
    for key in (part for keys_ in keys for part in keys_.split(",") if part):
        job = by_id.get(key) or by_name.get(key)
        span = re.fullmatch(r"(\d+)-(\d+)", key)
        if job:
            chosen[job.id] = job
        elif span:
            found = [j for j in status.jobs if int(span[1]) <= j.id <= int(span[2])]
            if not found:
                raise UnknownJob(f"no job in {key}; `hpcsched status --states all` lists them")
            chosen.update((j.id, j) for j in found)
        else:
            raise UnknownJob(f"no job {key!r}; `hpcsched status --states all` lists them")
    return list(chosen.values())


def parse_options(pairs: Sequence[str], *, where: str = "--policy-option") -> dict[str, Any]:
    """A dict of K=V pairs; numbers become numbers. Raises ConfigError, also for one key with two values."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise ConfigError(where=where, got=repr(pair), accepted="K=V")
        value: Any
        try:
            value = float(text) if not re.fullmatch(r"[+-]?\d+", text) else int(text)
        except ValueError:
            value = text
        if key in options and options[key] != value:
            raise ConfigError(where=where, key=key, got=f"{options[key]} and {text}", accepted="one value")
        options[key] = value
    return options


def database_path(given: str | None) -> Path:
    """The database meant: --database, HPCSCHED_DATABASE, settings, else the user's data directory."""
    if given:
        return Path(given)
    from hpcsched.store.database import default_path

    return default_path()


def check_chart(path: Path, option: str = "--gantt") -> None:
    """Refuse a picture that could not be written at the end."""
    from importlib.util import find_spec

    from hpcsched.report.drawing import MissingExtra

    if not path.absolute().parent.is_dir():
        raise ConfigError(where=option, got=f"no folder {path.parent}", accepted="a file in a folder")
    if path.is_dir():
        raise ConfigError(where=option, got=f"{path}: a folder", accepted="a file")
    if find_spec("matplotlib") is None:
        raise MissingExtra("pictures need matplotlib: install hpcsched[report]")


@contextlib.contextmanager
def naming_the_file(path: Path | None) -> Iterator[None]:
    """Adds the file to what is said of one of its jobs."""
    try:
        yield
    except ConfigError as error:
        if path is None or not error.where.startswith("job "):
            raise
        key = f"{error.where}.{error.key}"
        raise ConfigError(where=str(path), key=key, got=error.got, accepted=error.accepted) from None


class MissingNumpy(HpcschedError):
    """Planning needs an extra that is not installed."""

    exit_code = 2


def needs_numpy() -> None:
    """Raise MissingNumpy if it is not there."""
    if find_spec("numpy") is None:
        raise MissingNumpy("planning needs numpy: install hpcsched[plan]")


def needs_place(where: str, file: Path) -> None:
    """Raise ConfigError, in the name of the option `where`, unless a file of that name could be written."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        got = f"{file}: {'a folder' if file.is_dir() else 'no such place'}"
        raise ConfigError(where=where, got=got, accepted="a file in a folder")
