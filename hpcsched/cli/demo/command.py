"""`hpcsched demo`: what the program does, shown by a real run of two minutes."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched import config
from hpcsched.cli.common import Number
from hpcsched.cli.demo.text import columns, say, title
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.durations import clock
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.cli.demo.outcome import Stretch
    from hpcsched.cli.demo.queue import Queue
    from hpcsched.core.machine import Machine

FOLDER = "hpcsched-demo"
MOST_FOLDERS = 1000

STOPPED = 130
"""The exit code of a demo that was ended by Ctrl-C."""

WIDEST_CHART = 120
"""Characters (chosen)."""

_INDENT = "   "


@click.command()
@click.option("--dir", "dir_", metavar="D", help="A new folder for all that it writes (./hpcsched-demo).")
@click.option(
    "--seconds",
    metavar="S",
    type=Number(5, 3600),
    default=60.0,
    help="About how long the trainings take one after the other (60).",
)
@click.option("--pretend", is_flag=True, help="Pretended GPUs and trainings, as where PyTorch is missing.")
@click.pass_context
def demo(ctx: click.Context, dir_: str | None, seconds: float, pretend: bool) -> int:
    """See what hpcsched does, in two minutes and without a GPU: it measures two small models, trains a queue
    of them on two CPU slots, and tells what that was worth on this machine.

    Needs PyTorch; without it GPUs and trainings are pretended. All is written into a folder of its own, and
    nothing is left running.
    """
    from hpcsched.cli.demo.queue import measured_queue, pretended_queue

    settings: config.Settings = ctx.obj
    named = settings.values["dir"] if settings.origins.get("dir") == "--dir" else None
    folder = new_folder(dir_ or named)
    ctx.obj = config.Settings()  # the user's are for runs of their own
    try:
        missing = find_spec("torch") is None
        if pretend or missing:
            queue = pretended_queue(folder, missing=missing)
        else:
            queue = measured_queue(folder, seconds)
        code = _run(ctx, queue)
    except (KeyboardInterrupt, SystemExit):  # the latter from measuring, when its processes are gone
        code = STOPPED
    if code not in (WORK_LEFT, STOPPED):
        return code
    click.echo(f"hpcsched: the demo was stopped; nothing of it runs any more ({folder})", err=True)
    return STOPPED


def new_folder(given: str | None) -> Path:
    """Make the folder of a demo: ./hpcsched-demo, or with -2 and so on behind it; or the one given, if it is
    new or empty. Raises ConfigError."""
    accepted = "a new or an empty folder (--dir D)"
    path = Path(given or FOLDER)
    try:
        if given is not None:
            path.mkdir(parents=True, exist_ok=True)
            if not any(path.iterdir()):
                return path
            raise ConfigError(where="--dir", got=f"{path} is not empty", accepted=accepted)
        for number in range(2, MOST_FOLDERS):
            if not os.path.lexists(path):
                path.mkdir()
                return path
            path = Path(f"{FOLDER}-{number}")
    except OSError as error:
        raise ConfigError(where="demo", got=f"{path}: {error.strerror}", accepted=accepted) from error
    raise ConfigError(where="demo", got=f"{FOLDER} to {path} are there", accepted=accepted)


def _run(ctx: click.Context, queue: Queue) -> int:
    """Run the queue and tell what came of it; the exit code of the run."""
    from hpcsched.cli.demo.live import InLines, OnTerminal
    from hpcsched.cli.demo.queue import DATABASE, PRETENDED_PROFILES
    from hpcsched.cli.run.last_words import tell_result
    from hpcsched.cli.run.observers import Display
    from hpcsched.cli.run.results import simulated
    from hpcsched.cli.run.run import conduct

    profiles = list(queue.profiles.values())
    expected = simulated(queue.specs, profiles, gpus=queue.gpus, policy="marble", options={})
    about = clock(expected.makespan_s / queue.speed)
    title(f"{1 if queue.pretended else 2}. Train them (about {about}, as the simulator expects)")
    run = queue.folder / "run"

    def shown(machine: Machine) -> Display:
        on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
        return OnTerminal(machine) if on_terminal else InLines(machine)

    def ended(life: Any) -> int:
        if life.exit_code:
            listed = f"hpcsched status --dir {shlex.quote(str(run))}"
            tell_result(life, as_json=False, gantt=None, compare=(), again="", listed=listed)
        else:
            _tell(queue, run, life.machine)
        return int(life.exit_code)

    return conduct(
        ctx,
        jobs=queue.jobs,
        dir_=str(run),
        devices=queue.devices,
        policy="marble",
        policy_option=(),
        profiles=(PRETENDED_PROFILES,) if queue.pretended else (),
        device_type=None,
        resume=False,
        batch="none",
        hosts=None,
        launcher="auto",
        interface=None,
        margin=60.0,
        requeue=False,
        chain=False,
        chain_script=None,
        max_restarts=0,
        checkpoints=None,
        pyslurm="off",
        warm="auto",
        cpus_per_gpu=8,
        gantt=None,
        compare=(),
        grace=30.0,
        monitor=1.0,
        database=str(queue.folder / DATABASE),
        quiet=False,
        as_json=False,
        display=shown,
        report=ended,
    )


def _tell(queue: Queue, run: Path, machine: Machine) -> None:
    """What came of it: chart, worth, page, and what to try."""
    from hpcsched.cli.demo.outcome import Work, alone_s, best_rates, pace, timeline, value
    from hpcsched.cli.run.results import result_of

    result = result_of(machine)
    title(f"{2 if queue.pretended else 3}. What came of it")
    for line in timeline(result.jobs, queue.gpus, result.noun, min(columns(), WIDEST_CHART) - len(_INDENT)):
        click.echo(_INDENT + line)
    stretches = _stretches(machine)
    rates = best_rates(queue.profiles, stretches, queue.gpus)
    works = [Work(job.model, job.attempts[0].launch_s, job.steps or 0) for job in result.jobs]
    click.echo()
    what = "pretended trainings" if queue.pretended else "trainings"
    say(value(what, len(works), result.makespan_s, alone_s(works, rates)), indent=_INDENT, bold=True)
    say(COMPUTED.format("its profile" if queue.pretended else MEASURED), indent=_INDENT)
    share = pace(queue.profiles, stretches)
    if not queue.pretended and share is not None and share < SLOWED:
        say(SLOWER.format(share), indent=_INDENT)
    if not result.switches:
        say(NOT_PROMOTED, indent=_INDENT)
    click.echo()
    _page(queue.folder / "report.html", run)
    click.echo(f"{_INDENT}Output, checkpoints and journal:     {run}")
    title("Try next")
    for line in next_commands(queue, run):
        click.echo(_INDENT + line)


COMPUTED = (
    "The first time is that of this run. The second is computed: starts as in this run, and the steps of each"
    " training at the best speed of its model, in {}."
)

MEASURED = "part 1 or in this run. Measuring, which is done once for a model, is in neither time"

SLOWED = 0.85
"""Of less than this share of their measured speeds one should know (chosen)."""

SLOWER = (
    "In this run they trained at {:.0%} of the speeds measured, for which each was alone: side by side they"
    " share memory and caches, and the cores with whatever else runs here."
)

NOT_PROMOTED = (
    "No training was promoted: by the speeds measured, more CPU slots would not have paid. So it is where"
    " cores are busy with other work, or where there is only one."
)


def _stretches(machine: Machine) -> list[Stretch]:
    from hpcsched.cli.demo.outcome import Stretch
    from hpcsched.cli.run.results import overhead_s

    found = []
    for job in machine.run.jobs.values():
        for attempt in job.attempts:
            last = job.step if attempt.to_step is None else attempt.to_step
            held_s = (machine.run.now if attempt.end_s is None else attempt.end_s) - attempt.start_s
            found.append(
                Stretch(
                    model=job.spec.model,
                    devices=len(attempt.gpus),
                    steps=last - attempt.from_step + attempt.again,
                    trained_s=held_s - overhead_s(machine, job, attempt),
                )
            )
    return found


def _page(page: Path, run: Path) -> None:
    """Write the page of the run, and say where it is, or what is missing for it."""
    from hpcsched.cli.run.report import write_page
    from hpcsched.report.drawing import MissingExtra
    from hpcsched.store.rundir import RunDir

    try:
        write_page([RunDir(run.absolute())], page.absolute())
        click.echo(f"{_INDENT}The run as a page (hpcsched report): {page}")
    except MissingExtra as error:
        say(f"No page of the run: {error}", indent=_INDENT)


def next_commands(queue: Queue, run: Path) -> list[str]:
    """Command lines to go on with, the last one for a program of the user's."""
    from hpcsched.cli.demo.queue import PRETENDED_PROFILES

    last, jobs = queue.specs[-1].name, shlex.quote(str(queue.jobs))
    if queue.pretended:
        what = f"--gpus-per-node {queue.gpus} --profiles {PRETENDED_PROFILES}"
        other = f"hpcsched simulate {jobs} {what} --policy marble,planner"
    else:
        other = f"hpcsched script slurm {jobs} --gpus-per-node {queue.gpus} --time 1h"
    return [
        f"hpcsched explain {last} --dir {shlex.quote(str(run))}",
        other,
        "hpcsched run --each lr=1e-3,1e-2 -- python train.py --lr {lr}",
    ]
