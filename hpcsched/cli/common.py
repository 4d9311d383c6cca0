"""Parts that several commands share: options with their environment variables, finding runs and jobs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcsched import config
from hpcsched.accounts import name_of
from hpcsched.durations import parse_duration
from hpcsched.errors import ConfigError, HpcschedError, NoSuchRun, UnknownJob
from hpcsched.patience import is_folder, settle
from hpcsched.printing import json_for_terminals, printable, suggestion
from hpcsched.store import run_folders
from hpcsched.store.rundir import RunDir, RunDirError
from hpcsched.store.status import JobStatus, Status, is_abandoned

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from hpcsched.core.states import JobState

F = TypeVar("F", bound=Callable[..., Any])

COMPLETED = 200
"""Names that a shell is offered at most (chosen)."""


CHANGING = frozenset(
    {"run", "tune", "join", "submit", "drain", "cancel", "hold", "release", "suspend", "resume", "retry"}
)
"""Commands that change a run: only its owner's."""

WHAT_IF = frozenset({"simulate", "plan", "efficiency"})
"""Commands that only ask what would be: no rule of a site's is about them."""


class Number(click.FloatRange):
    """A number within bounds; nan, which is within any, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def seconds(text: str) -> float:
    """The type of an option that is a time, such as 90s, 10m, 2h or 1:30:00."""
    try:
        return parse_duration(text)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is not a time such as 90s, 10m, 2h or 1:30:00") from None


class Renamed(click.Option):
    """An option with an older name, which still works and is not in the help.

    Each use of the older name, or of its variable, is answered with a line that it is deprecated; an `alias`
    stays, without a word.
    """

    def __init__(
        self, *args: Any, older: str, older_variable: str = "", alias: bool = False, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.older, self.older_variable, self._alias = older, older_variable, alias

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        action = "append" if self.multiple else "store"
        parser.add_option(obj=self, opts=[self.older], dest=self.older, action=action, nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:
        assert self.name
        if self.older in opts:
            if self.name in opts:
                raise click.UsageError(f"{self.older} is an older name of {self.opts[0]}: give one", ctx)
            opts = {**opts, self.name: opts[self.older]}
            self._used(ctx, self.older, self.opts[0])
        return super().consume_value(ctx, opts)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        if value is None and (value := os.environ.get(self.older_variable) or None):
            self._used(ctx, self.older_variable, str(self.envvar))
        return value

    def _used(self, ctx: click.Context, used: str, new: str) -> None:
        ctx.meta[f"{__name__}.{self.name}"] = used, new
        if not self._alias:
            click.echo(f"hpcsched: {used} is deprecated: say {new}", err=True)


def variable(parameter: click.Parameter) -> str:
    """The environment variable that gives an option its value; empty if none is set."""
    names = (str(parameter.envvar or ""), getattr(parameter, "older_variable", ""))
    return next((name for name in names if os.environ.get(name)), "")


def by_the_site(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """The value of an option, as far as the site lets it be: a number comes within its limit, with a line
    that says so. Raises ConfigError for what is locked, and for a place that is not accepted."""
    settings, key = ctx.find_root().obj, str(param.name)
    if not isinstance(settings, config.Settings) or ctx.resilient_parsing or WHAT_IF & set(path_of(ctx)):
        return value
    rules, source = settings.rules, ctx.get_parameter_source(key)
    if source is click.core.ParameterSource.DEFAULT:
        return rules.nearest(key, value)
    if source is click.core.ParameterSource.DEFAULT_MAP:
        where, place = settings.origins.get(key, ""), key
        if line := settings.gave_way.get(key):
            click.echo(f"hpcsched: {line}", err=True)
    else:
        by_variable = source is click.core.ParameterSource.ENVIRONMENT
        where, place = variable(param) if by_variable else param.opts[-1], ""
    if key not in rules.locked and (nearest := rules.nearest(key, value)) != value:
        click.echo(f"hpcsched: {where} {value}: {nearest} counts, {rules.instead(key, value)}", err=True)
        return nearest
    rules.check(key, value, where=where, place=place)
    return value


def path_of(ctx: click.Context) -> list[str]:
    """The names of the command and of those above it."""
    return [str(ctx.info_name), *(path_of(ctx.parent) if ctx.parent else [])]


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """A click option that can be given as HPCSCHED_<NAME> too; with `older` it is Renamed."""
    long = next(n for n in names if n.startswith("--")).partition("/")[0]
    settings.setdefault("envvar", config.environment_name(long.removeprefix("--")))
    settings.setdefault("callback", by_the_site)
    if "older" in settings:
        older = config.environment_name(settings["older"].removeprefix("--"))
        settings |= {"cls": Renamed, "older_variable": older}
    return click.option(*names, **settings)


def gpus_per_node_option(what: str) -> Callable[[F], F]:
    """--gpus-per-node, as Slurm has it; `--gpus`, which is Slurm's word for the total, stays an alias."""
    return option(
        "--gpus-per-node", older="--gpus", alias=True, metavar="N", type=click.IntRange(min=0), help=what
    )


