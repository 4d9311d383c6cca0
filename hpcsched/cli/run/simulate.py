"""`hpcsched simulate`: what jobs would take under some policies, by the same core and policies as `run`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import (
    Number,
    check_chart,
    gpus_per_node_option,
    hint_at_gpus_per_node,
    json_option,
    naming_the_file,
    option,
    plural,
    say,
)
from hpcsched.cli.run import policies
from hpcsched.cli.run.allocations import FORM, WHERE, allocations_of
from hpcsched.cli.run.simulation_inputs import (
    MOST_KEPT,
    SHIPPED,
    CpuOptions,
    ProfileSource,
    Scenario,
    of_file,
    of_run,
    of_trace,
)
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.report.result import Result

MOST_LISTED = 50
"""Jobs of a trace or a run: with more of them the table of one policy's jobs is left out."""

MOST_SIMULATED = 2**17
"""GPUs of all nodes together, and cores, that are simulated at most (chosen)."""

MOST_DRAWN = 1000
"""Most jobs in a chart: with more they cannot be told apart."""

_PLAIN_HEIGHT = 24
"""Lines of a screen, where there is no terminal to ask."""


_POLICIES = f"Policies to compare, with commas: {policies.ALL}; of a run: its own."


@click.command()
@click.argument("jobs", metavar="[JOBS.toml]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--trace", metavar="F.csv", type=click.Path(path_type=Path), help="A CSV trace, instead of JOBS.toml."
)
@click.option("--workload", metavar="W", default="", help="Workload, of a trace that has several.")
@click.option(
    "--run",
    "run_dir",
    metavar="[DIR]",
    is_flag=False,
    flag_value="",
    help="The jobs of a run, instead of JOBS.toml, beside how it went; it is only read.",
)
@gpus_per_node_option("GPUs on each node (of a run: its own).")
@option("--nodes", metavar="N", type=click.IntRange(min=1), help="Nodes (1; of a run: its own).")
@click.option(
    "--allocation",
    "asked",
    metavar=FORM,
    multiple=True,
    help="Nodes that come at START and go after TIME, of the device type TYPE; can be repeated.",
)
@option(
    "--cpus",
    metavar="N",
    type=click.IntRange(min=1),
    help="Cores of each node for jobs on CPU cores (of a run: its own).",
)
@option(
    "--ps",
    metavar="F",
    multiple=True,
    help=f"Models of jobs on CPU cores: files, or names of shipped ones ({SHIPPED}).",
)
@option("--profiles", metavar="F", multiple=True, help="Profile files, or names of shipped ones.")
@option(
    "--policy", metavar="P,...", cls=policies.OnceWithCommas, shell_complete=policies.complete, help=_POLICIES
)
@option("--policy-option", metavar="K=V", multiple=True, help="An option of the policy; can be repeated.")
@option("--device-type", metavar="T", default="", help="Device type whose profiles count.")
@option(
    "--background-share",
    metavar="X",
    type=Number(0, 1, min_open=True),
    default=0.5,
    help="Speed of a background job beside another, relative to its speed alone (0.5).",
)
@option(
    "--foreground-slowdown",
    metavar="X",
    type=Number(0, 1, max_open=True),
    default=0.03,
    help="Slowdown of the foreground job beside it, relative to its speed alone (0.03).",
)
@option(
    "--release-idle-nodes",
    metavar="MINUTES",
    type=Number(min=0),
    help="Minutes after which nodes that nothing could use are given back, as by run; default: never.",
)
@click.option("--jobs", "list_jobs", is_flag=True, help="List all jobs of each policy.")
@option("--gantt", metavar="F.svg", type=click.Path(path_type=Path), help="Draw Gantt charts.")
@option("--database", metavar="F", help="SQLite file with profiles.")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    jobs: Path | None,
    trace: Path | None,
    workload: str,
    run_dir: str | None,
    gpus_per_node: int | None,
    nodes: int | None,
    asked: tuple[str, ...],
    cpus: int | None,
    ps: tuple[str, ...],
    profiles: tuple[str, ...],
    policy: str | None,
    policy_option: tuple[str, ...],
    device_type: str,
    background_share: float,
    foreground_slowdown: float,
    release_idle_nodes: float | None,
    list_jobs: bool,
    gantt: Path | None,
    database: str | None,
    as_json: bool,
) -> None:
    """The time that jobs would take, under one policy or several side by side.

    The jobs are those of JOBS.toml, of a CSV trace, or of a run, whether it is over or not; without DIR that
    is the run in --dir. With several policies an option goes to those that know it. Allocations come and go
    beside the nodes that are there all the time, or instead of them.
    """
    given = {"JOBS.toml": jobs is not None, "--trace": trace is not None, "--run": run_dir is not None}
    if sum(given.values()) != 1:
        got = " and ".join(name for name, there in given.items() if there) or "no jobs"
        accepted = "one of JOBS.toml, --trace F.csv and --run [DIR]"
        raise ConfigError(where="simulate", got=got, accepted=accepted)
    if workload and trace is None:
        raise ConfigError(where="--workload", got=repr(workload), accepted="with --trace only")
    blocks = allocations_of(asked, gpus_per_node, nodes, cpus, device_type)
    on_cores = CpuOptions(cpus, ps)
    source = ProfileSource(profiles, database, device_type)
    if run_dir is not None:
        if any(block.gpu_type for block in blocks):
            raise ConfigError(where=WHERE, got="a TYPE with --run", accepted="one with JOBS.toml or --trace")
        explicit = ctx.get_parameter_source("profiles") is click.core.ParameterSource.COMMANDLINE
        known = profiles if explicit else ()
        scenario = of_run(ctx, run_dir or None, gpus_per_node, nodes, blocks, on_cores, known, device_type)
    elif trace is not None:
        scenario = of_trace(trace, workload, gpus_per_node, nodes or 1, blocks, source)
    else:
        assert jobs is not None
        scenario = of_file(jobs, gpus_per_node, nodes or 1, blocks, on_cores, source)
    _check_size(scenario)
    hint_at_gpus_per_node(ctx, scenario.nodes)
    if gantt:
        _check_drawable(gantt, len(scenario.jobs))
    chosen = policies.for_simulation(ctx, policy, policy_option, (scenario.policy, scenario.options))
    with naming_the_file(jobs or trace):
        results = simulated_under(
            scenario,
            chosen,
            (background_share, foreground_slowdown),
            release_after_s=None if release_idle_nodes is None else 60 * release_idle_nodes,
            keep=list_jobs,
        )
    if gantt:
        from hpcsched.report.gantt import gantt_svg

        try:
            gantt_svg(results, gantt)
        except OSError as error:
            raise ConfigError(where="--gantt", got=f"{gantt}: {error.strerror}", accepted="a file") from error
    for note in (*scenario.notes, *_left(results)):
        say(f"hpcsched: {note}", err=True)
    if as_json:
        from hpcsched.printing import json_for_terminals
        from hpcsched.report.result import to_json

        click.echo(json_for_terminals(to_json(results)))
    else:
        _show(scenario, results, list_jobs=list_jobs)


