"""`hpcsched plan ps`: which servers and workers a training on CPU cores would come to, and how."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import Number, json_option, needs_numpy
from hpcsched.contract.seats import Seat
from hpcsched.core.mechanisms.cpu.cores import WHOLE
from hpcsched.core.mechanisms.cpu.layout import cores_of, said_seats
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.model import Attempt, JobSpec, JobState, Kind
from hpcsched.core.reasons import Why
from hpcsched.errors import ConfigError, HpcschedError

if TYPE_CHECKING:
    from hpcsched.planning.ps.training import PsTraining
    from hpcsched.planning.ps.whatif.best import PsConfiguration

RULES = ("dtconfig", "optimus", "fixed")
"""Named here too, such that --help need not import numpy."""

MOST_CORES = 4096
"""Of a plan: the best configuration is found by trying all."""

LONGEST_S = 7 * 86_400.0
"""What happens later is not looked at."""

WORKERS_BY_CORES = 4
"""Cores for each worker of the best configuration, which has at least `LEAST_WORKERS`."""
LEAST_WORKERS = 36

_MIB = 2**20
_MOST_STEPS = 2**53
_SAID = {
    Why.SEATED: "start",
    Why.MORE_CORES: "more cores",
    Why.NETWORK_BOTTLENECK: "network bottleneck: more servers",
    Why.UTILISATION_BOTTLENECK: "utilisation bottleneck: more workers",
    Why.MORE_SERVERS: "nothing else helped or was free: more servers",
    Why.MORE_WORKERS: "nothing else helped or was free: more workers",
    Why.FEWER_WORKERS: "nothing else helped or was free: fewer workers",
    Why.AT_ONCE: "one alone did not help: several changes at once",
    Why.TRIMMED: "cores that were not used",
    Why.BEST_SEEN: "the best seen",
}


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The way of a rule: the configurations one after the other, and the steps per second of each."""

    stretches: Sequence[Attempt]
    rates: Sequence[float]
    rests: bool = True


# No environment variables: HPCSCHED_CPUS_PER_GPU, for one, is of a run.
@click.command()
@click.argument("file", metavar="FILE")
@click.option("--model", metavar="M", help="One of the models in FILE.")
@click.option("--cpus", type=Number(min=0.3, max=MOST_CORES), metavar="N", help="CPU cores of the training.")
@click.option(
    "--link",
    type=Number(min=0, min_open=True, max=1e9),
    metavar="MIB/S",
    help="Link of each server, instead of what FILE says.",
)
@click.option("--rule", "rules", metavar="R[,R...]", help=f"Rules; default: {','.join(RULES)}.")
@json_option
@click.pass_context
def ps(
    ctx: click.Context,
    file: str,
    model: str | None,
    cpus: float | None,
    link: float | None,
    rules: str | None,
    as_json: bool,
) -> None:
    """The parameter servers and workers of a training on N CPU cores, and the steps that lead to them.

    FILE is JSON with models of trainings (see docs/ps-plans.md), or the name of shipped ones (nearchus-a,
    nearchus-b). Shows the steps of the first rule, and the speeds of all rules and of the best
    configuration.
    """
    where, trainings = trainings_in(file)
    if model is None and len(trainings) == 1:
        (model,) = trainings
    if model not in trainings:
        got = "missing" if model is None else f"{model!r} is not in {where}"
        raise ConfigError(where="--model", got=got, accepted=", ".join(trainings))
    if cpus is None:
        raise ConfigError(where="--cpus", got="missing", accepted="the cores that it may have, such as 100")
    needs_numpy()
    from hpcsched.planning.ps.model import NetworkLink
    from hpcsched.planning.ps.whatif.best import best

    training = trainings[model]
    if link is not None:
        training = replace(training, link=NetworkLink(bytes_s=link * _MIB))
    ways = {rule: _way(rule, model, training, cpus) for rule in _rules(rules)}
    most_workers = max(LEAST_WORKERS, int(cpus / WORKERS_BY_CORES))
    found = best(training.model, cpus, training.link, most_workers=most_workers)
    if as_json:
        click.echo(json.dumps(_table(model, training, cpus, ways, found)))
    else:
        click.echo(_text(model, cpus, ways, found))