def hint_at_gpus_per_node(ctx: click.Context, nodes: int) -> None:
    """Say how `--gpus` was understood, where it could have been meant otherwise."""
    if nodes > 1 and (names := ctx.meta.get(f"{__name__}.gpus_per_node")):
        used, new = names
        click.echo(f"hpcsched: {used} means GPUs on each node, not the total: say {new}", err=True)


def allocation_options(command: F) -> F:
    """--batch, --hosts and --launcher: where the hosts come from, and how node agents get there."""
    batch = option(
        "--batch", metavar="B", default="auto", help="Batch system: auto, slurm, lsf, sge or none."
    )
    hosts = option("--hosts", metavar="A,B", help="Hosts, where no batch system grants them.")
    ways = "auto, srun, blaunch, jsrun, qrsh, ssh or local"
    launcher = option("--launcher", metavar="L", default="auto", help=f"Start of node agents: {ways}.")
    return batch(hosts(launcher(command)))


def dir_option(command: F) -> F:
    """--dir, also after the command's name."""
    return click.option("--dir", "dir_", metavar="D", help=config.DIR)(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def find_run(ctx: click.Context, dir_: str | None, *, begins: bool = False) -> RunDir:
    """The run directory meant; `begins`: for a run that begins, which takes no finished one's place.

    Raises NewerRun if a newer hpcsched has written there.
    """
    rundir = RunDir(run_folder(ctx, dir_, begins=begins))
    if rundir.owner not in (None, os.geteuid()):
        if ctx.info_name in CHANGING:
            rundir.refuse_others()
        if not os.access(rundir.root, os.R_OK | os.X_OK):
            raise RunDirError(
                f"{rundir.root} is the run of {name_of(rundir.owner)}, who has not shared it with you"
            )
        whose = f"this is the run of {name_of(rundir.owner)}: you can watch it, and not change it"
        say(f"hpcsched: {whose}", err=True)
    rundir.refuse_newer()
    return rundir


def run_folder(ctx: click.Context, dir_: str | None, *, begins: bool = False) -> Path:
    """The folder of the run meant: the command's --dir, the global one, $HPCSCHED_DIR, files, default."""
    settings: config.Settings = ctx.obj
    given = dir_ or settings.values.get("dir")
    here = Path(given).absolute() if given else Path.cwd()
    settle(here)  # what cannot be listed just now is not empty
    if given:
        return here
    return run_folders.of_next_run(here) if begins else run_folders.newest(here)


def goes_on(options: Mapping[str, Any]) -> bool:
    """Whether a run with these options goes on with what is there.

    One of them asks for it, or a batch system runs a job's script again from its beginning.
    """
    asked = any(options[key] for key in ("resume", "requeue", "chain", "chain_script"))
    if asked:
        return True
    from hpcsched.batch.kinds import restarted

    return restarted(os.environ)


@contextlib.contextmanager
def hint_at_runs(ctx: click.Context, dir_: str | None) -> Iterator[None]:
    """Where no directory was named, names other runs that may be meant: those of the user that live if there
    is none here, an earlier one here that has begun, or that has the job."""
    settings: config.Settings = ctx.obj
    named = dir_ is not None or settings.values.get("dir") is not None
    try:
        yield
    except NoSuchRun as error:
        hint = "" if named else _living() or _begun()
        raise NoSuchRun(f"{error}{hint}") if hint else error from None
    except UnknownJob as error:
        hint = "" if named or not error.name else _with_job(error.name)
        raise UnknownJob(f"{error}{hint}") if hint else error from None


def _living() -> str:
    from hpcsched.store.summaries import my_runs

    living = [run.dir for run in my_runs() if run.alive]
    if not living:
        return ""
    shown = ", ".join(living[:3]) + (f" and {len(living) - 3} more" if len(living) > 3 else "")
    what = "your live run is" if len(living) == 1 else "your live runs are"
    return f"; {what} in {shown} (`hpcsched status --all` lists all, --dir chooses one)"


def _begun() -> str:
    here = Path.cwd()
    begun = [folder for folder in run_folders.all_of(here) if RunDir(folder).begun]
    return f"; the last run that has begun here is that of --dir {begun[-1].name}" if begun else ""


def _with_job(name: str) -> str:
    from hpcsched.store.status import read_status

    for folder in reversed(run_folders.all_of(Path.cwd())):
        with contextlib.suppress(HpcschedError):
            if any(name in (job.name, job.array) for job in read_status(RunDir(folder)).jobs):
                return f"; an earlier run has one: --dir {folder.name}"
    return ""


def code_of(rundir: RunDir) -> int:
    """The exit code of a command that has shown a run: 3 where its agent is gone though jobs are left."""
    return NoSuchRun.exit_code if is_abandoned(rundir) else 0


def warm_processes(text: str) -> int | None:
    """The number of warm processes on a host, from auto, off or a number; None: none at all."""
    from hpcsched.launch.zygote import DEFAULT_STANDBYS

    if text in ("auto", "off"):
        return DEFAULT_STANDBYS if text == "auto" else None
    if (number := whole_number(text)) is None:
        raise ConfigError(where="--warm", got=repr(text), accepted="auto, off or a whole number")
    return number


def whole_number(text: str) -> int | None:
    """The number of at most nine digits that a text is; None: it is none."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def say(text: str, *, lines: bool = False, err: bool = False) -> None:
    """Print a line (`lines`: several) that may hold words of a program or of another user: a terminal does
    not obey it."""
    click.echo(printable(text, lines=lines), err=err)


def say_json(page: Any) -> None:
    """Print a JSON document, in a line; a terminal obeys nothing of it either."""
    import msgspec

    click.echo(json_for_terminals(msgspec.json.encode(page)))


def plural(number: int, what: str) -> str:
    """Such as 1 GPU, 2 GPUs."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def select(status: Status, keys: Sequence[str]) -> list[JobStatus]:
    """The jobs of these ids, names, names of arrays, ranges ("3-7") or comma lists of them; raises
    UnknownJob."""
    by_id = {str(job.id): job for job in status.jobs}
    by_name = {job.name: job for job in status.jobs}
    arrays: dict[str, list[JobStatus]] = {}
    for one in status.jobs:
        if one.array:
            arrays.setdefault(one.array, []).append(one)
    chosen: dict[int, JobStatus] = {}
    for key in (part for keys_ in keys for part in keys_.split(",") if part):
        job = by_id.get(key) or by_name.get(key)
        span = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", key)
        if job:
            chosen[job.id] = job
        elif key in arrays:
            chosen.update((j.id, j) for j in arrays[key])
        elif span:
            found = [j for j in status.jobs if int(span[1]) <= j.id <= int(span[2])]
            if not found:
                raise UnknownJob(f"no job in {key}; `hpcsched status --states all` lists them")
            chosen.update((j.id, j) for j in found)
        else:
            near = suggestion(key, [*by_name, *arrays])
            raise UnknownJob(f"no job {key!r}{near}; `hpcsched status --states all` lists them", name=key)
    return list(chosen.values())


def name_one(key: str, jobs: Mapping[str, JobState]) -> UnknownJob:
    """The error of a command that wants one of these jobs: it names one that has failed, if there is one."""
    example = next((name for name, state in jobs.items() if state.failed), next(iter(jobs)))
    return UnknownJob(f"{key!r} are {len(jobs)} jobs: name one, such as {example}")


def meant(status: Status, keys: Sequence[str]) -> list[JobStatus]:
    """As `select`, of an array only the jobs that are not over; all of them if none is left."""
    chosen, of_arrays = select(status, keys), {word for key in keys for word in key.split(",")}
    return [job for job in chosen if not (job.array in of_arrays and job.state.final)] or chosen


def job_names(ctx: click.Context, _: click.Parameter, begun: str) -> list[str]:
    """The names of the run's jobs and arrays that begin like this: for completion, which must never fail."""
    from hpcsched.store.status import read_status

    given = (at.params.get("dir_") for at in (ctx, ctx.parent) if at is not None)
    try:
        settings = config.load(os.environ, here=Path.cwd()).values
        named = next(filter(None, given), None) or os.environ.get("HPCSCHED_DIR") or settings.get("dir")
        folder = Path(named).absolute() if named else run_folders.newest(Path.cwd())
        jobs = read_status(RunDir(folder)).jobs
    except (HpcschedError, OSError):
        return []
    last = begun.rpartition(",")
    names = dict.fromkeys([*(job.array for job in jobs if job.array), *(job.name for job in jobs)])
    return [f"{last[0]}{last[1]}{name}" for name in names if name.startswith(last[2])][:COMPLETED]


def files(ctx: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    """Have the shell complete files itself."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(begun, type="file")]


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
    """Refuse a figure that could not be written at the end."""
    if not is_folder(path.absolute().parent):
        raise ConfigError(where=option, got=f"no folder {path.parent}", accepted="a file in a folder")
    if is_folder(path):
        raise ConfigError(where=option, got=f"{path}: a folder", accepted="a file")
    needs("matplotlib", "a figure", "report")


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


def needs(module: str, what: str, extra: str) -> None:
    """Raise MissingExtra, in the name of what needs it, unless this module of an extra is there."""
    from hpcsched.report.drawing import MissingExtra

    if find_spec(module) is None:
        raise MissingExtra(f"{what} needs {module}: install hpcsched[{extra}]")


def needs_numpy() -> None:
    needs("numpy", "planning", "plan")


def needs_place(where: str, file: Path) -> None:
    """Raise ConfigError, in the name of the option `where`, unless a file of that name could be written."""
    if (folder := is_folder(file)) or not is_folder(file.absolute().parent):
        got = f"{file}: {'a folder' if folder else 'no such place'}"
        raise ConfigError(where=where, got=got, accepted="a file in a folder")