def _check_size(scenario: Scenario) -> None:
    most = max(1, scenario.gpus, scenario.cpus) * scenario.nodes
    if most > MOST_SIMULATED:
        got = f"{scenario.nodes} nodes with {scenario.gpus} GPUs and {scenario.cpus} cores each"
        accepted = f"at most {MOST_SIMULATED} GPUs, and as many cores, on all nodes"
        raise ConfigError(where="simulate", got=got, accepted=accepted)


def simulated_under(
    scenario: Scenario,
    chosen: Mapping[str, dict[str, Any]],
    sharing: tuple[float, float],
    *,
    release_after_s: float | None,
    keep: bool,
) -> list[Result]:
    """The results of the scenario: as it went, if it did, and under each policy.

    `sharing`: what background jobs have beside others, and what they cost these. `release_after_s`: see
    `Simulation`.
    """
    from hpcsched.cli.run.progress import ProgressLine
    from hpcsched.cli.run.results import MOST_STORIES, Bounds, result_of
    from hpcsched.sim.blocks import joining, placed
    from hpcsched.sim.engine import Simulation
    from hpcsched.sim.interference import Interference

    blocks = scenario.blocks
    interference = Interference(background_share=sharing[0], foreground_slowdown=sharing[1])
    many = len(scenario.jobs) > MOST_KEPT
    results: list[Result] = []
    bounds = None
    for name, options in chosen.items():
        with ProgressLine(name, len(scenario.jobs)) as progress:
            simulation = Simulation(
                scenario.jobs,
                scenario.profiles,
                on_types=scenario.on_types,
                gpus=0 if blocks else scenario.gpus,
                nodes=1 if blocks else scenario.nodes,
                cpus=0 if blocks else scenario.cpus,
                happenings=joining(placed(blocks), scenario.cpus),
                trainings=scenario.trainings,
                parallel=scenario.parallel,
                policy=name,
                options=options,
                interference=interference,
                release_after_s=release_after_s,
                stories=len(scenario.jobs) <= MOST_STORIES,
                watch=progress.watch,
            )
            result = result_of(simulation.run(), bounds=bounds, keep_jobs=keep or not many, blocks=blocks)
        bounds = bounds or Bounds(result.lower_bound_s, result.mean_jct_bound_s)
        results.append(_as_in_the_run(result, scenario) if scenario.was else result)
    return results if scenario.was is None else [scenario.was, *results]


