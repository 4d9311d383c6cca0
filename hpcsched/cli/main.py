"""The command line. Each command's module is imported when it is used: login nodes are slow."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from hpcsched import __version__, config, errors
from hpcsched.cli import examples
from hpcsched.errors import HpcschedError
from hpcsched.printing import bounded, printable, shortened, suggestion
from hpcsched.stability import marked

_GROUPS = {
    "Run": {
        "demo": ("demo.command:demo", "See what hpcsched does: a small queue of real trainings, on CPUs."),
        "run": ("run.run:run", "Run a set of jobs in this allocation until all have ended."),
        "submit": ("jobs.control:submit", "Put jobs into a run, running now or next."),
        "drain": ("jobs.control:drain", "Save all jobs and stop the run."),
        "join": ("run.join:join", "Lend the hosts of this allocation to a run in another one."),
        "pool": ("pool.group:pool", "Ask for allocations as a run needs them, and give them back."),
        "clean": ("run.clean:clean", "What runs that are over have left on disk; removes what you ask for."),
        "tune": ("run.tune:tune", "Search hyperparameters of a program or a trainer: Hyperband, ASHA."),
    },
    "Look": {
        "status": ("jobs.status:status", "The run's jobs, like squeue; --all lists your runs."),
        "top": ("jobs.top:top", "A live view of the run, on any host that sees its directory."),
        "explain": ("jobs.explain:explain", "Why a job waits, why it has this many GPUs, what is next."),
        "logs": ("jobs.logs:logs", "A job's output."),
        "metrics": ("jobs.metrics:metrics", "What a job has logged by step: a table, CSV or JSON."),
        "wait": ("jobs.control:wait", "Wait until jobs (default: all) have ended."),
        "history": ("jobs.history:history", "Finished jobs of this and earlier runs, like sacct."),
        "efficiency": (
            "run.efficiency:efficiency",
            "What jobs made of the GPUs they held, like seff.",
        ),
        "report": ("run.report:report", "A run as an HTML page: Gantt chart, utilisation, efficiency."),
    },
    "Jobs": {
        "cancel": ("jobs.control:cancel", "End jobs for good."),
        "hold": ("jobs.control:hold", "Keep waiting jobs from starting."),
        "release": ("jobs.control:release", "Let held jobs go."),
        "suspend": ("jobs.control:suspend", "Have running jobs save and leave their GPUs until resumed."),
        "resume": ("jobs.control:resume", "Let suspended jobs go on."),
        "retry": ("jobs.control:retry", "Run jobs that have ended again."),
    },
    "Measure and plan": {
        "profile": ("profile.group:profile", "Measure how models scale, and look after the profiles."),
        "simulate": ("run.simulate:simulate", "What a job set would take, by the same policies."),
        "advise": ("run.advise:advise", "What to ask for: how many GPUs, for how long, in which partition."),
        "plan": ("plan.group:plan", "The planners on their own: layers, packs, servers, stream workers."),
    },
    "Site": {
        "script": ("site.script:script", "Print a batch script for Slurm or LSF that runs job sets."),
        "doctor": ("site.doctor:doctor", "What was found on this machine, and in this allocation."),
        "config": ("site.settings:config_group", "Settings and where they come from."),
        "journal": ("run.journal:journal_group", "Check and mend a run's journal."),
        "completion": ("site.completion:completion", "Completion of commands, options and jobs in a shell."),
    },
}
_COMMANDS = {name: about for group in _GROUPS.values() for name, about in group.items()}


class _LazyGroup(click.Group):
    """Imports a command's module when the command is called; help needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name][0].partition(":")
        command = getattr(importlib.import_module(f"hpcsched.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        _mark(command, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, _COMMANDS))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                rows = [(name.ljust(longest), marked(text)) for name, (_, text) in commands.items()]
                formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            text = error.format_message()
            if "did you mean" not in text.lower():  # as newer click says by itself
                text = text.rstrip(".") + suggestion(args[0], _COMMANDS)
            raise click.UsageError(f"{text} (see hpcsched --help)", ctx) from None


def _mark(command: click.Command, path: str) -> None:
    """Mark in a command's help what is experimental, and in that of its subcommands."""
    short = command.get_short_help_str(limit=80)
    if marked(short, command=path) != short:
        command.short_help = marked(short, command=path)
    command.help = marked(command.help or "", command=path)
    command.epilog = examples.of(path) or None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.help:
            parameter.help = marked(parameter.help)
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            _mark(below, f"{path} {name}")


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpcsched")
@click.option("--dir", "dir_", metavar="D", envvar="HPCSCHED_DIR", help=config.DIR)
@click.option("--config", "config_file", metavar="F", envvar="HPCSCHED_CONFIG", help="Project settings file.")
@click.option("-v", "--verbose", is_flag=True, help="Say more on stderr; show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, dir_: str | None, config_file: str | None, verbose: bool) -> None:
    """hpcsched: runs your whole queue of trainings inside one batch allocation."""
    settings = config.load(os.environ, here=Path.cwd(), config=Path(config_file) if config_file else None)
    if ctx.invoked_subcommand != "config":  # which says it itself, where it matters
        for line in settings.passed_over:
            click.echo(f"hpcsched: {line}", err=True)
    if dir_ is not None:
        origin = ctx.get_parameter_source("dir_")
        settings.values["dir"] = dir_
        by_flag = origin is click.core.ParameterSource.COMMANDLINE
        settings.origins["dir"] = "--dir" if by_flag else "HPCSCHED_DIR"
    ctx.obj = settings
    shared = {k: v for k, v in settings.values.items() if k not in ("dir", "policy_option", "script")}
    ctx.default_map = dict.fromkeys(_COMMANDS, shared) | {
        "profile": {**dict.fromkeys(("run", "layers", "pack", "vsw"), shared), **shared},
        # What `run` reads from the same files when the batch job starts needs no place in the script.
        "script": {k: v for k, v in shared.items() if k in ("margin", "max_restarts")},
    }


def main() -> None:
    """Entry point: turns errors raised on purpose into one line and their exit code."""
    verbose = any(a in ("-v", "--verbose") for a in sys.argv[1:])
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # what is no UTF-8, as a file's name may be, is shown escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = cli(prog_name="hpcsched", standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        error.show(shown := io.StringIO())
        usage, mark, text = shown.getvalue().partition("Error: ")  # or a help page, with no mark
        if isinstance(error, click.MissingParameter):  # its choices stand in lines of their own
            text = " ".join(text.split())
        lines = all(word.isprintable() for word in sys.argv)
        click.echo(usage + mark + bounded(text.rstrip("\n"), lines=lines), err=True)
        code = error.exit_code
    except HpcschedError as error:
        if verbose:
            raise
        story = isinstance(error, errors.InvalidTransition)  # the only one that has lines on purpose
        click.echo(f"hpcsched: {bounded(str(error), lines=story)}", err=True)
        code = error.exit_code
    except BrokenPipeError:
        # The reader has seen enough (| head); say nothing when the interpreter flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:
        if verbose or error.filename is None:
            raise
        name = shortened(printable(str(error.filename)), errors.MOST_SHOWN)
        click.echo(f"hpcsched: {name}: {error.strerror}", err=True)
        code = 2 if error.errno == errno.ENAMETOOLONG else 1
    sys.exit(code if isinstance(code, int) else 0)
