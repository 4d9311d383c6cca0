"""`hpcsched script`: a batch script for these job sets, on this site."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpcsched import config, durations, jobfile
from hpcsched.cli.common import (
    Number,
    dir_option,
    gpus_per_node_option,
    hint_at_gpus_per_node,
    option,
    say,
    variable,
)
from hpcsched.cli.site import batch_scripts
from hpcsched.core.mechanisms.cpu.cores import WHOLE
from hpcsched.core.model import JobSpec
from hpcsched.durations import clock
from hpcsched.errors import ConfigError
from hpcsched.store.files import write_atomically
from hpcsched.store.run_folders import USUAL

_TIME = 'minutes, or a time such as "90m", "2h", "2:00:00", "1-12:00:00"'
_PASSED_ON = ("devices", "policy", "policy_option", "profiles", "device_type", "checkpoints", "interface")
"""Options that `run` has too: given here, they go into its line. From settings files it reads them itself."""


@click.command()
@click.argument("system", type=click.Choice(list(batch_scripts.WRITERS)))
@click.argument("sets", metavar="JOBS.toml...", nargs=-1, required=True, type=click.Path(path_type=Path))
@dir_option
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the script to this file; -: standard output.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there already.")
@click.option(
    "--advice",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Output of `hpcsched advise --json`: nodes, GPUs, time and partition as it recommends.",
)
@click.option(
    "--advice-row", metavar="N", type=click.IntRange(min=1), help="Those of another row of the advice."
)
@option("--time", "-t", "time_", metavar="T", help="Time limit: minutes, 90m, 2h, 2:00:00, 1-12:00:00.")
@option("--nodes", "-N", type=click.IntRange(min=1), help="Nodes (1).")
@gpus_per_node_option("GPUs on each node.")
@option("--cpus", type=click.IntRange(min=1), help="CPUs on each node (those of its GPUs).")
@option("--cpus-per-gpu", type=click.IntRange(min=1), help="CPUs for each GPU.")
@option("--mem", metavar="SIZE", help="Memory on each node, as sbatch has it: 64G; 0: all (Slurm).")
@option("--mem-per-gpu", metavar="SIZE", help="Memory for each GPU (Slurm).")
@option("--partition", "--queue", "-p", metavar="P", help="Partition (Slurm) or queue (LSF, SGE).")
@option("--account", "-A", metavar="A", help="Account (Slurm) or project (LSF, SGE).")
@option("--name", "-J", metavar="NAME", help="Name of the batch job.")
@option("--mail", metavar="ADDRESS", help="Address for mails of the batch system.")
@option(
    "--max-concurrent",
    older="--at-once",
    alias=True,
    metavar="N",
    type=click.IntRange(min=1),
    help="Of several sets, the most that run at the same time (in Slurm: --array=...%N).",
)
@click.option(
    "--requeue", "again", flag_value="requeue", help="When time is up: back into the queue (default)."
)
@click.option("--chain", "again", flag_value="chain", help="When time is up: submit a follow-up job.")
@click.option("--once", "again", flag_value="once", help="When time is up: stop.")
@option(
    "--max-restarts", type=click.IntRange(min=0), default=20, help="Most requeues or follow-up jobs (20)."
)
@option(
    "--margin",
    type=Number(min=0),
    default=60.0,
    help="Safety margin before the end, for saving: seconds (60).",
)
@option("--launcher", metavar="L", help="Start of node agents: srun, blaunch, jsrun, qrsh, ssh.")
@click.option("--setup", metavar="LINE", multiple=True, help="A shell line before the run; can be repeated.")
@click.option(
    "--directive", metavar="D", multiple=True, help='A further directive ("--exclusive"); can be repeated.'
)
@option("--devices", metavar="SPEC", help="For the run: auto, cuda[:N], cpu:N or replay:N[@SPEED].")
@option("--policy", metavar="P", help="For the run: its policy.")
@option("--policy-option", metavar="K=V", multiple=True, help="For the run: an option of the policy.")
@option("--profiles", metavar="F", multiple=True, help="For the run: profile files or names of shipped ones.")
@option("--device-type", metavar="T", help="For the run: device type whose profiles count.")
@option("--checkpoints", metavar="D", help="For the run: directory for checkpoints on a fast filesystem.")
@option("--interface", metavar="I", help="For the run: network interface for connections between hosts.")
@click.pass_context
def script(ctx: click.Context, /, system: str, sets: tuple[Path, ...], **_: Any) -> None:
    """Print a batch script that runs JOBS.toml; with several, an array job with a run for each.

    Defaults come from the table [script] of the settings files. Submit the script with `sbatch FILE`,
    `bsub < FILE` (LSF) or `qsub FILE` (SGE).
    """
    given = _Given(ctx)
    output: Path | None = ctx.params["output"]
    output = None if output == Path("-") else output
    wrapper = _wrapper(given, system, sets, output)
    text = batch_scripts.WRITERS[system](wrapper)
    if output is None:
        sys.stdout.write(text)
        return
    if output.exists() and not ctx.params["force"]:
        raise ConfigError(where="-o", got=f"{output} is there already", accepted="a new file, or --force")
    write_atomically(output.absolute(), os.fsencode(text))  # a path may be no UTF-8
    how = {"slurm": "sbatch ", "lsf": "bsub < ", "sge": "qsub "}[system] + shlex.quote(str(output))
    say(f"hpcsched: written; submit it with: {how}", err=True)


class _Given:
    """Each setting's value: flag or environment, else [script] of the files, else a default."""

    def __init__(self, ctx: click.Context) -> None:
        self.ctx = ctx
        self.params: dict[str, Any] = ctx.params
        self.settings: config.Settings = ctx.obj
        self._table = self.settings.values.get("script", {})
        self.told: list[tuple[str, str, str]] = []
        self._advice, self._advised_by = _advised(ctx.params)

    def get(self, parameter: str, key: str | None = None, default: Any = None, *, show: Any = str) -> Any:
        """The value of an option, or of this key of [script]."""
        value, origin = self.params[parameter], self._origin(parameter)
        if parameter in self._advice and origin != "command line":
            value, origin = self._advice[parameter], self._advised_by
        if origin == "default" and key in self._table:
            value, origin = self._table[key], self.settings.origins[f"script.{key}"]
        if value is None or value == ():
            value = default
        if value is not None and value != ():
            label = key or parameter.strip("_")
            text = "; ".join(value) if isinstance(value, list | tuple) else show(value)
            self.told.append((label, text, origin))
            if isinstance(value, str):
                _printable(label, value)
        return value

    def table(self, key: str) -> list[str]:
        """A list that only [script] has, or nothing."""
        value: list[str] = self._table.get(key, [])
        if value:
            self.told.append((key, "; ".join(value), self.settings.origins[f"script.{key}"]))
        return value

    def word(self, key: str) -> str | None:
        """A word that only [script] has."""
        value: str | None = self._table.get(key)
        if value:
            self.told.append((key, value, self.settings.origins[f"script.{key}"]))
        return value

    def passed_on(self) -> list[str]:
        """The options for `run` that were given by flag or environment, as words of its line."""
        words = []
        for parameter in _PASSED_ON:
            value = self.params[parameter]
            if self._origin(parameter) != "default" and value:
                for text in value if isinstance(value, tuple) else (value,):
                    words += ["--" + parameter.replace("_", "-"), _printable(parameter, text)]
        return words

    def _origin(self, parameter: str) -> str:
        match self.ctx.get_parameter_source(parameter):
            case click.core.ParameterSource.COMMANDLINE:
                return "command line"
            case click.core.ParameterSource.ENVIRONMENT:
                (option,) = (known for known in self.ctx.command.params if known.name == parameter)
                return variable(option)
            case click.core.ParameterSource.DEFAULT_MAP:
                return self.settings.origins.get(parameter, "settings")
        return "default"