def _as_in_the_run(result: Result, scenario: Scenario) -> Result:
    """The result with the jobs' ids and models of the run, as those of the simulation count from 1, and with
    the run's kinds of devices."""
    from msgspec import UNSET
    from msgspec.structs import replace

    jobs = []
    for job in result.jobs:
        job_id, model = scenario.ids[job.id - 1]
        jobs.append(replace(job, id=job_id, model=model))
    devices = scenario.was.devices if scenario.was else UNSET
    return replace(result, jobs=tuple(jobs), devices=devices)


def _left(results: list[Result]) -> list[str]:
    """What is left of the jobs when the last allocation is over, by policy."""
    return [
        f"{result.title}: {plural(left, 'job')} of {result.jobs_total} not done in these allocations"
        for result in results
        if result.allocations and (left := result.jobs_total - result.jobs_completed)
    ]


def _check_drawable(path: Path, jobs: int) -> None:
    if jobs > MOST_DRAWN:
        raise ConfigError(where="--gantt", got=f"{jobs} jobs", accepted=f"at most {MOST_DRAWN}")
    check_chart(path)


def _show(scenario: Scenario, results: list[Result], *, list_jobs: bool) -> None:
    """One policy with its jobs, or several on one screen: a line per job is there where it fits."""
    from hpcsched.report.tables import allocation_table, comparison_table, headline, job_table, side_by_side

    size = shutil.get_terminal_size() if sys.stdout.isatty() else None
    width = size.columns if size else None
    with_allocations = [result for result in results if result.allocations]
    used = f"\n\n{allocation_table(with_allocations, width=width)}" if with_allocations else ""
    if len(results) == 1 and (scenario.file or list_jobs or len(scenario.jobs) <= MOST_LISTED):
        measures = comparison_table(results, width=width) + used
        say(f"{headline(results[0])}\n{job_table(results[0], width=width)}\n\n{measures}", lines=True)
        return
    title = f"{scenario.where}: {plural(len(scenario.jobs), 'job')} on {scenario.place}"
    if scenario.was is not None and scenario.was.gpus != scenario.gpus_in_all:
        title += f"; {scenario.was.label} on {scenario.was.gpus}"
    base = 0 if scenario.over else min(1, len(results) - 1)
    measures = comparison_table(results, width=width, base=base) + used
    if list_jobs:
        for result in results:
            say(f"{headline(result)}\n{job_table(result, width=width)}\n", lines=True)
        say(f"{title}\n{measures}", lines=True)
        return
    above = [title, *(f"hpcsched: {note}" for note in (*scenario.notes, *_left(results)))]
    taken = sum(-(-len(line) // (width or 80)) for line in above)
    room = (size.lines if size else _PLAIN_HEIGHT) - 1 - taken - measures.count("\n") - 1
    if len(scenario.jobs) <= room:  # a quick look first: tables of a million lines are not to be made
        jobs = side_by_side(results, width=width)
        if jobs.count("\n") + 2 <= room:
            say(f"{title}\n{jobs}\n\n{measures}", lines=True)
            return
    say(f"{title} (--jobs lists them)\n{measures}", lines=True)