def trainings_in(file: str) -> tuple[str, dict[str, PsTraining]]:
    """The name of a file for errors, and its trainings by model; `file` may name shipped ones."""
    from hpcsched.planning.ps.whatif.models_file import parse

    path = Path(file)
    if not path.exists() and path.name == file:
        from hpcsched.store.profiles import shipped

        known = shipped("ps")
        if (name := path.name.removesuffix(".json")) not in known:
            accepted = f"a file, or the name of shipped models ({', '.join(known)})"
            raise ConfigError(where=file, got="no such file", accepted=accepted)
        path = known[name]
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(where=file, got=str(error.strerror), accepted="a readable JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=file, got=f"not readable: {error}", accepted="JSON") from error
    return str(path), parse(table, where=str(path))


def _rules(text: str | None) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text is not None else list(RULES)
    for name in names:
        if name not in RULES:
            raise ConfigError(where="--rule", got=repr(name), accepted=", ".join(RULES))
    return list(dict.fromkeys(names))


def _way(rule: str, model: str, training: PsTraining, cpus: float) -> _Way | None:
    """The way of a job that has the cores for itself; None if there are too few for its rule."""
    from hpcsched.planning.ps.model import even_seats, usage
    from hpcsched.planning.ps.whatif.best import NODE_CORES
    from hpcsched.planning.ps.whatif.optimus import NODE_INTERVAL_S
    from hpcsched.policy.cpu.configurations import Rules
    from hpcsched.policy.cpu.dtconfig import MOST_CHANGES, ScalingSearch
    from hpcsched.sim.engine import Simulation
    from hpcsched.sim.fixed_nodes import MIN_CORES, Rule

    if cpus < MIN_CORES[rule]:
        return None
    strategy = {"kind": "ps", "cpus": cpus}
    job = JobSpec(
        name="job",
        kind=Kind.TRAINER,
        model=model,
        trainer="job:Job",
        steps=_MOST_STEPS,
        gpus_min=0,
        gpus_max=0,
        strategy=strategy,
    )
    ruled = Rule.of(rule, {model: training}, cpus)
    simulation = Simulation([job], (), cpus=ceil(cpus), trainings=ruled.trainings, make=ruled.make)
    if rule == "dtconfig":
        first = Rules.of(strategy)
        share = first.first().servers[0] / WHOLE
        step_s = 1 / usage(training.model, even_seats(*first.counts, share, share), training.link).rate
        each_s = training.build_s + training.change_s + training.stable_s + 2 * step_s
        until = training.start_s + (MOST_CHANGES + 2) * each_s
    else:
        until = training.start_s + (cpus / NODE_CORES + 1) * 1.1 * NODE_INTERVAL_S
    machine = simulation.run(until=min(until, LONGEST_S))
    (done,) = machine.run.jobs.values()
    if done.state is not JobState.RUNNING:
        raise HpcschedError(f"{rule}: the training does not go on: {done.story[-1].reason}")
    memory = machine.mechanism(Cpu).cores.of[done.id].memory
    return _Way(
        stretches=done.attempts,
        rates=[usage(training.model, each.seats, training.link).rate for each in done.attempts],
        rests=not isinstance(memory, ScalingSearch) or memory.rests,
    )


def _table(
    model: str, training: PsTraining, cpus: float, ways: Mapping[str, _Way | None], best: PsConfiguration
) -> dict[str, Any]:
    """The page that is printed as JSON."""
    rules: dict[str, Any] = {}
    for rule, way in ways.items():
        rules[rule] = way and {
            **_configuration(way.stretches[-1].seats),
            "rate": way.rates[-1],
            "efficiency": _used(way.stretches[-1]),
            "of_best": way.rates[-1] / best.usage.rate,
            "changes": len(way.stretches) - 1,
            "since_s": way.stretches[-1].start_s,
            "rests": way.rests,
            "way": [
                {
                    "start_s": each.start_s,
                    **_configuration(each.seats),
                    "rate": rate,
                    "efficiency": _used(each),
                    "why": str(each.why),
                }
                for each, rate in zip(way.stretches, way.rates, strict=True)
            ],
        }
    link = training.link.bytes_s / _MIB if training.link else None
    yardstick = {
        **_configuration(best.seats),
        "rate": best.usage.rate,
        "efficiency": sum(best.usage.cpu) / cpus,
    }
    return {"schema": 1, "model": model, "cpus": cpus, "link_mib_s": link, "rules": rules, "best": yardstick}


def _configuration(seats: Sequence[Seat]) -> dict[str, list[float]]:
    return {
        "servers": [seat.share for seat in seats if seat.server],
        "workers": [seat.share for seat in seats if not seat.server],
    }


def _used(stretch: Attempt) -> float | None:
    """The part of its cores that was measured to be in use; None: it was over before."""
    return sum(stretch.usage.cpu) / cores_of(stretch.seats) if stretch.usage else None


def _text(model: str, cpus: float, ways: Mapping[str, _Way | None], best: PsConfiguration) -> str:
    """The first rule's way, a line for each configuration; a line for each rule."""
    from hpcsched.profiling.draw import aligned
    from hpcsched.sim.fixed_nodes import MIN_CORES

    shown: list[str] = []
    rule, first = next(iter(ways.items()))
    if first is not None:
        steps = [("TIME(s)", "STEPS/S", "CORES", "USED", "CONFIGURATION", "WHY")]
        for each, rate in zip(first.stretches, first.rates, strict=True):
            cores, said = f"{cores_of(each.seats):.4g}", said_seats(each.seats)
            had = cores, _percent(_used(each))
            steps.append((f"{each.start_s:.0f}", f"{rate:.4g}", *had, said, _why(each)))
        shown.append(aligned(steps, left=(4, 5)))
    rows = [("RULE", "STEPS/S", "OF-BEST", "CORES", "USED", "CHANGES", "SINCE(s)", "CONFIGURATION")]
    for name, way in ways.items():
        if way is None:
            few = f"needs {MIN_CORES[name]:g} cores to start with"
            rows.append((name, "-", "-", "-", "-", "-", "-", few))
            continue
        last = way.stretches[-1]
        speed = f"{way.rates[-1]:.4g}", f"{way.rates[-1] / best.usage.rate:.2f}"
        had = f"{cores_of(last.seats):.4g}", _percent(_used(last))
        rows.append(
            (name, *speed, *had, str(len(way.stretches) - 1), f"{last.start_s:.0f}", said_seats(last.seats))
        )
    had = f"{cores_of(best.seats):.4g}", _percent(sum(best.usage.cpu) / cpus)
    rows.append(("best", f"{best.usage.rate:.4g}", "1.00", *had, "-", "-", said_seats(best.seats)))
    shown.append(aligned(rows, left=(0, 7)))
    if first is not None and not first.rests:
        shown.append(f"note: {rule} is still searching")
    return "\n".join([f"{model} on {cpus:g} cores, by {rule}:", *shown]).rstrip("\n")


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _why(stretch: Attempt) -> str:
    """The reason for a configuration, as short as it fits into a line."""
    if stretch.why is None:
        return "-"
    facts = stretch.why.facts
    if stretch.why.why is Why.BALANCED:
        return f"{facts['low']} used {facts['least']:.0%} of theirs, {facts['high']} {facts['most']:.0%}"
    return _SAID[stretch.why.why]
