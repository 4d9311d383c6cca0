"""`hpcsched simulate`: what a job set would take, by the same core and policies as `run`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from hpcsched import jobfile
from hpcsched.cli.common import database_path, json_option, option, parse_options


@click.command()
@click.argument("jobs", type=click.Path(path_type=Path))
@option("--gpus", type=click.IntRange(min=1), required=True, help="GPUs per node.")
@option("--nodes", type=click.IntRange(min=1), default=1, help="Nodes (1).")
@option("--profiles", metavar="F", multiple=True, help="Profile files, or names of shipped ones.")
@option("--policy", metavar="P,...", help="Policies to compare, with commas (marble).")
@option("--policy-option", metavar="K=V", multiple=True, help="An option of the policy; can be repeated.")
@option("--device-type", metavar="T", default="", help="Device type whose profiles count.")
@option("--gantt", metavar="F.svg", type=click.Path(path_type=Path), help="Draw Gantt charts.")
@option("--database", metavar="F", help="SQLite file with profiles.")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    jobs: Path,
    gpus: int,
    nodes: int,
    profiles: tuple[str, ...],
    policy: str | None,
    policy_option: tuple[str, ...],
    device_type: str,
    gantt: Path | None,
    database: str | None,
    as_json: bool,
) -> None:
    """What JOBS.toml would take on NODES hosts with GPUS GPUs each, under one policy or several side by side.

    With several policies an option goes to those that know it.
    """
    from hpcsched.cli.profiles_found import finder
    from hpcsched.cli.results import simulated
    from hpcsched.policy import POLICIES, make_policy
    from hpcsched.report.result import to_json
    from hpcsched.report.tables import comparison_table, headline, job_table

    file = jobfile.load(jobs, workdir=Path.cwd())
    jobfile.check_fits(file.jobs, gpus=gpus, hosts=nodes, where=str(jobs))
    found = finder(profiles, database_path(database))({job.model for job in file.jobs}, device_type)
    from_settings = ctx.get_parameter_source("policy") is click.core.ParameterSource.DEFAULT_MAP
    text = file.policy if file.policy and (policy is None or from_settings) else policy
    names = [name.strip() for name in (text or "marble").split(",")]
    options = parse_options(policy_option)
    for name in names:
        make_policy(name)
    for key in options:
        if not any(key in getattr(POLICIES[name], "OPTIONS", {}) for name in names):
            make_policy(names[0], {key: options[key]}, where="--policy-option")
    results = []
    for name in names:
        known = getattr(POLICIES[name], "OPTIONS", {})
        in_file = file.policy_options if (file.policy or "marble") == name else {}
        own = {**in_file, **{k: v for k, v in options.items() if k in known}}
        results.append(simulated(file.jobs, found, gpus=gpus, nodes=nodes, policy=name, options=own))
    if gantt:
        from hpcsched.report.gantt import gantt_svg

        gantt_svg(results, gantt)
    if as_json:
        sys.stdout.buffer.write(to_json(results) + b"\n")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for result in results:
        click.echo(headline(result))
        click.echo(job_table(result, width=width))
        click.echo()
    if len(results) > 1:
        click.echo(comparison_table(results, width=width))