def _advised(params: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What the advice says, by parameter, and where it stands, in words."""
    path, number = params["advice"], params["advice_row"]
    if path is None:
        if number is not None:
            raise ConfigError(where="--advice-row", got=str(number), accepted="with --advice FILE only")
        return {}, ""
    if len(params["sets"]) > 1:
        got = f"{len(params['sets'])} sets"
        raise ConfigError(where="--advice", got=got, accepted="one set: the advice is for one")
    from hpcsched.allocations.advice import read

    advice, row = read(path, number)
    if Path(advice.file).name != params["sets"][0].name:
        click.echo(f"hpcsched: {path} is advice for {advice.file}, not {params['sets'][0]}", err=True)
    asked = {
        "nodes": row.nodes,
        "gpus_per_node": row.gpus_per_node,
        "time_": durations.limit(row.time_s),
        "partition": row.partition or None,
    }
    return {key: value for key, value in asked.items() if value is not None}, f"{path}, row {row.number}"


def _wrapper(given: _Given, system: str, sets: Sequence[Path], output: Path | None) -> batch_scripts.Wrapper:
    from hpcsched.agent.cpu_cores import CPUS_PER_GPU

    time_s = seconds_of(given.get("time_", "time"))
    nodes = given.get("nodes", "nodes", 1)
    files = [jobfile.load(path, workdir=Path.cwd()) for path in sets]
    on_cores = [job.cpus for file in files for job in file.jobs if job.cpus is not None]
    only_cores = len(on_cores) == sum(len(file.jobs) for file in files)
    gpus = given.get("gpus_per_node", None if only_cores else "gpus_per_node", 0 if only_cores else None)
    if gpus is None:
        accepted = (
            "how many each node has: --gpus-per-node N, HPCSCHED_GPUS_PER_NODE, "
            "or gpus_per_node in the settings' [script]"
        )
        raise ConfigError(where="--gpus-per-node", got="not known", accepted=accepted)
    hint_at_gpus_per_node(given.ctx, nodes)
    cpus = given.get("cpus", "cpus", math.ceil(max(on_cores)) if only_cores and not gpus else None)
    cpus_per_gpu = given.get("cpus_per_gpu", "cpus_per_gpu")
    kept = ["--cpus-per-gpu", str(cpus_per_gpu)] if gpus and cpus_per_gpu and on_cores else []
    there = cpus or (gpus * cpus_per_gpu if cpus_per_gpu else None)
    spare = None if there is None else max(0, there - gpus * (cpus_per_gpu or CPUS_PER_GPU))
    for path, file in zip(sets, files, strict=True):
        _check_set(given, path, file, gpus=gpus, nodes=nodes, cpus=spare)
    again = given.get("again", "again", "chain" if given.settings.values.get("chain") else "requeue")
    margin_s = given.get("margin", show=lambda seconds: f"{seconds:g}")
    _check_again(again, system, sets, output, given.params["max_concurrent"])
    mem, mem_per_gpu = _memory(given, system, gpus)
    stem = re.sub(r"[^\w.+-]", "-", sets[0].stem)
    wrapper = batch_scripts.Wrapper(
        name=given.get("name", "name", "hpcsched" if len(sets) > 1 else stem),
        sets=[path.absolute() for path in sets],
        dirs=_dirs(given, sets),
        workdir=Path.cwd(),
        time_s=time_s,
        nodes=nodes,
        gpus=gpus,
        cpus=cpus,
        cpus_per_gpu=cpus_per_gpu,
        mem=mem,
        mem_per_gpu=mem_per_gpu,
        partition=given.get("partition", "partition"),
        account=given.get("account", "account"),
        mail=given.get("mail", "mail"),
        max_concurrent=given.get("max_concurrent"),
        again=again,
        margin_s=margin_s,
        max_restarts=given.get("max_restarts"),
        chain_script=output.absolute() if output and again == "chain" else None,
        gpu_option=given.word("gpu_option"),
        host_option=given.word("host_option"),
        pe=given.word("pe"),
        modules=given.table("modules"),
        setup=[*given.table("setup"), *(_printable("setup", line) for line in given.get("setup") or ())],
        directives=[
            *given.table("directives"),
            *(_printable("directive", line) for line in given.get("directive") or ()),
        ],
        environment=_environment(given, again),
        run_options=[*_launcher(given, system), *kept, *given.passed_on()],
        made_by=shlex.join(["hpcsched", *sys.argv[1:]]),
        told=given.told,
        **command_dir(),
    )
    if time_s is not None and time_s <= margin_s:
        raise ConfigError(
            where="--time",
            got=f"{clock(time_s)}, but saving starts {clock(margin_s)} before the end",
            accepted="more than that, or a smaller --margin",
        )
    return wrapper


def _printable(what: str, text: str) -> str:
    """A text that goes into one line of the script; raises ConfigError for what would break out of it."""
    if not text.isprintable():
        raise ConfigError(where=f"--{what.replace('_', '-')}", got=repr(text), accepted="one line of text")
    return text


def seconds_of(value: str | int | None) -> float | None:
    """Seconds of a time limit; a bare number is minutes, as both batch systems have it."""
    if value is None:
        return None
    text = str(value).strip()
    try:
        # Of "2:00" one batch system thinks minutes and seconds, the other hours and minutes.
        if text.count(":") == 1 and "-" not in text:
            raise ValueError(text)
        seconds = float(text) * 60 if re.fullmatch(r"\d+", text) else durations.parse_duration(text)
        if seconds <= 0:
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise ConfigError(where="--time", got=repr(value), accepted=_TIME) from None
    return seconds


def _check_set(
    given: _Given, path: Path, file: jobfile.JobFile, *, gpus: int, nodes: int, cpus: int | None
) -> None:
    """Refuse what the run would refuse, now rather than when the job has waited for hours.

    `cpus`: how many a host has for jobs without GPUs, where that is known.
    """
    from hpcsched.policy import make_policy
    from hpcsched.policy.cpu.configurations import Rules

    devices = given.params["devices"] or given.settings.values.get("devices", "auto")
    stand_ins = re.match(r"(?:cpu|replay):(\d+)", devices)
    here = int(stand_ins[1]) if stand_ins else gpus

    def refuse(job: JobSpec, key: str, got: str, accepted: str) -> ConfigError:
        return ConfigError(where=str(path), key=f"job {job.name}.{key}", got=got, accepted=accepted)

    if file.policy:
        make_policy(file.policy, file.policy_options, where=f"{path}: policy")
    for job in file.jobs:
        if job.nodes > nodes:
            raise refuse(job, "nodes", f"{job.nodes} hosts", f"at most {nodes}, or more --nodes")
        if job.gpus_min > max(here, 1):
            accepted = f"at most {max(here, 1)} on each host, or more --gpus-per-node"
            raise refuse(job, "gpus", f"{job.gpus_min} GPUs", accepted)
        if job.cpus is not None and cpus is not None:
            first = Rules.of(job.strategy).first().cores / WHOLE
            if first > cpus:
                got = f"{first:.4g} cores to start with"
                raise refuse(job, "strategy.cpus", got, f"at most {cpus}, or more --cpus")


def _memory(given: _Given, system: str, gpus: int) -> tuple[str | None, str | None]:
    """Memory on each node, and for each GPU. Sites differ in how LSF is told, and in which units."""
    options = {"mem": "--mem", "mem_per_gpu": "--mem-per-gpu"}
    typed = [key for key in options if given.params[key]]
    if typed and system != "slurm":
        how = {"lsf": '-R "rusage[mem=...]"', "sge": "-l h_vmem=..."}[system]
        accepted = f"--directive '{how}', as the site has it"
        raise ConfigError(where=options[typed[0]], got=system.upper(), accepted=accepted)
    if system != "slurm":
        return None, None
    # What is typed stands for both keys of the files.
    found = {key: given.get(key, key) for key in typed or options}
    for key, value in found.items():
        accepts = config.SCRIPT_KEYS[key]
        if value is not None and not accepts.admits(value):
            raise ConfigError(where=options[key], got=repr(value), accepted=accepts.words)
    on_node, for_gpu = found.get("mem"), found.get("mem_per_gpu") if gpus else None
    if on_node and for_gpu:
        raise ConfigError(where="--mem", got="beside --mem-per-gpu", accepted="one of the two")
    return on_node, for_gpu


def _check_again(
    again: str, system: str, sets: Sequence[Path], output: Path | None, at_once: int | None
) -> None:
    if again == "chain" and len(sets) > 1 and system != "slurm":
        # The follow-up of one element would be the whole array.
        raise ConfigError(where="--chain", got=f"{len(sets)} sets", accepted="one set, or --requeue")
    if again == "chain" and len(sets) > 1 and at_once:
        # Each set is followed by an array of its own.
        raise ConfigError(where="--max-concurrent", got="--chain beside it", accepted="--requeue")
    if again == "chain" and system != "slurm" and output is None:
        raise ConfigError(
            where="--chain",
            got="no file",
            accepted=f"-o FILE: {system.upper()} does not give out the script of a job",
        )


def _dirs(given: _Given, sets: Sequence[Path]) -> list[Path]:
    """A run directory for each set: --dir itself, or of several sets one below it for each."""
    base = Path(given.params["dir_"] or given.settings.values.get("dir") or USUAL).absolute()
    _printable("dir", str(base))
    if len(sets) == 1:
        return [base]
    names = [path.stem for path in sets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            where="JOBS.toml", got=f"two sets called {twice}", accepted="sets with different names"
        )
    return [base / name for name in names]


def _launcher(given: _Given, system: str) -> list[str]:
    from hpcsched.batch import kinds

    launcher = given.get("launcher", "launcher")
    if launcher is None:
        return []
    # A site's file may name that of its own batch system, whatever the script is for.
    known = dict.fromkeys(word for kind in (system, *kinds.BUILT_IN) for word in kinds.load(kind).launchers)
    if launcher not in ("auto", *known):
        raise ConfigError(where="--launcher", got=repr(launcher), accepted=config.KEYS["launcher"].words)
    return ["--launcher", launcher]


def _environment(given: _Given, again: str) -> dict[str, str]:
    """Variables by which the run reads the same settings as this command."""
    found = {}
    for name in ("HPCSCHED_SITE_CONFIG", "HPCSCHED_CONFIG"):
        if value := os.environ.get(name):
            path = Path(value)
            found[name] = _printable(name, str(path.absolute()) if path.exists() else value)
    for key in ("requeue", "chain"):
        if given.settings.values.get(key) and again != key:
            found[config.environment_name(key)] = "0"
    return found


def command_dir() -> dict[str, Any]:
    """The command's folder, and whether it is of an activated environment, whose python the jobs use."""
    command = shutil.which("hpcsched", path=str(Path(sys.executable).parent)) or shutil.which("hpcsched")
    if command is None:
        return {}
    folder = Path(command).absolute().parent
    active = {os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return {"bin_dir": folder, "bin_first": str(folder.parent) in active}
